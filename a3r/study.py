"""One campaign: from an approved goal to a report, whatever dies on the way.

There is one start path: take the lock, open the journal, look at the world, go on. `tick` does that again and again, so
a killed leader and an undisturbed one run the same code. What always holds:

- An intent is committed before anything outside happens; outside actions can be repeated.
- An attempt is over only with proof: a result, or a fence after which nothing of it lives. Until then its slots are
  leased and its run is not started again.
- A result is taken once, with the nonce of its attempt and the files it vouches for.
- The leader is asked once per stage, about terminal runs only; its answer is journalled before it is acted on.
- Terminal states never change, except that a repaired arm's runs are superseded by new ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from a3r import supervisor as sv
from a3r.blueprint import Blueprint
from a3r.executor import Executor, Handle, HostUnreachable, Life, Sight, make_executor
from a3r.formats import dump, sha256
from a3r.goal import GoalLock
from a3r.hosts import Hosts
from a3r.leader import Arm, BudgetLeft, Decision, History, Leader, LeaderError, Plan, Purpose, Verdict, parse_step
from a3r.ledger import Ledger, NoFreePort
from a3r.placement import Placement, Request, Tenant, place
from a3r.results import TERMINAL, FailureClass, Observation, RunRecord, RunStatus, TamperedError, observe
from a3r.store import Change, DiskFull, JournalDamaged, Put, Store, boot_id, boottime
from a3r.worker import Assignment, Failure, GiveUp, NewVersion, PauseArm, Reaction, Retry, Worker
from a3r.workers.recipe import CheckoutError, MissingSecret, RecipeWorker, secrets_of, write_text

log = logging.getLogger(__name__)

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
"""State → what may follow. Being paused or waiting for a person is not a state but a hold: what stood goes on after it."""

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
SIGNATURES_STOP_ARM, ARMS_STOP_CAMPAIGN = 2, 3
QUARANTINE_S, INFRA_WINDOW_S, INFRA_LIMIT = 3600.0, 6 * 3600.0, 2
PAUSED_NOW = "paused"


class IllegalTransition(RuntimeError):
    """A state change that is not in the table."""


class LeaderRunning(RuntimeError):
    """Another leader holds the campaign."""


class CampaignError(RuntimeError):
    """The directory cannot be used as it is; the message says what to do."""


def reached(point: str) -> None:
    """A named point outside the journal; tests replace this function to die there."""


class Reporter(Protocol):
    """Turns a campaign directory into reports. Called again after a restart: it must not mind."""

    def stage(self, campaign: Path, number: int, history: History) -> None: ...

    def final(self, campaign: Path, decision: Decision, history: History) -> Path | None: ...


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


@dataclass
class Lock:
    """The campaign's lock: held by this process, released by its death, never unlinked."""

    fd: int

    @classmethod
    def take(cls, directory: Path) -> Lock:
        """Raises:
        LeaderRunning: names the process that holds it.
        """
        fd = os.open(directory / "leader.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
        Lock.take(directory).release()
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


@dataclass
class Study:
    """A campaign that this process leads."""

    directory: Path
    lock: Lock
    store: Store
    goal: GoalLock
    hosts: Hosts
    ledger: Ledger
    executors: dict[str, Executor]
    leader: Leader
    worker: RecipeWorker
    helper: Worker | None
    """Asked where the recipe has no answer."""
    reporter: Reporter
    settings: Settings
    warnings: list[str] = field(default_factory=list)
    _adopted: set[str] = field(default_factory=set)
    _view_checked: float = 0.0

    # ---- opening ----------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        make_leader: Callable[[Store, Ledger, Mapping[str, Any]], Leader],
        reporter: Reporter,
        settings: Settings | None = None,
        make_helper: Callable[[Store, Ledger, Path], Worker | None] | None = None,
        hosts: Hosts | None = None,
    ) -> Study:
        """Take the lock, open the journal, and note that a leader is here.

        Raises:
            LeaderRunning, CampaignError, JournalDamaged
        """
        settings = settings or Settings()
        directory = directory.resolve()
        if not (directory / "leader.lock").exists():
            raise CampaignError(f"{directory}: no study here; start one with `a3r research goal.md --dir {directory}`")
        held = Lock.take(directory)
        store = Store.open(directory)
        facts, row = store.row("campaign", "facts"), store.row("campaign", "state")
        if facts is None or row is None:
            store.close()
            held.release()
            raise CampaignError(f"{directory}: the study was never created; run `a3r research goal.md --dir …` again")
        goal = GoalLock.model_validate_json(json.dumps(facts["lock"]))
        known_hosts = hosts or Hosts.model_validate_json(json.dumps(facts["hosts"]))
        ledger = Ledger(store, known_hosts, goal.goal.budget)
        executors = {
            host.executor: make_executor(host.executor, directory, view=settings.view, supervisor=settings.supervisor)
            for host in known_hosts.hosts
        }
        study = cls(
            directory=directory,
            lock=held,
            store=store,
            goal=goal,
            hosts=known_hosts,
            ledger=ledger,
            executors=executors,
            leader=make_leader(store, ledger, facts["leader"]),
            worker=RecipeWorker(directory, Path(facts["root"]), settings.supervisor_tick_s, settings.backoff_s),
            helper=make_helper(store, ledger, Path(facts["root"])) if make_helper else None,
            reporter=reporter,
            settings=settings,
        )
        study._set("LEADER_STARTED", {"epoch": row["epoch"] + 1}, data={"pid": os.getpid(), "goal": goal.hash})
        study._restore_texts(facts)
        study._check_results()
        return study

    def close(self) -> None:
        self.store.close()
        self.lock.release()

    def _restore_texts(self, facts: Mapping[str, Any]) -> None:
        """The lock file is for people; when someone has changed it, the registered one is put back."""
        path, text = self.directory / "goal.lock.yaml", facts["lock_text"]
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            if path.exists():
                os.replace(path, path.with_suffix(".yaml.edited"))
                self._event("LOCK_RESTORED", {"kept_as": "goal.lock.yaml.edited", "hash": facts["goal_hash"]})
            write_text(path, text)

    def _check_results(self) -> None:
        """A result that was edited after it was taken is set aside, and the journal's copy put back."""
        for row in self.store.table("attempts").values():
            path = self._attempt_dir(row["run"], row["n"]) / "result.json"
            taken = row.get("result")
            if taken is None or not path.parent.exists():
                continue
            record = RunRecord.model_validate_json(json.dumps(taken))
            if not holds(path, record):
                if path.exists():
                    os.replace(path, path.with_suffix(".json.edited"))
                write_text(path, record.to_json())
                self._event("RESULT_RESTORED", {"kept_as": "result.json.edited"}, row["run"], row["n"])
                self.warnings.append(f"{row['run']}: result.json had been edited; the recorded one was put back")

    # ---- the loop ---------------------------------------------------------------------------------------------------

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

    def run(self, look: Callable[[Study], None] | None = None) -> str:
        """Tick until done, or until a person is needed. Returns the state it ended in."""
        while self.state != "DONE":
            self.survive(self.tick)
            if look is not None:
                look(self)
            if self.hold and self.hold["kind"] == "needs_human" and not self.open_attempts():
                break
            if self.state != "DONE":
                time.sleep(self.settings.tick_s)
        return self.state

    def survive(self, step: Callable[[], None]) -> None:
        """One step; a full disk is waited out, a damaged journal is rebuilt, and both are recorded."""
        try:
            step()
        except DiskFull as error:
            self._wait_for_space(error)
        except JournalDamaged as error:
            log.error("journal damaged", extra={"error": str(error)})
            self.store.close()
            self.store = Store.open(self.directory)
            self.ledger.store = self.store

    def _wait_for_space(self, error: DiskFull) -> None:
        began = boottime()
        self.warnings.append(f"disk full: {error}; nothing new is started until there is room")
        while True:
            time.sleep(self.settings.disk_retry_s)
            with contextlib.suppress(DiskFull):
                self._event("DISK_WAS_FULL", {"error": str(error), "waited_s": round(boottime() - began, 1)})
                return

    def tick(self) -> None:
        """Look at everything once and do what can be done now."""
        self.read_inbox()
        self.follow_attempts()
        self.keep_view()
        if self.hold:
            return
        match self.state:
            case "COMPILED":
                if self.seek_approval(self.goal.hash, self.goal.goal.hitl.approve != "none", then="PLANNING"):
                    self._move("PLANNING", "STUDY_STARTED")
            case "AWAIT_APPROVAL":
                self.await_approval()
            case "PLANNING":
                self.ask_leader()
            case "DECLARING":
                self.declare_stage()
            case "RUNNING":
                self.run_stage()
            case "ANALYSING":
                self.analyse_stage()
            case "REPORTING":
                self.write_report()

    # ---- approval ---------------------------------------------------------------------------------------------------

    def seek_approval(self, digest: str, needed: bool, then: str) -> bool:
        """Whether the work with this hash may go on; asks a person when it may not yet."""
        if not needed or self.settings.approve_all or digest in self.row["approved"]:
            return True
        waiting = {"hash": digest, "then": then, "boottime": boottime(), "boot": boot_id(), "at": time.time()}
        changes = {"state": self._checked("AWAIT_APPROVAL"), "waiting": waiting}
        self._set("APPROVAL_ASKED", changes, data={"hash": digest})
        return False

    def await_approval(self) -> None:
        waiting, hitl = self.row["waiting"], self.goal.goal.hitl
        if self.settings.approve_all or waiting["hash"] in self.row["approved"]:
            self._approved(waiting, "APPROVED")
            return
        waited = boottime() - waiting["boottime"] if waiting["boot"] == boot_id() else time.time() - waiting["at"]
        if waited < hitl.timeout:
            return
        match hitl.on_timeout:
            case "proceed":
                self._approved(waiting, "APPROVAL_TIMED_OUT")
            case "stop":
                self._end("nobody approved the plan in time")
            case "pause":
                self._hold("paused", "nobody approved the plan in time; `a3r approve` and `a3r resume` go on")

    def _approved(self, waiting: Mapping[str, Any], kind: str) -> None:
        approved = [*self.row["approved"], waiting["hash"]]
        self._set(kind, {"state": self._checked(waiting["then"]), "approved": approved}, data={"hash": waiting["hash"]})

    # ---- planning ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[Plan | Decision]:
        """What the leader has answered so far."""
        rows = [self.store.row("plans", str(n)) for n in range(len(self.store.table("plans")))]
        return [parse_step(r["answer"]) for r in rows if r and r.get("answer")]

    def plans(self) -> list[Plan]:
        return [s for s in self.steps() if isinstance(s, Plan)]

    def ask_leader(self) -> None:
        """Once per stage: the question's circumstances are stored first, then the answer, then it is acted on."""
        number = str(len(self.plans()))
        asked = self.store.row("plans", number)
        if asked is None:
            asked = {"budget": asdict(self.ledger.left()), "slots": self.slots_of(self.goal.base)}
            self.store.commit("PLAN_ASKED", [Put("plans", number, asked, new=True)], data={"number": int(number)})
        history = self.history(asked)
        try:
            answer = self.leader.plan(self.goal, history)
        except LeaderError as error:
            self._hold("needs_human", str(error))
            return
        except TamperedError as error:
            self._hold("needs_human", str(error))
            return
        reached("plan_answered")
        answer = self._bounded(answer)
        stored = Put("plans", number, asked | {"answer": dump(answer)})
        changes = {"state": self._checked("REPORTING" if isinstance(answer, Decision) else "DECLARING")}
        if isinstance(answer, Plan):
            changes["stage"] = int(number)
        self._set("PLAN_MADE", changes, [stored], data={"number": int(number), "kind": answer.kind})

    def _bounded(self, answer: Plan | Decision) -> Plan | Decision:
        """The budget ends a study whatever its leader says; a partial answer is always given."""
        if isinstance(answer, Decision):
            return answer
        exhausted = self.row.get("exhausted")
        if not exhausted and len(self.plans()) >= self.goal.goal.budget.stages:
            exhausted = f"all {self.goal.goal.budget.stages} stages"
        return unfinished(f"the budget is used up ({exhausted})") if exhausted else answer

    def history(self, asked: Mapping[str, Any] | None = None) -> History:
        """Everything a leader may know; `asked` holds the circumstances under which it is asked."""
        budget = BudgetLeft(**asked["budget"]) if asked else self.ledger.left()
        slots = asked["slots"] if asked else self.slots_of(self.goal.base)
        return History(tuple(self.plans()), tuple(self.observations()), budget, slots)

    def observations(self) -> list[Observation]:
        """Every terminal run that was not superseded, by stage, arm and seed.

        Raises:
            TamperedError: a metric file no longer is what its result vouches for.
        """
        runs = [r for r in self.runs().values() if r["state"] in TERMINAL and r["state"] != RunStatus.SUPERSEDED]
        return [self._observation(r) for r in sorted(runs, key=lambda r: (r["stage"], r["arm"], r["seed"]))]

    def _observation(self, run: Mapping[str, Any]) -> Observation:
        attempt = self.store.row("attempts", attempt_key(run["run"], run["attempt"])) if run["attempt"] else None
        if attempt and attempt.get("result") and run["state"] in (RunStatus.COMPLETED, RunStatus.DIVERGED):
            record = RunRecord.model_validate_json(json.dumps(attempt["result"]))
            return observe(record, self._attempt_dir(run["run"], run["attempt"]), run["stage"])
        return Observation(
            run=run["run"],
            arm=run["arm"],
            blueprint=run["blueprint"],
            seed=run["seed"],
            status=RunStatus(run["state"]),
            failure_class=FailureClass(run["class"]) if run["class"] else None,
            failure_detail=run["detail"],
            stage=run["stage"],
        )

    def slots_of(self, blueprint: Blueprint) -> int:
        """Runs of a blueprint's size that the hosts can hold at once."""
        size = run_size(blueprint)
        return max(1, sum(len(h.slot_names(blueprint.resources.kind)) // size for h in self.hosts.hosts))

    # ---- declaring --------------------------------------------------------------------------------------------------

    def declare_stage(self) -> None:
        """Write the stage's files and queue its runs: those that do not exist yet."""
        plan = self.plans()[-1]
        number = len(self.plans()) - 1
        folder = self.directory / "stages" / f"{number:02d}"
        write_text(folder / "plan.yaml", plan.to_yaml())
        if not self.seek_approval(plan.hash, self.goal.goal.hitl.approve == "stage", then="DECLARING"):
            return
        for arm in plan.arms:
            write_text(folder / "blueprints" / f"{arm.name}.yaml", arm.blueprint.to_yaml())
        changes = [change for arm in plan.arms for change in self._declare_arm(arm, number)]
        data = {"number": number, "title": plan.title, "hash": plan.hash}
        self._set("STAGE_DECLARED", {"state": self._checked("RUNNING")}, changes, data=data)

    def _declare_arm(self, arm: Arm, stage: int) -> list[Change]:
        known = self.store.row("arms", arm.name)
        blueprint = arm.blueprint.sealed(seeds=[])
        if known is not None and blueprint.id in known["replaces"]:
            blueprint = Blueprint.model_validate_json(json.dumps(known["blueprint"]))
        fresh = {"blocked": None, "paused_until": None, "replaces": [], "version": 1}
        row = (known or fresh) | {
            "blueprint": dump(blueprint),
            "level": arm.level,
            "cell": arm.cell,
            "purpose": arm.purpose.value,
        }
        have = {r["seed"] for r in self.runs().values() if r["blueprint"] == blueprint.id}
        wanted = [s for s in arm.seeds if s not in have]
        return [Put("arms", arm.name, row), *(self._new_run(arm.name, row, seed, stage) for seed in wanted)]

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

    # ---- running ----------------------------------------------------------------------------------------------------

    def runs(self) -> dict[str, dict[str, Any]]:
        return self.store.table("runs")

    def open_attempts(self) -> list[dict[str, Any]]:
        return [a for a in self.store.table("attempts").values() if a["state"] in OPEN_ATTEMPT]

    def run_stage(self) -> None:
        if all(r["state"] in TERMINAL for r in self.runs().values()) and not self._outdated():
            self._move("ANALYSING", "STAGE_ENDED", data={"number": self.row["stage"]})
            return
        self._replace_outdated()
        waiting = [r for r in self.runs().values() if self.can_start(r)]
        if not waiting:
            if not self.open_attempts() and self.ledger.spent().exceeds(self.ledger.budget):
                self._cancel_for_budget([r for r in self.runs().values() if r["state"] not in TERMINAL])
            return
        affordable = [r for r in waiting if not self._refusal(r)]
        if not affordable and not self.open_attempts():
            self._cancel_for_budget(waiting)
            return
        for placement in self.placements(affordable):
            run = self.runs()[placement.run]
            if self._refusal(run):
                continue
            self.launch(run, placement)

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

    def _cancel_for_budget(self, waiting: list[dict[str, Any]]) -> None:
        reason = self._refusal(waiting[0]) or "used up"
        pending = [r for r in self.runs().values() if r["state"] not in TERMINAL]
        changes = [self._run_put(r, RunStatus.CANCELLED, detail=f"budget: {reason}") for r in pending]
        self._set("BUDGET_EXHAUSTED", {"exhausted": reason}, changes, data={"budget": reason, "runs": len(pending)})

    def blueprint_of(self, run: Mapping[str, Any]) -> Blueprint:
        arm = self.store.row("arms", run["arm"])
        if arm is None:
            raise CampaignError(f"{run['run']}: the journal has no arm {run['arm']}")
        return parsed_blueprint(json.dumps(arm["blueprint"], sort_keys=True))

    def placements(self, waiting: list[dict[str, Any]]) -> list[Placement]:
        """Where the waiting runs go now."""
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for run in waiting:
            by_kind.setdefault(self.blueprint_of(run).resources.kind, []).append(run)
        found: list[Placement] = []
        for kind, runs in by_kind.items():
            found += place([self._request(r) for r in runs], self.ledger.free_slots(kind), self._tenants(kind))
        return found

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

    # ---- launching --------------------------------------------------------------------------------------------------

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
        put = self._run_put(run, RunStatus(run["state"]), not_before=boottime() + 10.0, boot=boot_id(), detail=why)
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

    # ---- following --------------------------------------------------------------------------------------------------

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
            "result": dump(record) if record else None,
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

    # ---- failing ----------------------------------------------------------------------------------------------------

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

    # ---- analysing and reporting ------------------------------------------------------------------------------------

    def analyse_stage(self) -> None:
        try:
            self.reporter.stage(self.directory, self.row["stage"], self.history())
        except TamperedError as error:
            self._hold("needs_human", str(error))
            return
        self._move("PLANNING", "STAGE_ANALYSED", data={"number": self.row["stage"]})

    def decision(self) -> Decision | None:
        ending = self.row.get("ending")
        if ending:
            return unfinished(ending)
        return next((s for s in self.steps() if isinstance(s, Decision)), None)

    def write_report(self) -> None:
        if self.open_attempts():
            return
        decision = self.decision()
        if decision is None:
            raise IllegalTransition("a report without a decision")
        try:
            path = self.reporter.final(self.directory, decision, self.history())
        except TamperedError as error:
            self._hold("needs_human", str(error))
            return
        for executor in self.executors.values():
            executor.close_view()
        data = {"verdict": decision.verdict.value, "report": str(path) if path else None}
        self._move("DONE", "CAMPAIGN_DONE", data=data)

    # ---- people -----------------------------------------------------------------------------------------------------

    def read_inbox(self) -> None:
        """Commands are files: `pause`, `resume`, `stop`, `approve-<hash>`, `veto-<run>`. Each is recorded, then moved away."""
        inbox = self.directory / "inbox"
        for path in sorted(inbox.iterdir()) if inbox.is_dir() else ():
            if path.name.startswith("."):
                continue
            verb, _, argument = path.name.partition("-")
            details = sv.read_json(path) or {}
            known = {"pause": self._pause, "resume": self._resume, "stop": self._stop, "approve": self._approve,
                     "veto": self._veto}  # fmt: skip
            outcome = known[verb](argument, details) if verb in known else f"unknown command; known: {', '.join(known)}"
            self._event("COMMAND", {"file": path.name, "outcome": outcome} | details, actor="human")
            (self.directory / "outbox").mkdir(exist_ok=True)
            shutil.move(path, self.directory / "outbox" / f"{time.time_ns()}-{path.name}")

    def _pause(self, _: str, details: Mapping[str, Any]) -> str:
        if not self.hold:
            self._hold("paused", str(details.get("reason") or "by hand"))
        if details.get("now"):
            self._stop_attempts(PAUSED_NOW)
        return "paused"

    def _resume(self, _: str, details: Mapping[str, Any]) -> str:
        """Go on. After a person was needed, the runs of the arms that were stopped are done again."""
        if not self.hold:
            return "was not paused"
        again = self._again() if self.hold["kind"] == "needs_human" else []
        self._set("RESUMED", {"hold": None}, again)
        return "resumed"

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

    def _stop(self, _: str, details: Mapping[str, Any]) -> str:
        if self.state in ("REPORTING", "DONE"):
            return "was over already"
        self._stop_attempts("stopped by hand")
        self._end(str(details.get("reason") or "stopped by hand"))
        return "stopping"

    def _approve(self, digest: str, details: Mapping[str, Any]) -> str:
        waiting = self.row.get("waiting") or {}
        full = next((h for h in (waiting.get("hash"), self.goal.hash) if h and h.startswith(digest)), None)
        if not digest or full is None:
            return f"nothing with hash {digest or '(none)'} waits for approval"
        self._set("APPROVAL_GIVEN", {"approved": [*self.row["approved"], full]}, data={"hash": full})
        return f"approved {full[:12]}"

    def _veto(self, name: str, details: Mapping[str, Any]) -> str:
        run = self.runs().get(name.replace("%", "/"))
        if run is None or run["state"] not in (RunStatus.QUEUED, RunStatus.RETRY_WAIT):
            return "only a waiting run can be vetoed"
        self.store.commit("RUN_VETOED", [self._run_put(run, RunStatus.CANCELLED, detail="vetoed")], run=run["run"])
        return "cancelled"

    def _stop_attempts(self, why: str) -> None:
        for attempt in self.open_attempts():
            directory = self._attempt_dir(attempt["run"], attempt["n"])
            if directory.exists():
                write_text(directory / "stop", why)

    def _end(self, why: str) -> None:
        """Go to a partial report; what waits is cancelled, what runs is not waited for in the answer."""
        waiting = [r for r in self.runs().values() if r["state"] in (RunStatus.QUEUED, RunStatus.RETRY_WAIT)]
        changes = [self._run_put(r, RunStatus.CANCELLED, detail=why) for r in waiting]
        self._set(
            "ENDING", {"state": self._checked("REPORTING"), "ending": why, "hold": None}, changes, data={"why": why}
        )

    # ---- the view ---------------------------------------------------------------------------------------------------

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

    # ---- small things -----------------------------------------------------------------------------------------------

    def handle(self, attempt: Mapping[str, Any]) -> Handle:
        return Handle(
            run=attempt["run"],
            attempt=attempt["n"],
            nonce=attempt["nonce"],
            directory=self._attempt_dir(attempt["run"], attempt["n"]),
            host=self.hosts.named(attempt["host"]),
        )

    def _run_dir(self, run: str) -> Path:
        return self.directory / "runs" / run

    def _attempt_dir(self, run: str, number: int) -> Path:
        return self._run_dir(run) / "attempts" / str(number)

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


# ---- helpers ---------------------------------------------------------------------------------------------------------


def attempt_key(run: str, number: int) -> str:
    return f"{run}#{number}"


def run_size(blueprint: Blueprint) -> int:
    return blueprint.resources.gpus or blueprint.resources.slots


_BLUEPRINTS: dict[str, Blueprint] = {}


def parsed_blueprint(text: str) -> Blueprint:
    """Blueprints are immutable, and looked at in every tick: parsed once."""
    key = sha256(text)
    if key not in _BLUEPRINTS:
        _BLUEPRINTS[key] = Blueprint.model_validate_json(text)
    return _BLUEPRINTS[key]


def has_passed(moment: Mapping[str, Any]) -> bool:
    """A moment on the boot clock; after a reboot every earlier one has passed."""
    return moment["boot"] != boot_id() or boottime() >= moment["boottime"]


def holds(path: Path, record: RunRecord) -> bool:
    """Whether a result file says what was taken from it."""
    try:
        return RunRecord.read(path) == record
    except (OSError, ValueError):
        return False


def unfinished(why: str) -> Decision:
    """The honest answer of a study that could not end."""
    return Decision(verdict=Verdict.NOT_MEASURED, sentence=f"Not answered: {why}.", notes=[why])


@contextlib.contextmanager
def opened(directory: Path, **options: Any) -> Iterator[Study]:
    """A study, closed at the end."""
    study = Study.open(directory, **options)
    try:
        yield study
    finally:
        study.close()
