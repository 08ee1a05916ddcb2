"""What a campaign is on disk: its directory, its lock, its states, and the rows of its runs.

`Campaign` is the journal's vocabulary: it reads rows and makes the changes that others commit. It starts nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3r import supervisor as sv
from a3r.blueprint import Blueprint
from a3r.formats import dump, sha256
from a3r.goal import GoalLock
from a3r.hosts import Hosts
from a3r.results import RunStatus
from a3r.store import Change, Put, Store, boot_id, boottime
from a3r.workers.recipe import write_text

CAMPAIGN_STATES: dict[str, frozenset[str]] = {
    "COMPILED": frozenset({"AWAIT_APPROVAL", "PLANNING", "REPORTING"}),
    "AWAIT_APPROVAL": frozenset({"PLANNING", "DECLARING", "REPORTING"}),
    "PLANNING": frozenset({"DECLARING", "REPORTING"}),
    "DECLARING": frozenset({"RUNNING", "AWAIT_APPROVAL", "REPORTING"}),
    "RUNNING": frozenset({"ANALYSING", "REPORTING"}),
    "ANALYSING": frozenset({"PLANNING", "REPORTING"}),
    "REPORTING": frozenset({"DONE"}),
    "DONE": frozenset(),
}
"""State → what may follow. Being paused, or waiting for a person, is no state but a hold: afterwards what stood goes
on."""

RUN_STATES: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.QUEUED: frozenset({RunStatus.RUNNING, RunStatus.CANCELLED, RunStatus.SUPERSEDED}),
    RunStatus.RUNNING: frozenset(
        {RunStatus.COMPLETED, RunStatus.DIVERGED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.RETRY_WAIT}
    ),
    RunStatus.RETRY_WAIT: frozenset({RunStatus.RUNNING, RunStatus.CANCELLED, RunStatus.FAILED, RunStatus.SUPERSEDED}),
    RunStatus.COMPLETED: frozenset({RunStatus.SUPERSEDED}),
    RunStatus.DIVERGED: frozenset({RunStatus.SUPERSEDED}),
    RunStatus.FAILED: frozenset({RunStatus.SUPERSEDED}),
    RunStatus.CANCELLED: frozenset({RunStatus.SUPERSEDED}),
    RunStatus.SUPERSEDED: frozenset(),
}
OPEN_ATTEMPT = frozenset({"INTENT", "RUNNING", "SUSPECT"})


class IllegalTransition(RuntimeError):
    """A state change that is not in the table."""


class LeaderRunning(RuntimeError):
    """Another leader holds the campaign."""


class CampaignError(RuntimeError):
    """The directory cannot be used as it is; the message says what to do."""


@dataclass
class Lock:
    """The campaign's lock: held by this process, released by its death, never unlinked."""

    fd: int

    @classmethod
    def take(cls, directory: Path, wait_s: float = 1.0) -> Lock:
        """Take the lock. A killed leader's child may hold it for a moment longer, until it becomes another program.

        Raises:
            LeaderRunning: names the process that holds it.
        """
        fd = os.open(directory / "leader.lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                owner = os.pread(fd, 32, 0).decode().strip()
                os.close(fd)
                raise LeaderRunning(
                    f"{directory}: a leader (process {owner or '?'}) is running this study; "
                    "look at it with `a3r status`, or stop it with `a3r stop`"
                ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return cls(fd)

    def release(self) -> None:
        os.close(self.fd)


def leader_is_running(directory: Path) -> bool:
    try:
        Lock.take(directory, wait_s=0.0).release()
    except LeaderRunning:
        return True
    except FileNotFoundError:
        return False
    return False


def create(
    directory: Path, goal_text: str, lock: GoalLock, *, root: Path, leader: Mapping[str, Any], hosts: Hosts
) -> None:
    """Make a campaign's directory. Repeating it with the same goal changes nothing.

    Args:
        root: what `code.repo` of blueprints is relative to.
        leader: `{"name": …, …}` for `make_leader`; no secrets.

    Raises:
        CampaignError: there is another study in the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("runs", "stages", "inbox", "outbox"):
        (directory / name).mkdir(exist_ok=True)
    held = Lock.take(directory)
    try:
        store = Store.open(directory)
        try:
            known = store.row("campaign", "facts")
            if known is not None:
                if known["goal_hash"] != lock.hash:
                    raise CampaignError(
                        f"{directory}: holds another goal ({known['goal_hash'][:12]}); choose another --dir"
                    )
                return
            write_text(directory / "goal.md", goal_text)
            write_text(directory / "goal.lock.yaml", lock.to_yaml())
            facts = {
                "goal_hash": lock.hash,
                "lock": dump(lock),
                "lock_text": lock.to_yaml(),
                "root": str(root),
                "leader": dict(leader),
                "hosts": dump(hosts),
            }
            state = {"state": "COMPILED", "stage": 0, "epoch": 0, "approved": [], "hold": None, "ending": None}
            rows = [Put("campaign", "facts", facts, new=True), Put("campaign", "state", state, new=True)]
            store.commit("CAMPAIGN_CREATED", rows, data={"goal": lock.hash})
        finally:
            store.close()
    finally:
        held.release()


@dataclass(kw_only=True)
class Campaign:
    """One campaign's directory and journal."""

    directory: Path
    store: Store

    # ---- rows

    @property
    def row(self) -> dict[str, Any]:
        found = self.store.row("campaign", "state")
        if found is None:
            raise CampaignError(f"{self.directory}: the journal has no campaign")
        return found

    @property
    def state(self) -> str:
        return self.row["state"]

    @property
    def hold(self) -> dict[str, Any] | None:
        """`{"kind": "paused" | "needs_human", "reason": …}` while nothing new may start."""
        return self.row["hold"]

    def runs(self) -> dict[str, dict[str, Any]]:
        return self.store.table("runs")

    def open_attempts(self) -> list[dict[str, Any]]:
        return [a for a in self.store.table("attempts").values() if a["state"] in OPEN_ATTEMPT]

    def blueprint_of(self, run: Mapping[str, Any]) -> Blueprint:
        arm = self.store.row("arms", run["arm"])
        if arm is None:
            raise CampaignError(f"{run['run']}: the journal has no arm {run['arm']}")
        return parsed_blueprint(json.dumps(arm["blueprint"], sort_keys=True))

    # ---- changes

    def _new_run(self, arm: str, row: Mapping[str, Any], seed: int, stage: int, replicate: int = 0) -> Put:
        name = f"{arm}/s{seed}" + (f".v{row['version']}" if row["version"] > 1 else "")
        name += f".r{replicate}" if replicate else ""
        facts = {
            "run": name,
            "arm": arm,
            "blueprint": row["blueprint"]["id"],
            "seed": seed,
            "replicate": replicate,
            "stage": stage,
            "purpose": row["purpose"],
            "state": RunStatus.QUEUED.value,
            "attempt": 0,
            "class": None,
            "detail": "",
            "not_before": 0.0,
            "boot": boot_id(),
            "queued_at": time.time(),
            "queued_boottime": boottime(),
            "change": {},
        }
        return Put("runs", name, facts, new=True)

    def _run_put(self, run: Mapping[str, Any], status: RunStatus, **changes: Any) -> Put:
        """A run's row in its next state.

        Raises:
            IllegalTransition
        """
        before = RunStatus(run["state"])
        if status is not before and status not in RUN_STATES[before]:
            self._event("ILLEGAL_TRANSITION", {"from": before.value, "to": status.value}, run["run"])
            raise IllegalTransition(f"{run['run']}: {before.value} → {status.value}")
        return Put("runs", run["run"], dict(run) | {"state": status.value} | changes)

    def _block_arm(self, arm: str, why: str, except_run: str | None = None) -> list[Change]:
        """Cancel an arm's waiting runs; those that run are left to end."""
        row = self.store.row("arms", arm) or {}
        waiting = [
            r
            for r in self.runs().values()
            if r["arm"] == arm and r["run"] != except_run and r["state"] in (RunStatus.QUEUED, RunStatus.RETRY_WAIT)
        ]
        cancelled = [self._run_put(r, RunStatus.CANCELLED, detail=f"arm stopped: {why}") for r in waiting]
        return [Put("arms", arm, row | {"blocked": why}), *cancelled]

    def _new_version(self, run: Mapping[str, Any], blueprint: Blueprint, known: dict[str, Any]) -> list[Change]:
        """The arm has a repaired blueprint from now on; the runs of the old one are outdated."""
        arm = self.store.row("arms", run["arm"]) or {}
        row = arm | {
            "blueprint": dump(blueprint),
            "replaces": [*arm["replaces"], arm["blueprint"]["id"]],
            "version": arm["version"] + 1,
            "blocked": None,
        }
        return [Put("arms", run["arm"], row), self._run_put(run, RunStatus.FAILED, **known)]

    def _outdated(self) -> list[dict[str, Any]]:
        """Runs of a blueprint that has been repaired since: one arm never mixes two versions."""
        arms = self.store.table("arms")
        return [
            r
            for r in self.runs().values()
            if r["blueprint"] in arms[r["arm"]]["replaces"]
            and r["state"] not in (RunStatus.SUPERSEDED, RunStatus.RUNNING)
        ]

    def _replace_outdated(self) -> None:
        for run in self._outdated():
            arm = self.store.table("arms")[run["arm"]]
            changes = [
                self._run_put(run, RunStatus.SUPERSEDED),
                self._new_run(run["arm"], arm, run["seed"], run["stage"]),
            ]
            self.store.commit("RUN_SUPERSEDED", changes, run=run["run"], data={"blueprint": arm["blueprint"]["id"]})
        self._put_superseded_away()

    def _put_superseded_away(self) -> None:
        """Files of superseded runs are kept, but no longer among those that a report is made from."""
        for run in self.runs().values():
            folder = self._run_dir(run["run"])
            if run["state"] == RunStatus.SUPERSEDED and folder.exists():
                target = self.directory / "superseded" / run["run"]
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(folder, target)

    def _again(self) -> list[Change]:
        changes: list[Change] = []
        for name, arm in self.store.table("arms").items():
            if not arm["blocked"]:
                continue
            changes.append(Put("arms", name, arm | {"blocked": None}))
            for run in self.runs().values():
                if run["arm"] == name and run["state"] in (RunStatus.FAILED, RunStatus.CANCELLED):
                    changes.append(self._run_put(run, RunStatus.SUPERSEDED))
                    changes.append(self._new_run(name, arm, run["seed"], run["stage"], run["replicate"] + 1))
        return changes

    def _signatures(self) -> dict[tuple[str, str], int]:
        """(arm, failure signature) → how often; superseded runs are history."""
        found: dict[tuple[str, str], int] = {}
        for run in self.runs().values():
            if run["state"] == RunStatus.SUPERSEDED:
                continue
            for n in range(1, run["attempt"] + 1):
                row = self.store.row("attempts", attempt_key(run["run"], n)) or {}
                if row.get("class"):
                    key = (run["arm"], sv.signature(row["class"], row.get("detail", "")))
                    found[key] = found.get(key, 0) + 1
        return found

    # ---- the journal

    def _checked(self, state: str) -> str:
        if state not in CAMPAIGN_STATES[self.state]:
            self._event("ILLEGAL_TRANSITION", {"from": self.state, "to": state})
            raise IllegalTransition(f"campaign: {self.state} → {state}")
        return state

    def _set(
        self, kind: str, changes: Mapping[str, Any], more: list[Any] | None = None, data: dict[str, Any] | None = None
    ) -> None:
        self.store.commit(kind, [Put("campaign", "state", self.row | dict(changes)), *(more or [])], data=data)

    def _move(self, state: str, kind: str, data: dict[str, Any] | None = None) -> None:
        self._set(kind, {"state": self._checked(state)}, data=data)

    def _hold(self, kind: str, reason: str) -> None:
        self._set(kind.upper(), {"hold": {"kind": kind, "reason": reason}}, data={"reason": reason})

    def _event(
        self, kind: str, data: dict[str, Any], run: str | None = None, attempt: int | None = None, actor: str = "leader"
    ) -> None:
        self.store.commit(kind, actor=actor, run=run, attempt=attempt, data=data)

    # ---- places

    def _run_dir(self, run: str) -> Path:
        return self.directory / "runs" / run

    def _attempt_dir(self, run: str, number: int) -> Path:
        return self._run_dir(run) / "attempts" / str(number)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def attempt_key(run: str, number: int) -> str:
    return f"{run}#{number}"


_BLUEPRINTS: dict[str, Blueprint] = {}


def parsed_blueprint(text: str) -> Blueprint:
    """Blueprints are immutable, and looked at in every tick: parsed once."""
    key = sha256(text)
    if key not in _BLUEPRINTS:
        _BLUEPRINTS[key] = Blueprint.model_validate_json(text)
    return _BLUEPRINTS[key]


def run_size(blueprint: Blueprint) -> int:
    return blueprint.resources.gpus or blueprint.resources.slots


def has_passed(moment: Mapping[str, Any]) -> bool:
    """A moment on the boot clock; after a reboot every earlier one has passed."""
    return moment["boot"] != boot_id() or boottime() >= moment["boottime"]
