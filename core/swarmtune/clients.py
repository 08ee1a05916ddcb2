"""Registered clients: who is alive, what share of a batch is whose, who agrees that a step may start.

Owns the registrations. A client is *alive* while its last sign (registration, heartbeat, agreement, claim, end) is younger
than `client_timeout_s`. An agreement names the step it is for, so it lapses by itself once that step has been trained.
Knows nothing of HTTP, of samples or of wall-clock time: seconds come from the `clock` it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmtune.config import BatchingConfig
from swarmtune.protocol import ClientView, Code

Clock = Callable[[], float]
"""Monotonic seconds."""


class ClientError(Exception):
    """A client's request that cannot be carried out: `code`, and a message that says how to fix it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Agreement:
    """Where the agreement on one step stands."""

    step: int
    live: int
    """Live registered clients."""
    agreed: int
    """Live clients that agree."""
    signals: int
    """Clients that agreed while alive, whether or not they still are."""
    needed: int
    """Agreeing live clients that the quorum asks for; at least 1."""
    first_age_s: float | None
    """Seconds since the first agreement on this step; None without one."""
    missing: tuple[str, ...]
    """Live clients that have not agreed, by name."""


class ClientRegistry:
    def __init__(self, config: BatchingConfig, batch_tasks: int, clock: Clock) -> None:
        """Start empty; `batch_tasks` bounds the sum of the live clients' shares."""
        raise NotImplementedError

    def register(self, name: str, share: int | None = None) -> ClientView:
        """Add a client, or let one that was restarted join again (its share becomes the given one).

        Raises:
            ClientError: BAD_REQUEST when the live clients' shares would exceed the batch.
        """
        raise NotImplementedError

    def heartbeat(self, name: str) -> ClientView:
        """Raises:
        ClientError: UNKNOWN_CLIENT.
        """
        raise NotImplementedError

    def agree(self, name: str, step: int, *, expected: int) -> ClientView:
        """Record that `name` agrees to start `step`; `expected` is the step being collected. Repeating changes nothing.

        Raises:
            ClientError: UNKNOWN_CLIENT; STEP_MISMATCH when `step` is not `expected`.
        """
        raise NotImplementedError

    def seen(self, name: str | None) -> None:
        """A sign of life from a claim or an end. None and unknown names are ignored."""
        raise NotImplementedError

    def require(self, name: str | None) -> None:
        """Raises:
        ClientError: UNKNOWN_CLIENT when a name is given that was never registered.
        """
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Forget a client that said goodbye; idempotent."""
        raise NotImplementedError

    def share(self, name: str | None) -> int | None:
        """Tasks of each batch that are this client's; None where it has no share."""
        raise NotImplementedError

    def is_alive(self, name: str) -> bool:
        raise NotImplementedError

    def live_shares(self) -> dict[str, int]:
        """Name → share of the live clients that have one."""
        raise NotImplementedError

    def agreement(self, step: int) -> Agreement:
        """Where the agreement on `step` stands now."""
        raise NotImplementedError

    def view(self, name: str) -> ClientView:
        """Raises:
        ClientError: UNKNOWN_CLIENT.
        """
        raise NotImplementedError

    def views(self) -> list[ClientView]:
        """All registered clients, by name."""
        raise NotImplementedError
