"""What a leader is: given the goal and everything that has happened, it says what to do next.

`plan` is a pure function of its arguments: the same goal and history give the same bytes, so a restart recomputes the
plan it was carrying out. It is called when every run of the last plan is terminal, never in between (no peeking). It
starts nothing, writes nothing and reads no clock; verdicts and numbers come from `a3r.analysis`, whoever plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from pydantic import Field

from a3r.blueprint import Blueprint
from a3r.formats import Part, Scalar, canonical, dump, sha256, to_yaml
from a3r.goal import GoalLock
from a3r.results import Observation
from a3r.rules import Rule


class Purpose(StrEnum):
    """Why an arm's seeds run; also the order in which they are worth a slot, first first."""

    CALIBRATE = "calibrate"
    DECIDE = "decide"
    CONFIRM = "confirm"
    SCREEN = "screen"
    MODERATE = "moderate"


class Arm(Part):
    """A blueprint and the seeds to have by the end of this stage; seeds that already ran are not run again."""

    blueprint: Blueprint
    """Sealed; its `seeds` are this stage's."""
    level: Scalar
    """Of the question's factor."""
    cell: dict[str, Scalar] = Field(default_factory=dict)
    """Levels of the moderators; empty when there are none."""
    purpose: Purpose

    @property
    def name(self) -> str:
        return self.blueprint.name

    @property
    def seeds(self) -> list[int]:
        return self.blueprint.seeds


class Number(Part):
    """A value with its address: recomputing `fn` over `src` from the run records must give `v` again."""

    v: float | None
    """None: cannot be computed from these sources (too few runs)."""
    fn: str
    """A name in `a3r.analysis.FUNCTIONS`."""
    src: list[str] = Field(default_factory=list)
    """`run:metric@selector`, in order."""
    ref: list[str] = Field(default_factory=list)
    """The second group of a two-group function."""
    params: dict[str, float] = Field(default_factory=dict)


class Verdict(StrEnum):
    """Class of a study's answer."""

    SUPPORTED = "SUPPORTED"
    REFUTED = "REFUTED"
    UNDECIDED = "UNDECIDED"
    NON_MONOTONE = "NON_MONOTONE"
    NOT_MEASURED = "NOT_MEASURED"


class ArmRow(Part):
    """One arm in a decision's table."""

    arm: str
    level: Scalar
    cell: dict[str, Scalar] = Field(default_factory=dict)
    mark: str
    """passes, fails, undecided, best, not best, …"""
    rule: str = ""
    """The pre-registered rule that fired, as written."""
    look: int | None = None
    """Seeds per arm of the look at which the mark fell."""
    planned: int = 0
    numbers: dict[str, Number] = Field(default_factory=dict)
    """n, mean, sd, ci_low, ci_high, diff, …"""
    excluded: dict[str, str] = Field(default_factory=dict)
    """Run → failure class of the runs that are no observations."""
    robust: bool | None = None
    """The mark survives setting each missing run to the worst and to the best observed value; None: none missing."""


class CellAnswer(Part):
    """The answer at one combination of moderator levels."""

    cell: dict[str, Scalar] = Field(default_factory=dict)
    verdict: Verdict
    level: Scalar | None = None
    lo: Scalar | None = None
    """Largest level known to fail (min_that_still), None when open to that side."""
    hi: Scalar | None = None
    """Smallest level known to pass with all tested levels above it."""
    sentence: str


class Decision(Part):
    """The end of a study."""

    kind: Literal["decision"] = "decision"
    verdict: Verdict
    sentence: str
    level: Scalar | None = None
    answers: list[CellAnswer] = Field(default_factory=list)
    """One per moderator cell, the first moderator level first."""
    table: list[ArmRow] = Field(default_factory=list)
    headline: Number | None = None
    """The answer's value on fresh seeds."""
    selected: Number | None = None
    """The same arm's value on the seeds that chose it."""
    noise: Number | None = None
    tests: dict[str, Number] = Field(default_factory=dict)
    """Named numbers beyond the table: interaction, pooled sd, …"""
    notes: list[str] = Field(default_factory=list)
    """Deviations and warnings a reader must see."""
    next: list[str] = Field(default_factory=list)
    """Open questions and experiments that would answer them."""

    def to_yaml(self) -> str:
        return to_yaml(dump(self))


