"""Kills campaigns and checks that nothing shows: the machinery of the kill tests and of benchmarks/kills.py.

A leader is a fork of this process, which has everything imported already; supervisors and trainers are what the product
starts. Victims are found by an environment variable that names the campaign, so only its own processes are ever killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import campaigns
import faults

from a3r import attempts as attempts_module
from a3r import store as store_module
from a3r import supervisor as sv
from a3r.store import Store

HERE = Path(__file__).resolve().parent
MARK = "A3R_TEST_CAMPAIGN"
LIMIT_S = 90.0


@dataclass
class Outcome:
    """What a campaign looked like afterwards."""

    answer: str
    kills: Counter[str] = field(default_factory=Counter)
    leaders: int = 0
    attempts: int = 0
    runs: int = 0
    violations: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    died_at: list[str] = field(default_factory=list)
    took_s: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)


@dataclass
class Battle:
    """One campaign under fire."""

    directory: Path
    steps: int = 4
    step_s: float = 0.005
    levels: int = 3
    view: bool = False
    stray: bool = False
    crash_at: str = ""
    trace: bool = False
    leader_pid: int = 0
    outcome: Outcome = field(default_factory=lambda: Outcome(""))

    @property
    def witness(self) -> Path:
        return self.directory.parent / f"{self.directory.name}-witness"

    def create(self) -> None:
        self.witness.mkdir(parents=True, exist_ok=True)
        client = [
            "{python}", "-S", "-E", str(HERE / "witness_client.py"), "--config", "{spec}", "--seed", "{seed}",
            "--out", "{attempt_dir}",
        ]  # fmt: skip
        base = campaigns.base_blueprint(
            config={"total_training_steps": self.steps, "step_s": self.step_s},
            processes=[{"name": "client", "argv": client, "main": True}],
            metrics={"steps": self.steps, "eval": "eval.json"},
        )
        lock = campaigns.goal_lock(base)
        question = lock.goal.question.model_copy(update={"levels": campaigns.LEVELS[-self.levels :]})
        lock = lock.model_copy(update={"goal": lock.goal.model_copy(update={"question": question})})
        maker = campaigns.Maker(self.directory.parent)
        hosts = maker.hosts(2, lock_dir=str(self.witness / "product-locks"))
        maker.create(self.directory.name, lock, hosts)

    # -- the leader

    def start_leader(self) -> None:
        """Fork a leader of this campaign."""
        self.outcome.leaders += 1
        sys.stdout.flush()
        sys.stderr.flush()
        self.leader_pid = os.fork()
        if self.leader_pid == 0:
            status = 1
            try:
                os.setsid()
                self.lead()
                status = 0
            except BaseException:  # noqa: BLE001 - the child of a fork must not return into pytest
                (self.witness / f"leader-{os.getpid()}.err").write_text(traceback.format_exc())
            finally:
                os._exit(status)

    def lead(self) -> None:
        os.environ |= {MARK: str(self.directory), "A3R_FAULT_DIR": str(self.witness), "A3R_CRASH_AT": self.crash_at}
        if self.trace:
            os.environ["A3R_TRACE"] = "1"
        if self.stray:
            os.environ["A3R_STRAY"] = "1"
        store_module.reached = lambda name: faults.reached(f"journal:{name}")
        attempts_module.reached = lambda name: faults.reached(f"study:{name}")
        settings = replace(
            campaigns.FAST,
            view=self.view,
            view_check_s=0.1,
            supervisor=HERE / "faulty_supervisor.py",
            spawn_grace_s=5.0,
        )
        study = campaigns.open_study(self.directory, settings, journalled=True)
        study.run()

    def leader_ended(self) -> bool:
        """Collect the leader if it is over; True when the campaign is done."""
        pid, status = os.waitpid(self.leader_pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return True
        if code != -signal.SIGKILL:
            errors = "\n".join(p.read_text() for p in self.witness.glob("leader-*.err"))
            raise AssertionError(f"{self.directory.name}: a leader ended with {code}\n{errors}")
        self.start_leader()
        return False

    # -- the whole thing

    def run(self, rng: random.Random | None = None, kills: int = 0) -> Outcome:
        """Lead to the end, with up to `kills` random kills on the way."""
        began = time.monotonic()
        self.create()
        self.start_leader()
        next_kill = time.monotonic() + (rng.uniform(0.0, 0.2) if rng else 0.0)
        try:
            while not self.leader_ended():
                if time.monotonic() - began > LIMIT_S:
                    raise AssertionError(f"{self.directory.name}: not done after {LIMIT_S:g} s")
                if rng and self.outcome.kills.total() < kills and time.monotonic() >= next_kill:
                    self.kill_something(rng)
                    next_kill = time.monotonic() + rng.uniform(0.01, 0.2)
                time.sleep(0.005)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.leader_pid, signal.SIGKILL)
        self.outcome.took_s = time.monotonic() - began
        self.inspect()
        return self.outcome

    def kill_something(self, rng: random.Random) -> None:
        """SIGKILL to a random one of: leader, a supervisor, a trainer, the tmux server."""
        victims = self.victims()
        kinds = sorted(kind for kind, pids in victims.items() if pids)
        kind = rng.choice(kinds)
        pid = rng.choice(victims[kind])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.outcome.kills[kind] += 1

    def victims(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"leader": [self.leader_pid], "supervisor": [], "trainer": [], "tmux": []}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                text = b" ".join(words)
                if b"faulty_supervisor" in text:
                    found["supervisor"].append(pid)
                elif b"witness_client" in text:
                    found["trainer"].append(pid)
                elif words[0].endswith(b"tmux") and (b"new-session" in words or b"-L" in words):
                    found["tmux"].append(pid)
        return found

    def processes(self) -> list[int]:
        """Living processes of this campaign, the leaders (forks without the variable) excepted."""
        mark = f"{MARK}={self.directory}".encode()
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") and sv.start_time(int(entry)):
                    found.append(int(entry))
        return found

    def inspect(self) -> None:
        """Check what must hold after any campaign."""
        out = self.outcome
        out.answer = campaigns.decision_of(self.directory)["sentence"]
        store = Store.open_read_only(self.directory)
        events = list(store.events())
        runs, attempts = store.table("runs"), store.table("attempts")
        out.runs, out.attempts = len(runs), len(attempts)
        out.violations += self.lines("violations")
        out.points, out.died_at = self.lines("trace"), self.lines("died")
        out.kills.update(f"point:{p.partition(':')[0]}" for p in out.died_at)
        if store.problem():
            out.violations.append(f"journal: {store.problem()}")
        if store.table("leases"):
            out.violations.append(f"leases are left: {sorted(store.table('leases'))}")
        deadline = time.monotonic() + 3.0
        while (orphans := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in orphans]
        out.violations += [f"orphan: {name}" for name in names]
        made = Counter(e.data["number"] for e in events if e.kind == "PLAN_MADE")
        out.violations += [f"plan {n} was made {count} times" for n, count in made.items() if count != 1]
        out.asked = Counter(self.lines("asked.log", self.directory))
        for number, count in out.asked.items():
            if count > 1 + windows(events, number):
                out.violations.append(f"the leader was asked {count} times for decision {number}")
        done = Counter(e.run for e in events if e.kind == "RUN_COMPLETED")
        out.violations += [f"{run} completed {count} times" for run, count in done.items() if count != 1]
        store.close()

    def lines(self, name: str, folder: Path | None = None) -> list[str]:
        path = (folder or self.witness) / name
        return path.read_text().splitlines() if path.exists() else []

    def clean(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.witness, ignore_errors=True)


def windows(events: list[store_module.Event], number: str) -> int:
    """Leaders that died between sending a question and committing its answer: each may cost one repeated question."""
    open_since, count = False, 0
    for event in events:
        if event.kind == "LLM_ASKED" and event.data["key"] == f"decision-{number}":
            open_since = True
        elif event.kind == "LLM_ANSWERED" and event.data["key"] == f"decision-{number}":
            return count
        elif event.kind == "LEADER_STARTED" and open_since:
            count += 1
    return count


def journal_points(trace: list[str]) -> list[str]:
    """Every point an undisturbed campaign passes, in the order of its first appearance."""
    return list(dict.fromkeys(trace))
