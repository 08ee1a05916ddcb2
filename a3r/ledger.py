"""What a study holds and spends: slots, ports and budgets. Reads the journal; returns changes for it to commit.

- A lease is a row of its own key, inserted as new: a slot or port taken twice is refused by the journal itself.
- A launch is debited with its worst case, in the transaction of its intent, and settled in the transaction of its end.
  Nothing is recomputed from memory, so budgets survive any restart.
- GPU time runs while a supervisor does. Wall time runs while a leader does: its downtime is not charged.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from a3r.blueprint import Blueprint
from a3r.goal import Budget
from a3r.hosts import Hosts
from a3r.leader import BudgetLeft
from a3r.store import Change, Drop, Put, Store, boot_id, boottime

PORT_RANGE = range(20000, 60000)


class NoFreePort(RuntimeError):
    """No port of the range could be had."""


@dataclass(frozen=True)
class Spent:
    """Settled costs plus the worst case of what is still running."""

    runs: int = 0
    gpu_s: float = 0.0
    usd: float = 0.0
    llm_tokens: int = 0
    wall_s: float = 0.0

    def exceeds(self, budget: Budget) -> str | None:
        """The first budget that is used up beyond its bound."""
        pairs = {
            "runs": (self.runs, budget.runs),
            "GPU hours": (self.gpu_s / 3600.0, budget.gpu_h),
            "USD": (self.usd, budget.usd),
            "LLM tokens": (self.llm_tokens, budget.llm_tokens),
            "wall time": (self.wall_s, budget.wall),
        }
        return next((name for name, (used, limit) in pairs.items() if limit is not None and used > limit), None)


class Ledger:
    """Leases and budgets of one campaign."""

    def __init__(self, store: Store, hosts: Hosts, budget: Budget) -> None:
        self.store = store
        self.hosts = hosts
        self.budget = budget
        self._started = boottime()
        self._wall_before = wall_of_sessions(store)

    # -- slots

    def free_slots(self, kind: str) -> dict[str, list[str]]:
        """Host → slots of a kind that nobody leases."""
        leased = self.store.table("leases")
        return {
            host.name: [s for s in host.slot_names(kind) if lease_key(host.name, s) not in leased]
            for host in self.hosts.hosts
            if host.slot_names(kind)
        }

    def lease(self, host: str, names: Iterable[str], run: str, attempt: int) -> list[Change]:
        return [Put("leases", lease_key(host, name), {"run": run, "attempt": attempt}, new=True) for name in names]

    def release(self, run: str, attempt: int) -> list[Change]:
        """Only to be committed when nothing of the attempt lives any more."""
        return [
            Drop("leases", key)
            for key, lease in self.store.table("leases").items()
            if (lease["run"], lease["attempt"]) == (run, attempt)
        ]

    def allot_ports(self, host: str, count: int) -> list[int]:
        """Free ports that no lease holds, probed by binding them.

        Raises:
            NoFreePort
        """
        leased = self.store.table("leases")
        found: list[int] = []
        for port in candidate_ports():
            if len(found) == count:
                break
            if lease_key(host, f"port/{port}") not in leased and can_bind(port):
                found.append(port)
        if len(found) < count:
            raise NoFreePort(
                f"{host}: {count} ports wanted, {len(found)} free in {PORT_RANGE.start}-{PORT_RANGE.stop - 1}"
            )
        return found

    # -- budgets

    def debit(self, run: str, attempt: int, blueprint: Blueprint) -> Put:
        """The worst case of an attempt; later attempts of a run do not count as runs again."""
        worst = {"runs": int(attempt == 1), "gpu_s": blueprint.resources.gpus * blueprint.timeouts.max_s}
        return Put("spending", spending_key(run, attempt), {"run": run, "attempt": attempt, "settled": False} | worst)

    def settle(self, run: str, attempt: int, usage: Mapping[str, Any] | None) -> Put:
        """What an attempt really cost; None where nobody can tell, which leaves the worst case standing."""
        row = self.store.row("spending", spending_key(run, attempt)) or {"run": run, "attempt": attempt}
        actual = {k: usage[k] for k in ("gpu_s", "usd", "llm_tokens") if usage and k in usage}
        return Put("spending", spending_key(run, attempt), row | actual | {"settled": True})

    def spend_tokens(self, key: str, tokens: int, usd: float = 0.0) -> Put:
        """Cost of one request of the leader or a worker."""
        return Put("spending", f"llm/{key}", {"settled": True, "llm_tokens": tokens, "usd": usd})

    def spent(self) -> Spent:
        rows = self.store.table("spending").values()
        return Spent(
            runs=sum(int(r.get("runs", 0)) for r in rows),
            gpu_s=sum(float(r.get("gpu_s", 0.0)) for r in rows),
            usd=sum(float(r.get("usd", 0.0)) for r in rows),
            llm_tokens=sum(int(r.get("llm_tokens", 0)) for r in rows),
            wall_s=self._wall_before + boottime() - self._started,
        )

    def refusal(self, blueprint: Blueprint, first_attempt: bool) -> str | None:
        """Why a launch cannot be afforded; None when it can."""
        spent = self.spent()
        after = Spent(
            runs=spent.runs + int(first_attempt),
            gpu_s=spent.gpu_s + blueprint.resources.gpus * blueprint.timeouts.max_s,
            usd=spent.usd,
            llm_tokens=spent.llm_tokens,
            wall_s=spent.wall_s,
        )
        return after.exceeds(self.budget)

    def left(self) -> BudgetLeft:
        spent, budget = self.spent(), self.budget
        return BudgetLeft(
            runs=None if budget.runs is None else max(0, budget.runs - spent.runs),
            wall_s=None if budget.wall is None else max(0.0, budget.wall - spent.wall_s),
            gpu_s=None if budget.gpu_h is None else max(0.0, budget.gpu_h * 3600.0 - spent.gpu_s),
            usd=None if budget.usd is None else max(0.0, budget.usd - spent.usd),
            llm_tokens=None if budget.llm_tokens is None else max(0, budget.llm_tokens - spent.llm_tokens),
        )


def lease_key(host: str, name: str) -> str:
    return f"{host}/{name}"


def spending_key(run: str, attempt: int) -> str:
    return f"{run}#{attempt}"


def wall_of_sessions(store: Store, *, until_now: bool = False) -> float:
    """Seconds that leaders of this campaign have run so far: first to last event of each, by the boot clock.

    `until_now`: a leader runs, so its session has not ended with the last event.
    """
    total, first, last, boot = 0.0, None, 0.0, ""
    for kind, booted, moment in store.moments():
        if kind == "LEADER_STARTED" or booted != boot:
            total += last - first if first is not None else 0.0
            first, boot = moment, booted
        last = moment
    last = boottime() if until_now and boot == boot_id() else last
    return total + (last - first if first is not None else 0.0)


def candidate_ports() -> Iterator[int]:
    """Ports the system offers first, then the range in order."""
    for _ in range(64):
        with contextlib.suppress(OSError):
            yield offered_port()
    yield from PORT_RANGE


def offered_port() -> int:
    """A port that the system holds to be free; two studies that ask at once get different ones."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def can_bind(port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
