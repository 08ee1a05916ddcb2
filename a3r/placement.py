"""Where runs go next: a pure function of what waits, what is free and what runs.

Gangs are placed whole on one host. Order: priority, then age in steps of `AGE_STEP_S`, then the larger piece of work.
The first run that does not fit gets a reservation: the host on which it can start soonest. Later, smaller runs pass it
only where they cannot delay it (another host, slots that it leaves over, or an end before its projected start), so
large gangs do not starve and free slots do not idle behind them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGE_STEP_S = 1800.0
"""Waiting this long lifts a run by one priority."""


@dataclass(frozen=True)
class Request:
    """A run that wants slots."""

    run: str
    size: int
    """Slots on one host."""
    max_s: float
    """It ends by then after its start."""
    priority: int = 0
    """Lower goes first."""
    waited_s: float = 0.0
    hosts: frozenset[str] | None = None
    """Hosts it may use; None is any."""
    avoid: frozenset[str] = frozenset()
    """Hosts to take only when no other is allowed: where its last attempts failed."""


@dataclass(frozen=True)
class Tenant:
    """A run that holds slots."""

    host: str
    size: int
    ends_in_s: float
    """Worst case from now."""


@dataclass(frozen=True)
class Placement:
    run: str
    host: str
    slots: tuple[str, ...]


@dataclass(frozen=True)
class _Reservation:
    host: str
    start_s: float
    spare: int
    """Slots that will be left over on the host when the reserved run has started."""


def place(requests: Sequence[Request], free: Mapping[str, Sequence[str]], tenants: Sequence[Tenant]) -> list[Placement]:
    """Placements that can start now.

    Args:
        free: host → free slot names, in topology order; every usable host is a key.
        tenants: what runs now.
    """
    left = {host: list(slots) for host, slots in free.items()}
    total = {host: len(slots) + sum(t.size for t in tenants if t.host == host) for host, slots in free.items()}
    running = list(tenants)
    placements: list[Placement] = []
    reservation: _Reservation | None = None
    for request in sorted(requests, key=urgency):
        allowed = [h for h in left if (request.hosts is None or h in request.hosts) and total[h] >= request.size]
        host = best_host(request, allowed, left, reservation)
        if host is None:
            if reservation is None and allowed:
                reservation = reserve(request, allowed, left, running)
            continue
        slots = pick_slots(left[host], request.size)
        left[host] = [s for s in left[host] if s not in slots]
        running.append(Tenant(host, request.size, request.max_s))
        placements.append(Placement(request.run, host, slots))
        if reservation and reservation.host == host and request.max_s > reservation.start_s:
            reservation = _Reservation(host, reservation.start_s, reservation.spare - request.size)
    return placements


def urgency(request: Request) -> tuple[float, float, str]:
    aged = request.priority - math.floor(request.waited_s / AGE_STEP_S)
    return aged, -request.size * request.max_s, request.run


def best_host(
    request: Request, allowed: list[str], left: Mapping[str, list[str]], reservation: _Reservation | None
) -> str | None:
    """The fullest host it fits on without delaying the reserved run; hosts to avoid come last."""
    fitting = [
        h
        for h in allowed
        if len(left[h]) >= request.size
        and not (
            reservation
            and reservation.host == h
            and request.max_s > reservation.start_s
            and request.size > reservation.spare
        )
    ]
    return min(fitting, key=lambda h: (h in request.avoid, len(left[h]), h), default=None)


def reserve(
    request: Request, allowed: list[str], left: Mapping[str, list[str]], running: Sequence[Tenant]
) -> _Reservation:
    """The host on which `request` can start soonest, if everything there takes its worst case."""

    def starts(host: str) -> tuple[float, int]:
        have = len(left[host])
        for tenant in sorted((t for t in running if t.host == host), key=lambda t: t.ends_in_s):
            if have >= request.size:
                break
            have += tenant.size
            when = tenant.ends_in_s
            if have >= request.size:
                return when, have - request.size
        return 0.0, have - request.size

    host = min(allowed, key=lambda h: (starts(h)[0], h))
    start, spare = starts(host)
    return _Reservation(host, start, spare)


def pick_slots(free: Sequence[str], size: int) -> tuple[str, ...]:
    """Neighbouring slots, aligned to the gang's size where the host's free ones allow it."""
    numbered = [(int(s.rsplit("/", 1)[-1]), s) for s in free]
    by_number = dict(numbered)
    for first, _ in numbered:
        block = [by_number.get(first + i) for i in range(size)]
        if first % size == 0 and all(block):
            return tuple(s for s in block if s)
    return tuple(free[:size])
