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
import errno
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from a3r import attempts as att
from a3r import supervisor as sv
from a3r.attempts import PAUSED_NOW, Attempts, Settings
from a3r.blueprint import Blueprint
from a3r.campaign import CampaignError, IllegalTransition, Lock, attempt_key
from a3r.executor import make_executor
from a3r.formats import dump
from a3r.goal import GoalLock
from a3r.hosts import Hosts
from a3r.leader import Arm, BudgetLeft, Decision, History, Leader, LeaderError, Plan, parse_step
from a3r.ledger import Ledger
from a3r.results import TERMINAL, FailureClass, Observation, RunRecord, RunStatus, TamperedError, observe
from a3r.store import Change, Conflict, DiskFull, JournalDamaged, Put, Store, boot_id, boottime
from a3r.worker import Worker
from a3r.workers.recipe import RecipeWorker, write_text

log = logging.getLogger(__name__)


class Reporter(Protocol):
    """Turns a campaign directory into reports. Called again after a restart: it must not mind."""

    def stage(self, campaign: Path, number: int, history: History) -> None: ...

    def final(self, campaign: Path, decision: Decision, history: History) -> Path | None: ...

    def partial(self, goal: GoalLock, history: History, why: str) -> Decision:
        """What a study that had to stop can say."""
        ...


@dataclass(kw_only=True)
class Study(Attempts):
    """A campaign that this process leads."""

    lock: Lock
    goal: GoalLock
    leader: Leader
    reporter: Reporter

    # ---- opening

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
        study._put_superseded_away()
        study._check_results()
        return study

    def leave(self) -> None:
        """Before a close in the middle, at a person's wish: the time since the last event counts as led."""
        with contextlib.suppress(OSError, sqlite3.Error, Conflict, DiskFull, JournalDamaged):
            self._event("LEADER_LEFT", {})

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
            if row.get("result") is None or not path.parent.exists():
                continue
            text = sv.result_text(row["result"])
            if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
                if path.exists():
                    os.replace(path, path.with_suffix(".json.edited"))
                write_text(path, text)
                self._event("RESULT_RESTORED", {"kept_as": "result.json.edited"}, row["run"], row["n"])
                self.warnings.append(f"{row['run']}: result.json had been edited; the recorded one was put back")

    # ---- the loop

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
            self._wait_for_space(str(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._wait_for_space(str(error))
        except JournalDamaged as error:
            log.error("journal damaged", extra={"error": str(error)})
            self.store.close()
            self.store = Store.open(self.directory)
            self.ledger.store = self.store

    def _wait_for_space(self, error: str) -> None:
        began = boottime()
        self.warnings.append(f"disk full: {error}; nothing new is started until there is room")
        while True:
            time.sleep(self.settings.disk_retry_s)
            with contextlib.suppress(DiskFull):
                self._event("DISK_WAS_FULL", {"error": error, "waited_s": round(boottime() - began, 1)})
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

    # ---- approval

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

    # ---- planning

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
        att.reached("plan_answered")
        answer = self._bounded(answer, history)
        stored = Put("plans", number, asked | {"answer": dump(answer)})
        changes: dict[str, Any] = {"state": self._checked("REPORTING" if isinstance(answer, Decision) else "DECLARING")}
        if isinstance(answer, Plan):
            changes["stage"] = int(number)
        self._set("PLAN_MADE", changes, [stored], data={"number": int(number), "kind": answer.kind})

    def _bounded(self, answer: Plan | Decision, history: History) -> Plan | Decision:
        """The budget ends a study whatever its leader says; a partial answer is always given."""
        if isinstance(answer, Decision):
            return answer
        exhausted = self.row.get("exhausted")
        if not exhausted and len(self.plans()) >= self.goal.goal.budget.stages:
            exhausted = f"all {self.goal.goal.budget.stages} stages"
        return (
            self.reporter.partial(self.goal, history, f"the budget is used up ({exhausted})") if exhausted else answer
        )

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

    # ---- running a stage

    def declare_stage(self) -> None:
        """Write the stage's files and queue its runs: those that do not exist yet."""
        plan = self.plans()[-1]
        number = len(self.plans()) - 1
        folder = self._write_plan(number, plan)
        if not self.seek_approval(plan.hash, self.goal.goal.hitl.approve == "stage", then="DECLARING"):
            return
        for arm in plan.arms:
            write_text(folder / "blueprints" / f"{arm.name}.yaml", arm.blueprint.to_yaml())
        changes = [change for arm in plan.arms for change in self._declare_arm(arm, number)]
        data = {"number": number, "title": plan.title, "hash": plan.hash}
        self._set("STAGE_DECLARED", {"state": self._checked("RUNNING")}, changes, data=data)

    def _write_plan(self, number: int, plan: Plan) -> Path:
        """The stage's folder, with the plan in it."""
        folder = self.directory / "stages" / f"{number:02d}"
        write_text(folder / "plan.yaml", plan.to_yaml())
        return folder

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
            run = self.runs()[placement.run]  # an earlier launch of this round may have changed it
            if self.can_start(run) and not self._refusal(run):
                self.launch(run, placement)

    def _cancel_for_budget(self, waiting: list[dict[str, Any]]) -> None:
        reason = self._refusal(waiting[0]) or "used up"
        pending = [r for r in self.runs().values() if r["state"] not in TERMINAL]
        changes = [self._run_put(r, RunStatus.CANCELLED, detail=f"budget: {reason}") for r in pending]
        self._set("BUDGET_EXHAUSTED", {"exhausted": reason}, changes, data={"budget": reason, "runs": len(pending)})

    # ---- ending

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
            return self.reporter.partial(self.goal, self.history(), ending)
        return next((s for s in self.steps() if isinstance(s, Decision)), None)

    def write_report(self) -> None:
        if self.open_attempts():
            return
        for number, plan in enumerate(self.plans()):  # the last one's stage may have ended before it was declared
            self._write_plan(number, plan)
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
        data = {
            "verdict": decision.verdict.value,
            "report": str(path) if path else None,
            "leader_cpu_s": round(time.process_time(), 2),
            "wall_s": round(self.ledger.spent().wall_s, 1),
        }
        self._move("DONE", "CAMPAIGN_DONE", data=data)

    # ---- people

    def read_inbox(self) -> None:
        """Commands are files: pause, resume, stop, approve-<hash>, veto-<run>. Each is recorded, then moved away."""
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
        self._put_superseded_away()
        return "resumed"

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

    def _end(self, why: str) -> None:
        """Go to a partial report; what waits is cancelled, what runs is not waited for in the answer."""
        waiting = [r for r in self.runs().values() if r["state"] in (RunStatus.QUEUED, RunStatus.RETRY_WAIT)]
        changes = [self._run_put(r, RunStatus.CANCELLED, detail=why) for r in waiting]
        self._set(
            "ENDING", {"state": self._checked("REPORTING"), "ending": why, "hold": None}, changes, data={"why": why}
        )