class Plan(Part):
    """One stage: run these arms, then ask again."""

    kind: Literal["plan"] = "plan"
    stage: int = Field(ge=0)
    title: str
    """What the stage is for, in a few words: calibrate, screen, look 6, confirm."""
    reasoning: str
    """Why, for people; in the LLM leader its own words."""
    arms: list[Arm] = Field(min_length=1)
    rules: list[Rule] = Field(default_factory=list)
    """Registered with the stage: what will follow from which outcome."""
    look: int | None = None
    """Seeds per arm this stage reaches, where a verdict may fall; None in stages that decide nothing."""
    warnings: list[str] = Field(default_factory=list)
    """What a person should know before the money is spent."""
    deviations: list[str] = Field(default_factory=list)
    """Where this stage departs from what was registered."""

    @property
    def hash(self) -> str:
        """What approvals refer to; also fixes the rules before the results."""
        return sha256(canonical(dump(self)))

    def to_yaml(self) -> str:
        return to_yaml({"hash": self.hash} | dump(self))


@dataclass(frozen=True)
class BudgetLeft:
    """What is left when the leader is asked; stored with the plan so that a restart asks with the same figures."""

    runs: int | None = None
    wall_s: float | None = None
    gpu_s: float | None = None
    usd: float | None = None
    llm_tokens: int | None = None


@dataclass(frozen=True)
class History:
    """Everything a leader may know; immutable."""

    plans: tuple[Plan, ...] = ()
    observations: tuple[Observation, ...] = ()
    """Every terminal run, in order of stage, arm and seed."""
    budget: BudgetLeft = field(default_factory=BudgetLeft)
    slots: int = 1
    """Runs that can be live at once."""

    def of(self, arm: str) -> tuple[Observation, ...]:
        return tuple(o for o in self.observations if o.arm == arm)


class Leader(Protocol):
    def plan(self, goal: GoalLock, history: History) -> Plan | Decision:
        """What to do next.

        Raises:
            LeaderError: cannot go on without a person; the message says what is needed.
        """
        ...


class LeaderError(RuntimeError):
    """The leader needs a person."""


class Journal(Protocol):
    """Where a leader that asks a model keeps its questions, so that a restart replays instead of asking again."""

    def ask(self, key: str, request: Mapping[str, Any], call: Ask) -> dict[str, Any]:
        """The stored response to `key`, or `call(request)` stored before it is returned.

        The request is durable before the call, the response before this returns. What `call` raises is not stored.
        """
        ...


class Ask(Protocol):
    def __call__(self, request: Mapping[str, Any], /) -> dict[str, Any]: ...


class MemoryJournal:
    """A journal for tests and one-off use; `asked` counts real calls per key."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, Any]] = {}
        self.asked: dict[str, int] = {}

    def ask(self, key: str, request: Mapping[str, Any], call: Ask) -> dict[str, Any]:
        if key not in self.stored:
            self.asked[key] = self.asked.get(key, 0) + 1
            self.stored[key] = call(request)
        return self.stored[key]


def parse_step(data: Mapping[str, Any]) -> Plan | Decision:
    """A stored plan or decision, from its plain data."""
    content = {k: v for k, v in data.items() if k != "hash"}
    model = Decision if content.get("kind") == "decision" else Plan
    return model.model_validate_json(json.dumps(content))


def make_leader(name: str, **options: Any) -> Leader:
    """`adaptive`, or `llm` with model, base_url, api_key, journal.

    Raises:
        ValueError: unknown name.
    """
    if name == "adaptive":
        from a3r.leaders.adaptive import AdaptiveLeader

        return AdaptiveLeader()
    if name == "llm":
        from a3r.leaders.llm import LlmLeader

        return LlmLeader(**options)
    raise ValueError(f"unknown leader {name!r}; known: adaptive, llm")
