"""goal.md and goal.lock.yaml: the question a study answers, what it may vary, and what it may spend.

A goal is prose, front matter, or both. Compiling reads the front matter strictly, reads the documented phrases of the
prose (docs/studies.md), and lets front matter win. What neither says becomes a typed question, never a guess; what a
phrase implies is listed as an assumption in the lock. The lock holds everything a leader needs, is hashed, and does not
change for the life of a study.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from a3r.blueprint import Blueprint, ConfigValue, flatten_config
from a3r.formats import Part, Scalar, Seconds, canonical, dump, sha256, to_yaml

QuestionType = Literal["min_that_still", "max_that_still", "best", "compare", "effect"]


class At(Part):
    """Which part of a curve is the run's value."""

    step: int | None = Field(default=None, ge=0)
    last_k: int | None = Field(default=None, ge=1)
    """Mean (or `stat`) of the last k steps."""
    stat: Literal["mean", "max", "min", "median"] = "mean"

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.step is not None and self.last_k is not None:
            raise ValueError("give step or last_k, not both; remove one")
        return self

    def selector(self) -> str:
        """`step=60`, `last2.mean` or `final`: the part of a number's address after `@`."""
        if self.step is not None:
            return f"step={self.step}"
        return f"last{self.last_k}.{self.stat}" if self.last_k is not None else "final"


class Reference(Part):
    level: Scalar


class CriterionRule(Part):
    """When a level passes. Exactly one of the four; `margin` is the equivalence margin of compare and effect."""

    at_least: float | None = None
    at_most: float | None = None
    not_worse_by: float | None = Field(default=None, gt=0)
    """Absolute margin below the reference arm."""
    ratio_at_least: float | None = Field(default=None, gt=0)
    """Share of the reference arm's mean."""
    margin: float | None = Field(default=None, gt=0)
    """Differences smaller than this do not matter (compare, effect, best)."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [k for k, v in dump(self).items() if v is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of at_least, at_most, not_worse_by, ratio_at_least, margin (got {given or 'none'}); "
                "see docs/studies.md"
            )
        return self


class Criterion(Part):
    metric: str
    at: At = At(last_k=5)
    better: Literal["higher", "lower"] = "higher"
    reference: Reference | None = None
    rule: CriterionRule | None = None
    """Needed by min/max_that_still; compare, effect and best take `margin` or nothing."""

    def address(self) -> str:
        """`metric@selector`; with a run in front it names one number."""
        return f"{self.metric}@{self.at.selector()}"


class LevelRange(Part):
    """Levels from low to high, both included."""

    low: float
    high: float
    scale: Literal["log2", "log10", "half_decades", "linear"] = "linear"
    count: int | None = Field(default=None, ge=2, le=64)
    """linear: how many; the other scales step by their factor."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; swap them")
        if self.scale != "linear" and self.low <= 0:
            raise ValueError(f"scale {self.scale} needs low > 0; use linear or raise low")
        if self.scale == "linear" and self.count is None:
            raise ValueError("a linear range needs its number of levels; add count")
        return self

    def levels(self) -> list[int | float]:
        if self.scale == "linear":
            count = self.count or 2
            values = [self.low + (self.high - self.low) * i / (count - 1) for i in range(count)]
        else:
            values = self._geometric()
        return [_tidy(v) for v in values]

    def _geometric(self) -> list[float]:
        if self.scale == "half_decades":
            steps = (1.0, 3.0)
            exponent = math.floor(math.log10(self.low))
            grid = [s * 10.0**e for e in range(exponent, exponent + 40) for s in steps]
            inside = [v for v in grid if self.low * 0.999 <= v <= self.high * 1.001]
        else:
            factor = 2.0 if self.scale == "log2" else 10.0
            count = math.floor(math.log(self.high / self.low) / math.log(factor) + 1e-9)
            inside = [self.low * factor**i for i in range(count + 1)]
        return inside if math.isclose(inside[-1], self.high, rel_tol=1e-9) else [*inside, self.high]


def _tidy(value: float) -> int | float:
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


