"""What a worker is: it turns a blueprint into something a supervisor can run, and says what follows from a failure.

The recipe worker does both by table. The LLM worker answers only where the recipe has no answer (class code or unknown)
and can only propose; what it proposes is checked here like anything else. A reaction changes nothing by itself: the
study commits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from a3r.blueprint import Blueprint
from a3r.hosts import Host
from a3r.results import FailureClass


@dataclass(frozen=True)
class Assignment:
    """One attempt with everything it has been given."""

    campaign: str
    run: str
    arm: str
    seed: int
    replicate: int
    attempt: int
    nonce: str
    epoch: int
    blueprint: Blueprint
    host: Host
    slots: tuple[str, ...]
    ports: Mapping[str, int]
    run_dir: Path
    attempt_dir: Path
    queued_at: float
    previous_dir: Path | None = None
    """Directory of the attempt before this one, whose metrics are continued."""


@dataclass(frozen=True)
class Failure:
    """A failed attempt, with what is known about its run and arm."""

    run: str
    arm: str
    seed: int
    attempt: int
    failure_class: FailureClass
    detail: str
    blueprint: Blueprint
    attempt_dir: Path
    earlier: Mapping[FailureClass, int] = field(default_factory=dict)
    """Failures of the same run before this one, by class."""


@dataclass(frozen=True)
class Retry:
    why: str
    after_s: float = 0.0
    change: Mapping[str, str] = field(default_factory=dict)
    """Configuration key → `/2` or `*2`, as the blueprint declared it."""


@dataclass(frozen=True)
class GiveUp:
    why: str
    block_arm: bool = False
    """No other run of the arm can do better: its waiting runs are cancelled."""


@dataclass(frozen=True)
class PauseArm:
    """Something outside is down: the arm waits and no retry is used up."""

    why: str
    after_s: float


@dataclass(frozen=True)
class NewVersion:
    """A repaired blueprint; the arm's runs are done again with it."""

    why: str
    blueprint: Blueprint


Reaction = Retry | GiveUp | PauseArm | NewVersion


class Worker(Protocol):
    def react(self, failure: Failure) -> Reaction: ...
