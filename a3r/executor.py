"""What an executor is: the hands of the leader on one kind of host.

It starts a supervisor for a prepared attempt directory, tells what has become of it, and fences it. "Not reachable",
"not started", "alive", "dead" and "finished" are five different answers; only the last two are proof. A variant that
goes elsewhere (ssh, Ray) brings the attempt's files back into the same directories.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from a3r.hosts import Host


class Life(StrEnum):
    """What is known of an attempt."""

    UNREACHABLE = "unreachable"
    """Nothing is known; it may well be running."""
    UNBORN = "unborn"
    """No supervisor has claimed it so far."""
    ALIVE = "alive"
    DEAD = "dead"
    """Claimed, no result, and its supervisor is proven gone."""
    REBOOTED = "rebooted"
    """Dead with its whole host: the boot id has changed."""
    FINISHED = "finished"
    """There is a result."""


@dataclass(frozen=True)
class Sight:
    """One look at an attempt."""

    life: Life
    result: dict[str, Any] | None = None
    claim: dict[str, Any] | None = None


@dataclass(frozen=True)
class Handle:
    """How to find an attempt."""

    run: str
    attempt: int
    nonce: str
    directory: Path
    host: Host


class HostUnreachable(RuntimeError):
    """The host does not answer; nothing follows about its attempts."""


class Executor(Protocol):
    def check(self, host: Host) -> None:
        """Whether the host can run anything.

        Raises:
            HostUnreachable: the message says what was tried.
        """
        ...

    def start(self, handle: Handle, secrets: dict[str, str]) -> None:
        """Start the supervisor of a prepared directory. Returning says nothing about whether it lives.

        Raises:
            HostUnreachable
        """
        ...

    def look(self, handle: Handle) -> Sight: ...

    def fence(self, handle: Handle) -> bool:
        """Make sure that nothing of the attempt lives or will live. True: proven. False: ask again later."""
        ...

    def open_view(self, handle: Handle, processes: list[str]) -> str | None:
        """Show an attempt's processes to a person, one window each. Returns a warning instead of failing."""
        ...

    def lost_view(self, handle: Handle) -> bool:
        """Whether an attempt that should have windows has none."""
        ...

    def close_view(self) -> None:
        """Close every window of this campaign."""
        ...

    def attach_argv(self, handle: Handle) -> list[str]:
        """Command that puts a person in front of a run's windows."""
        ...


def make_executor(name: str, campaign: Path, *, view: bool = True, supervisor: Path | None = None) -> Executor:
    """The executor of that name.

    Raises:
        ValueError: unknown name.
    """
    if name == "local":
        from a3r.executors.local import LocalExecutor

        return LocalExecutor(campaign, view=view, supervisor=supervisor)
    raise ValueError(f"unknown executor {name!r}; known: local")