class Factor(Part):
    factor: str
    levels: list[Scalar]

    @field_validator("levels", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return LevelRange.model_validate(value).levels() if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(self.levels) < 2:
            raise ValueError(f"{self.factor}: a factor needs at least two levels; add one or move it to fixed")
        if len({canonical(level) for level in self.levels}) != len(self.levels):
            raise ValueError(f"{self.factor}: a level is listed twice; list each once")
        return self


class Question(Part):
    type: QuestionType
    factor: str
    levels: list[Scalar]
    """In order from low to high for min/max_that_still."""
    monotone: Literal["expected", "required", "unknown"] = "expected"
    criterion: Criterion
    moderators: list[Factor] = Field(default_factory=list)

    @field_validator("levels", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return LevelRange.model_validate(value).levels() if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        Factor(factor=self.factor, levels=self.levels)
        rule, reference = self.criterion.rule, self.criterion.reference
        if self.type in {"min_that_still", "max_that_still"}:
            self._check_threshold()
        elif rule is not None and rule.margin is None:
            raise ValueError(f"criterion.rule: a {self.type} question takes margin only; see docs/studies.md")
        if self.type == "compare" and len(self.levels) != 2:
            raise ValueError(f"levels: compare takes two levels, got {len(self.levels)}; use best for more")
        if reference is not None and reference.level not in self.levels:
            raise ValueError(f"criterion.reference.level {reference.level!r} is not one of the levels {self.levels}")
        return self

    def _check_threshold(self) -> None:
        rule = self.criterion.rule
        if rule is None or rule.margin is not None:
            raise ValueError(
                f"criterion.rule: {self.type} needs to know what passing is; "
                "add at_least, at_most, not_worse_by or ratio_at_least"
            )
        relative = rule.not_worse_by is not None or rule.ratio_at_least is not None
        if relative and self.criterion.reference is None:
            raise ValueError("criterion.reference: the rule compares with an arm; add `reference: {level: …}`")
        numbers = [x for x in self.levels if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) != len(self.levels) or sorted(numbers) != numbers:
            raise ValueError(f"levels: {self.type} needs numbers in rising order, got {self.levels}; sort them")


class Budget(Part):
    """Upper bounds of a study; a launch is debited with its worst case and settled at its end."""

    wall: Seconds | None = Field(default=None, gt=0)
    gpu_h: float | None = Field(default=None, gt=0)
    usd: float | None = Field(default=None, ge=0)
    llm_tokens: int | None = Field(default=None, ge=0)
    runs: int | None = Field(default=None, ge=1)
    stages: int = Field(default=16, ge=1)


class Stats(Part):
    looks: list[int] = Field(default_factory=lambda: [3, 6, 12], min_length=1)
    """Seeds per arm at which a verdict may fall; fixed before the first result."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Two-sided error of one level's verdict over all its looks."""
    seed_base: int = Field(default=1000, ge=0)
    calibration_seeds: int = Field(default=3, ge=2)
    """Seeds of the reference arm in stage 0; they count towards its first look."""
    screen_seeds: int = Field(default=1, ge=1)
    confirm_fresh_seeds: bool = True
    """Measure the answer's value again on seeds that had no part in choosing it."""
    diverged: Literal["observation", "failure"] = "failure"
    """observation: a diverged run counts with `diverged_value`."""
    diverged_value: float = 0.0

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if sorted(set(self.looks)) != self.looks or self.looks[0] < 2:
            raise ValueError(f"looks: {self.looks} must rise and start at 2 or more; for example [3, 6, 12]")
        return self


class Hitl(Part):
    approve: Literal["plan", "stage", "none"] = "plan"
    timeout: Seconds = Field(default=43200.0, gt=0)
    on_timeout: Literal["pause", "proceed", "stop"] = "pause"


class Goal(Part):
    """A complete goal: what front matter and prose say together."""

    schema_: Literal["a3r/goal/v1"] = Field(default="a3r/goal/v1", alias="schema")
    title: str = Field(min_length=1)
    question: Question
    fixed: dict[str, ConfigValue] = Field(default_factory=dict)
    """Configuration that all arms share; wins over the base blueprint's."""
    base: str
    """Path of the blueprint whose processes run an arm, relative to goal.md."""
    gpus_per_run: int | None = Field(default=None, ge=0)
    budget: Budget = Budget()
    stats: Stats = Stats()
    hitl: Hitl = Hitl()

    @field_validator("fixed", mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return flatten_config(value) if isinstance(value, dict) else value


class GoalLock(Part):
    """The compiled, hashed goal. Everything a leader may use is in here."""

    schema_: Literal["a3r/goal-lock/v1"] = Field(default="a3r/goal-lock/v1", alias="schema")
    goal: Goal
    base: Blueprint
    """The base blueprint with the goal's fixed configuration and resources applied; not yet an arm."""
    prose: str = ""
    """The goal's own words, for people and for the LLM leader."""
    compiled_by: Literal["front_matter", "parser", "llm"] = "front_matter"
    assumptions: list[str] = Field(default_factory=list)
    """What a documented phrase was taken to mean; shown for approval."""
    source_sha256: str
    """Of goal.md's bytes."""

    @property
    def hash(self) -> str:
        """What approvals refer to."""
        return sha256(canonical(dump(self)))

    def to_yaml(self) -> str:
        return to_yaml({"hash": self.hash} | dump(self))

    @classmethod
    def from_yaml(cls, text: str, name: str = "goal.lock.yaml") -> GoalLock:
        """Read a lock and check its hash.

        Raises:
            FormatError: not a lock, or edited by hand.
        """
        from a3r.compile import read_lock  # the reader needs YAML positions, the model does not

        return read_lock(text, name)
