"""Attempts: launching, following and ending them, and what follows from their ends. Knows nothing of leaders.

An intent is committed before anything outside happens; an attempt ends only with proof; a result is taken once. Every
end is one transaction: the attempt, its slots, its bill, and the run's next state.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from a3r import supervisor as sv
from a3r.blueprint import Blueprint, fill
from a3r.campaign import Campaign, attempt_key, has_passed, run_size
from a3r.executor import Executor, Handle, HostUnreachable, Life, Sight
from a3r.formats import dump
from a3r.hosts import Hosts
from a3r.leader import Purpose
from a3r.ledger import Ledger, NoFreePort
from a3r.placement import Placement, Request, Tenant, place
from a3r.results import FailureClass, RunRecord, RunStatus, observe
from a3r.store import Change, Put, boot_id, boottime
from a3r.worker import Assignment, Failure, GiveUp, NewVersion, PauseArm, Reaction, Retry, Worker
from a3r.workers.recipe import CheckoutError, MissingSecret, RecipeWorker, is_held, secrets_of, slot_lock, write_text

SIGNATURES_STOP_ARM, ARMS_STOP_CAMPAIGN = 2, 3
QUARANTINE_S, INFRA_WINDOW_S, INFRA_LIMIT = 3600.0, 6 * 3600.0, 2
PAUSED_NOW = "paused"
"""How the reason of a stop begins after which the run goes on later."""
START_AGAIN_S = 10.0
"""After a start that could not even begin: no port, no host."""


def reached(point: str) -> None:
    """A named point outside the journal; tests replace this function to die there."""


@dataclass(frozen=True)
class Settings:
    """How a leader goes about it; nothing here decides a result."""

    tick_s: float = 0.25
    supervisor_tick_s: float = 0.25
    spawn_grace_s: float = 30.0
    """A started supervisor that has not claimed its attempt by then is fenced."""
    backoff_s: float = 2.0
    view: bool = True
    view_check_s: float = 5.0
    disk_retry_s: float = 5.0
    approve_all: bool = False
    supervisor: Path | None = None
    """Another supervisor script; tests use it to die at chosen points."""


@dataclass(kw_only=True)
class Attempts(Campaign):
    """A campaign with hands: hosts, slots, and a worker that prepares attempts and reacts to their failures."""

    hosts: Hosts
    ledger: Ledger
    executors: dict[str, Executor]
    worker: RecipeWorker
    helper: Worker | None = None
    """Asked where the recipe has no answer."""
    settings: Settings
    warnings: list[str] = field(default_factory=list)
    _adopted: set[str] = field(default_factory=set)
    _told_of_others: set[str] = field(default_factory=set)
    _view_checked: float = 0.0

    # ---- choosing

    def can_start(self, run: Mapping[str, Any]) -> bool:
        return run["state"] in (RunStatus.QUEUED, RunStatus.RETRY_WAIT) and self.waits_for(run) is None

    def waits_for(self, run: Mapping[str, Any]) -> str | None:
        """Why a queued run may not start now, apart from slots; None when it may."""
        arm = self.store.row("arms", run["arm"]) or {}
        if arm.get("paused_until") and not has_passed(arm["paused_until"]):
            return f"the arm is paused: {arm['paused_until']['why']}"
        if run["not_before"] > boottime() and run["boot"] == boot_id():
            return f"retry in {run['not_before'] - boottime():.0f} s"
        return None

    def _refusal(self, run: Mapping[str, Any]) -> str | None:
        return self.ledger.refusal(self.blueprint_of(run), first_attempt=run["attempt"] == 0)

    def placements(self, waiting: list[dict[str, Any]]) -> list[Placement]:
        """Where the waiting runs go now."""
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for run in waiting:
            by_kind.setdefault(self.blueprint_of(run).resources.kind, []).append(run)
        found: list[Placement] = []
        for kind, runs in by_kind.items():
            found += place([self._request(r) for r in runs], self._free_slots(kind), self._tenants(kind))
        return found

    def _free_slots(self, kind: str) -> dict[str, list[str]]:
        """Slots that nobody holds: neither an attempt of this study nor a process of another one on the host."""
        free = self.ledger.free_slots(kind)
        foreign = {h: [s for s in slots if is_held(slot_lock(self.hosts.named(h), s))] for h, slots in free.items()}
        for host in (h for h, slots in foreign.items() if slots and h not in self._told_of_others):
            self._told_of_others.add(host)
            self.warnings.append(f"{', '.join(foreign[host])} of {host} are used by another study; runs wait for them")
        return {h: [s for s in slots if s not in foreign[h]] for h, slots in free.items()}

    def _request(self, run: Mapping[str, Any]) -> Request:
        blueprint = self.blueprint_of(run)
        order = [p.value for p in Purpose]
        model = blueprint.resources.gpu_model
        hosts = frozenset(h.name for h in self.hosts.hosts if model in ("any", h.gpu_model))
        return Request(
            run=run["run"],
            size=run_size(blueprint),
            max_s=blueprint.timeouts.max_s,
            priority=order.index(run["purpose"]) - (run["attempt"] > 0),
            waited_s=max(0.0, boottime() - run["queued_boottime"]) if run["boot"] == boot_id() else 0.0,
            hosts=hosts,
            avoid=frozenset(self.quarantined()),
        )

    def _tenants(self, kind: str) -> list[Tenant]:
        tenants = []
        for attempt in self.open_attempts():
            blueprint = self.blueprint_of(self.runs()[attempt["run"]])
            if blueprint.resources.kind == kind:
                ends = attempt["began"] + blueprint.timeouts.max_s - boottime()
                tenants.append(Tenant(attempt["host"], len(attempt["slots"]), max(0.0, ends)))
        return tenants

    def quarantined(self) -> list[str]:
        """Hosts that failed twice in six hours: used only when no other is allowed."""
        rows = self.store.table("hosts")
        return [h for h, r in rows.items() if r["boot"] == boot_id() and r["until"] > boottime()]

    def slots_of(self, blueprint: Blueprint) -> int:
        """Runs of a blueprint's size that the hosts can hold at once."""
        size = run_size(blueprint)
        return max(1, sum(len(h.slot_names(blueprint.resources.kind)) // size for h in self.hosts.hosts))

    # ---- launching

    def launch(self, run: Mapping[str, Any], placement: Placement) -> None:
        """Intent, then the files, then the supervisor. Killed in between, the next leader fences and tries again."""
        blueprint = self.blueprint_of(run)
        host = self.hosts.named(placement.host)
        executor = self.executors[host.executor]
        try:
            executor.check(host)
            ports = self.ledger.allot_ports(host.name, len(blueprint.resources.ports))
        except (HostUnreachable, NoFreePort) as error:
            self._cannot_start(run, host.name, str(error))
            return
        number = run["attempt"] + 1
        attempt = {
            "run": run["run"],
            "n": number,
            "state": "INTENT",
            "nonce": secrets.token_hex(16),
            "epoch": self.row["epoch"],
            "host": host.name,
            "slots": list(placement.slots),
            "ports": dict(zip(blueprint.resources.ports, ports, strict=True)),
            "began": boottime(),
            "boot": boot_id(),
            "class": None,
            "recovery_source": None,
        }
        names = [*placement.slots, *(f"port/{p}" for p in ports)]
        self.store.commit(
            "ATTEMPT_INTENT",
            [
                Put("attempts", attempt_key(run["run"], number), attempt, new=True),
                *self.ledger.lease(host.name, names, run["run"], number),
                self.ledger.debit(run["run"], number, blueprint),
                self._run_put(run, RunStatus.RUNNING, attempt=number),
            ],
            run=run["run"],
            attempt=number,
            data={"host": host.name, "slots": list(placement.slots), "ports": attempt["ports"]},
        )
        self._start(attempt, blueprint)

    def _start(self, attempt: Mapping[str, Any], blueprint: Blueprint) -> None:
        run = self.runs()[attempt["run"]]
        handle = self.handle(attempt)
        try:
            self.worker.prepare(self._assignment(attempt, blueprint), run["change"])
            secret_values = secrets_of(blueprint)
        except (MissingSecret, CheckoutError) as error:
            self._finish_failed(attempt, FailureClass.CONFIG, str(error), "ATTEMPT_REFUSED")
            return
        reached("prepared")
        self.open_view(handle, blueprint)
        try:
            self.executors[handle.host.executor].start(handle, secret_values)
        except HostUnreachable as error:
            self._suspect(attempt, str(error))
        reached("started")

    def _cannot_start(self, run: Mapping[str, Any], host: str, why: str) -> None:
        """Nothing was begun: wait a little and say why."""
        put = self._run_put(
            run, RunStatus(run["state"]), not_before=boottime() + START_AGAIN_S, boot=boot_id(), detail=why
        )
        self.store.commit("START_REFUSED", [put], run=run["run"], data={"host": host, "why": why})
        self.warnings.append(f"{run['run']}: {why}")

    def _assignment(self, attempt: Mapping[str, Any], blueprint: Blueprint) -> Assignment:
        run = self.runs()[attempt["run"]]
        earlier = [self._attempt_dir(run["run"], n) for n in range(attempt["n"] - 1, 0, -1)]
        return Assignment(
            campaign=self.directory.name,
            run=run["run"],
            arm=run["arm"],
            seed=run["seed"],
            replicate=run["replicate"],
            attempt=attempt["n"],
            nonce=attempt["nonce"],
            epoch=attempt["epoch"],
            blueprint=blueprint,
            host=self.hosts.named(attempt["host"]),
            slots=tuple(attempt["slots"]),
            ports=attempt["ports"],
            run_dir=self._run_dir(run["run"]),
            attempt_dir=self._attempt_dir(run["run"], attempt["n"]),
            queued_at=run["queued_at"],
            previous_dir=next((d for d in earlier if (d / blueprint.metrics.file).exists()), None),
        )

    # ---- following

    def follow_attempts(self) -> None:
        for attempt in list(self.open_attempts()):
            handle = self.handle(attempt)
            sight = self.executors[handle.host.executor].look(handle)
            match sight.life:
                case Life.FINISHED:
                    self.take_result(attempt, sight.result or {})
                case Life.ALIVE:
                    self._seen_alive(attempt, sight)
                case Life.UNBORN if self._may_still_be_born(attempt):
                    pass
                case Life.UNREACHABLE:
                    self._suspect(attempt, "the host does not answer")
                case _:
                    self.lose(attempt, handle, sight)

    def _may_still_be_born(self, attempt: Mapping[str, Any]) -> bool:
        """This leader started it a moment ago. One of an earlier leader is not waited for: it is fenced."""
        mine = attempt["epoch"] == self.row["epoch"] and attempt["boot"] == boot_id()
        return mine and boottime() - attempt["began"] < self.settings.spawn_grace_s

    def _seen_alive(self, attempt: Mapping[str, Any], sight: Sight) -> None:
        key = attempt_key(attempt["run"], attempt["n"])
        if attempt["state"] != "RUNNING":
            put = Put("attempts", key, dict(attempt) | {"state": "RUNNING", "claim": sight.claim})
            self.store.commit("ATTEMPT_RUNNING", [put], run=attempt["run"], attempt=attempt["n"])
        if attempt["epoch"] != self.row["epoch"] and key not in self._adopted:
            self._adopted.add(key)
            self._event("ATTEMPT_ADOPTED", {"recovery_source": "LEADER_RESTART"}, attempt["run"], attempt["n"])

    def _suspect(self, attempt: Mapping[str, Any], why: str) -> None:
        """Unknown is not dead: the lease stays, nothing is started in its place."""
        if attempt["state"] != "SUSPECT":
            put = Put("attempts", attempt_key(attempt["run"], attempt["n"]), dict(attempt) | {"state": "SUSPECT"})
            self.store.commit("ATTEMPT_SUSPECT", [put], run=attempt["run"], attempt=attempt["n"], data={"why": why})

    def lose(self, attempt: Mapping[str, Any], handle: Handle, sight: Sight) -> None:
        """Fence first; a result that was written before the fence still counts; only then is it lost."""
        executor = self.executors[handle.host.executor]
        reached("before_fence")
        if not executor.fence(handle):
            self._suspect(attempt, "processes of it survive SIGKILL")
            return
        reached("after_fence")
        again = executor.look(handle)
        if again.life is Life.FINISHED:
            self._event("LATE_RESULT", {}, attempt["run"], attempt["n"])
            self.take_result(attempt, again.result or {})
            return
        never_born = sight.life is Life.UNBORN
        restarted = attempt["epoch"] != self.row["epoch"]
        kind = FailureClass.INFRA if sight.life is Life.REBOOTED else FailureClass.LOST
        source = (
            "HOST_REBOOT"
            if sight.life is Life.REBOOTED
            else "LEADER_RESTART"
            if never_born and restarted
            else "FAILURE"
        )
        detail = "never started" if never_born else "its supervisor died without a result"
        self._finish_failed(attempt, kind, detail, "ATTEMPT_LOST", source=source, counts=not (never_born and restarted))

    def take_result(self, attempt: Mapping[str, Any], result: dict[str, Any]) -> None:
        """Accept a result once, if it is the attempt's own and its files are what it vouches for."""
        directory = self._attempt_dir(attempt["run"], attempt["n"])
        try:
            record = RunRecord.model_validate_json(json.dumps(result))
            expected = (attempt["run"], attempt["n"], attempt["nonce"], self.runs()[attempt["run"]]["blueprint"])
            if (record.run, record.attempt, record.nonce, record.blueprint) != expected:
                raise ValueError("run, attempt, nonce or blueprint are not those of this attempt")
            observe(record, directory)
        except ValueError as error:
            detail = f"the result does not hold: {str(error).splitlines()[0]}"
            self._finish_failed(attempt, FailureClass.FABRICATED, detail, "RESULT_REFUSED")
            return
        if record.status in (RunStatus.COMPLETED, RunStatus.DIVERGED):
            self._finish(attempt, record, RunStatus(record.status))
        elif record.status is RunStatus.CANCELLED:
            self._finish_cancelled(attempt, record)
        else:
            kind = record.failure_class or FailureClass.UNKNOWN
            self._finish_failed(attempt, kind, record.failure_detail, "ATTEMPT_FAILED", record=record)

    # ---- ending

    def _finish(self, attempt: Mapping[str, Any], record: RunRecord, status: RunStatus) -> None:
        run = self.runs()[attempt["run"]]
        kind = record.failure_class.value if record.failure_class else None
        self.store.commit(
            f"RUN_{status.value}",
            [
                *self._attempt_over(attempt, record),
                self._run_put(run, status, detail=record.failure_detail, **{"class": kind}),
            ],
            run=run["run"],
            attempt=attempt["n"],
            data={"steps": record.steps, "wall_s": record.usage.wall_s},
        )
        self._drop_checkpoints(run)

    def _drop_checkpoints(self, run: Mapping[str, Any]) -> None:
        """Of a run that is over, where its blueprint does not keep them; never anything outside the run's directory."""
        checkpoint = self.blueprint_of(run).checkpoint
        if checkpoint is None or checkpoint.keep:
            return
        run_dir = self._run_dir(run["run"]).resolve()
        directory = Path(fill(checkpoint.dir, {"run_dir": str(run_dir)})).resolve()
        if directory != run_dir and directory.is_relative_to(run_dir):
            shutil.rmtree(directory, ignore_errors=True)

    def _finish_cancelled(self, attempt: Mapping[str, Any], record: RunRecord) -> None:
        run = self.runs()[attempt["run"]]
        goes_on = record.failure_detail.startswith(PAUSED_NOW)
        status = RunStatus.RETRY_WAIT if goes_on else RunStatus.CANCELLED
        self.store.commit(
            "ATTEMPT_CANCELLED",
            [*self._attempt_over(attempt, record), self._run_put(run, status, detail=record.failure_detail)],
            run=run["run"],
            attempt=attempt["n"],
            data={"why": record.failure_detail},
        )

    def _attempt_over(
        self,
        attempt: Mapping[str, Any],
        record: RunRecord | None,
        kind: FailureClass | None = None,
        detail: str = "",
        counts: bool = True,
        source: str | None = None,
    ) -> list[Change]:
        """What every end of an attempt brings: its row, its slots, its bill."""
        row = dict(attempt) | {
            "state": "DONE" if record else "LOST",
            "class": (record.failure_class.value if record and record.failure_class else None)
            if kind is None
            else kind.value,
            "detail": detail,
            "counts": counts,
            "recovery_source": source,
            "result": sv.read_json(self._attempt_dir(attempt["run"], attempt["n"]) / "result.json") if record else None,
        }
        usage = dump(record.usage) if record else {"gpu_s": self._gpu_s_so_far(attempt)}
        return [
            Put("attempts", attempt_key(attempt["run"], attempt["n"]), row),
            *self.ledger.release(attempt["run"], attempt["n"]),
            self.ledger.settle(attempt["run"], attempt["n"], usage),
        ]

    def _gpu_s_so_far(self, attempt: Mapping[str, Any]) -> float:
        """GPU time of an attempt that left no bill: from its start until now, at most its maximum."""
        blueprint = self.blueprint_of(self.runs()[attempt["run"]])
        worst = blueprint.timeouts.max_s
        took = boottime() - attempt["began"] if attempt["boot"] == boot_id() else worst
        return blueprint.resources.gpus * min(max(took, 0.0), worst)

    def _stop_attempts(self, why: str) -> None:
        for attempt in self.open_attempts():
            directory = self._attempt_dir(attempt["run"], attempt["n"])
            if directory.exists():
                write_text(directory / "stop", why)

    # ---- failing

    def _finish_failed(
        self,
        attempt: Mapping[str, Any],
        kind: FailureClass,
        detail: str,
        event: str,
        *,
        record: RunRecord | None = None,
        source: str = "FAILURE",
        counts: bool = True,
    ) -> None:
        """End a failed attempt together with what follows from it."""
        run = self.runs()[attempt["run"]]
        over = self._attempt_over(attempt, record, kind, detail, counts, source)
        reaction = self._reaction(run, attempt, kind, detail) if counts else Retry("it never started")
        changes, extra = self._consequences(run, attempt, kind, detail, reaction)
        self.store.commit(
            event,
            [*over, *changes, *self._host_counter(attempt, kind, source)],
            run=run["run"],
            attempt=attempt["n"],
            data={"class": kind.value, "detail": detail, "reaction": type(reaction).__name__, "why": reaction.why}
            | extra,
        )
        self._break_circuit(run["arm"], kind, detail)

    def _reaction(
        self, run: Mapping[str, Any], attempt: Mapping[str, Any], kind: FailureClass, detail: str
    ) -> Reaction:
        earlier: dict[FailureClass, int] = {}
        for n in range(1, attempt["n"]):
            row = self.store.row("attempts", attempt_key(run["run"], n)) or {}
            if row.get("class") and row.get("counts", True):
                earlier[FailureClass(row["class"])] = earlier.get(FailureClass(row["class"]), 0) + 1
        failure = Failure(
            run=run["run"],
            arm=run["arm"],
            seed=run["seed"],
            attempt=attempt["n"],
            failure_class=kind,
            detail=detail,
            blueprint=self.blueprint_of(run),
            attempt_dir=self._attempt_dir(run["run"], attempt["n"]),
            earlier=earlier,
        )
        reaction = self.worker.react(failure)
        if isinstance(reaction, GiveUp) and self.helper and kind in (FailureClass.CODE, FailureClass.UNKNOWN):
            reaction = self.helper.react(failure)
        return reaction

    def _consequences(
        self, run: Mapping[str, Any], attempt: Mapping[str, Any], kind: FailureClass, detail: str, reaction: Reaction
    ) -> tuple[list[Change], dict[str, Any]]:
        """Rows that follow from a reaction."""
        known = {"class": kind.value, "detail": detail}
        match reaction:
            case Retry(after_s=after, change=change):
                put = self._run_put(
                    run,
                    RunStatus.RETRY_WAIT,
                    not_before=boottime() + after,
                    boot=boot_id(),
                    change=dict(run["change"]) | dict(change),
                    **known,
                )
                return [put], {}
            case PauseArm(after_s=after, why=why):
                arm = self.store.row("arms", run["arm"]) or {}
                until = {"boottime": boottime() + after, "boot": boot_id(), "why": why}
                put = self._run_put(run, RunStatus.RETRY_WAIT, **known)
                return [put, Put("arms", run["arm"], arm | {"paused_until": until})], {"pause_s": after}
            case NewVersion(blueprint=blueprint):
                return self._new_version(run, blueprint, known), {"blueprint": blueprint.id}
            case GiveUp(block_arm=True, why=why):
                put = self._run_put(run, RunStatus.FAILED, **known)
                return [put, *self._block_arm(run["arm"], why, except_run=run["run"])], {}
            case _:
                return [self._run_put(run, RunStatus.FAILED, **known)], {}

    def _host_counter(self, attempt: Mapping[str, Any], kind: FailureClass, source: str) -> list[Change]:
        """Two infrastructure failures within six hours put a host at the end of the line for an hour."""
        if kind is not FailureClass.INFRA or len(self.hosts.hosts) < 2:
            return []
        row = self.store.row("hosts", attempt["host"]) or {"failures": [], "boot": boot_id(), "until": 0.0}
        recent = [t for t in row["failures"] if boottime() - t < INFRA_WINDOW_S] if row["boot"] == boot_id() else []
        recent.append(boottime())
        until = boottime() + QUARANTINE_S if len(recent) >= INFRA_LIMIT else 0.0
        return [Put("hosts", attempt["host"], {"failures": recent, "boot": boot_id(), "until": until})]

    def _break_circuit(self, arm: str, kind: FailureClass, detail: str) -> None:
        """The same failure twice stops an arm; in three arms, the campaign."""
        if kind not in (FailureClass.CODE, FailureClass.UNKNOWN, FailureClass.FABRICATED, FailureClass.CONFIG):
            return
        found = self._signatures()
        mark = sv.signature(kind.value, detail)
        row = self.store.row("arms", arm) or {}
        if found.get((arm, mark), 0) >= SIGNATURES_STOP_ARM and not row.get("blocked"):
            why = f"the same failure {found[arm, mark]} times: {detail}"
            self.store.commit(
                "ARM_STOPPED", self._block_arm(arm, why), data={"arm": arm, "signature": mark, "why": why}
            )
        arms = {a for a, m in found if m == mark and (self.store.row("arms", a) or {}).get("blocked")}
        if len(arms) >= ARMS_STOP_CAMPAIGN and not self.hold:
            self._hold("needs_human", f"{len(arms)} arms stopped with the same failure: {detail}; mend it, then resume")

    # ---- the view

    def open_view(self, handle: Handle, blueprint: Blueprint) -> None:
        names = [p.name for p in blueprint.start_order()]
        warning = self.executors[handle.host.executor].open_view(handle, names)
        if warning and warning not in self.warnings:
            self.warnings.append(warning)
            self._event("VIEW_MISSING", {"why": warning}, handle.run, handle.attempt)

    def keep_view(self) -> None:
        """Windows that were lost are opened again; the runs in them never noticed."""
        if not self.settings.view or boottime() - self._view_checked < self.settings.view_check_s:
            return
        self._view_checked = boottime()
        for attempt in self.open_attempts():
            handle = self.handle(attempt)
            if handle.directory.exists() and self.executors[handle.host.executor].lost_view(handle):
                self.open_view(handle, self.blueprint_of(self.runs()[attempt["run"]]))

    def handle(self, attempt: Mapping[str, Any]) -> Handle:
        return Handle(
            run=attempt["run"],
            attempt=attempt["n"],
            nonce=attempt["nonce"],
            directory=self._attempt_dir(attempt["run"], attempt["n"]),
            host=self.hosts.named(attempt["host"]),
        )
