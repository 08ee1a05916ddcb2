"""Registered clients: who is alive, what share of a batch is whose, who agrees that a step may start.

Owns the registrations. A client is *alive* while its last sign (registration, heartbeat, agreement, claim, end) is no
older than `client_timeout_s`. An agreement names the step it is for, so it lapses by itself once that step was trained.
Knows nothing of HTTP, of samples or of wall-clock time: seconds come from the `clock` it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


@dataclass(slots=True)
class _Client:
    name: str
    share: int | None
    last_seen: float
    agreed_step: int | None = None
    agreed_at: float = 0.0


class ClientRegistry:
    def __init__(self, config: BatchingConfig, batch_tasks: int, clock: Clock) -> None:
        """Start empty; `batch_tasks` bounds the sum of the live clients' shares."""
        self._config = config
        self._batch_tasks = batch_tasks
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    def register(self, name: str, share: int | None = None) -> ClientView:
        """Add a client, or let one that was restarted join again (its share becomes the given one).

        Raises:
            ClientError: BAD_REQUEST when the live clients' shares would exceed the batch.
        """
        others = sum(s for n, s in self.live_shares().items() if n != name)
        if share is not None and others + share > self._batch_tasks:
            raise ClientError(
                Code.BAD_REQUEST,
                f"share {share} of client {name!r} does not fit: live clients hold {others} of a batch's "
                f"{self._batch_tasks} tasks; ask for at most {self._batch_tasks - others}, or raise batch_tasks",
            )
        client = self._clients.setdefault(name, _Client(name, share, self._clock()))
        client.share = share
        client.last_seen = self._clock()
        return self.view(name)

    def restore(self, shares: Mapping[str, int | None]) -> None:
        """Name → share of the clients that a server knew before its restart. Each has `client_timeout_s` to show up."""
        for name, share in shares.items():
            self._clients[name] = _Client(name, share, self._clock())

    def heartbeat(self, name: str) -> ClientView:
        """Note a sign of life.

        Raises:
            ClientError: UNKNOWN_CLIENT.
        """
        self._get(name).last_seen = self._clock()
        return self.view(name)

    def agree(self, name: str, step: int, *, expected: int) -> ClientView:
        """Record that `name` agrees to start `step`; `expected` is the step being collected. Repeating changes nothing.

        Raises:
            ClientError: UNKNOWN_CLIENT; STEP_MISMATCH when `step` is not `expected`.
        """
        client = self._get(name)
        client.last_seen = self._clock()
        if step != expected:
            raise ClientError(
                Code.STEP_MISMATCH,
                f"client {name!r} agrees to step {step}, but step {expected} is being collected; agree to {expected}",
            )
        if client.agreed_step != step:
            client.agreed_step, client.agreed_at = step, self._clock()
        return self.view(name)

    def seen(self, name: str | None) -> None:
        """Note a sign of life from a claim or an end. None and unknown names are ignored."""
        if name is not None and name in self._clients:
            self._clients[name].last_seen = self._clock()

    def require(self, name: str | None) -> None:
        """Check that a name, where one is given, was registered.

        Raises:
            ClientError: UNKNOWN_CLIENT.
        """
        if name is not None:
            self._get(name)

    def remove(self, name: str) -> None:
        """Forget a client that said goodbye; idempotent."""
        self._clients.pop(name, None)

    def share(self, name: str | None) -> int | None:
        """Tasks of each batch that are this client's; None where it has no share."""
        return self._clients[name].share if name is not None and name in self._clients else None

    def is_alive(self, name: str) -> bool:
        return name in self._clients and self._alive(self._clients[name])

    def live(self) -> list[str]:
        """Names of the live clients, in order of registration."""
        return [c.name for c in self._clients.values() if self._alive(c)]

    def live_shares(self) -> dict[str, int]:
        """Name → share of the live clients that have one.

        Where a client came back and the shares no longer fit into a batch, those registered first keep theirs and the
        others get what is left, down to 0.
        """
        left, shares = self._batch_tasks, {}
        for client in self._clients.values():
            if client.share is not None and self._alive(client):
                shares[client.name] = min(client.share, left)
                left -= shares[client.name]
        return shares

    def lapsed_shares(self) -> dict[str, int]:
        """Name → share of the clients that have one and are not alive: nobody is expected to fill it."""
        return {c.name: c.share for c in self._clients.values() if c.share is not None and not self._alive(c)}

    def agreement(self, step: int) -> Agreement:
        """Where the agreement on `step` stands now."""
        live = [c for c in self._clients.values() if self._alive(c)]
        signals = [c for c in self._clients.values() if c.agreed_step == step]
        first = min((c.agreed_at for c in signals), default=None)
        return Agreement(
            step=step,
            live=len(live),
            agreed=sum(c.agreed_step == step for c in live),
            signals=len(signals),
            needed=max(1, math.ceil(self._config.quorum * len(live) - 1e-9)),
            first_age_s=None if first is None else self._clock() - first,
            missing=tuple(sorted(c.name for c in live if c.agreed_step != step)),
        )

    def view(self, name: str) -> ClientView:
        """Describe one client.

        Raises:
            ClientError: UNKNOWN_CLIENT.
        """
        client = self._get(name)
        return ClientView(
            name=name,
            share=client.share,
            alive=self._alive(client),
            agreed_step=client.agreed_step,
            heartbeat_age_s=self._clock() - client.last_seen,
        )

    def views(self) -> list[ClientView]:
        """All registered clients, by name."""
        return [self.view(name) for name in sorted(self._clients)]

    def _alive(self, client: _Client) -> bool:
        return self._clock() - client.last_seen <= self._config.client_timeout_s

    def _get(self, name: str) -> _Client:
        if name not in self._clients:
            known = ", ".join(sorted(self._clients)) or "none"
            raise ClientError(
                Code.UNKNOWN_CLIENT,
                f"no client {name!r} is registered (known: {known}); register it at /v1/clients first",
            )
        return self._clients[name]
