"""Builds and runs small campaigns: what the tests of the study share, also across processes."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3r import campaign as ca
from a3r import study as st
from a3r.attempts import Settings
from a3r.blueprint import Blueprint
from a3r.goal import GoalLock
from a3r.hosts import Hosts
from a3r.leader import Arm, Decision, History, Plan, Purpose, Verdict, parse_step
from a3r.questions import StoreJournal

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [0.1, 1.0, 10.0]
FAST = Settings(tick_s=0.01, supervisor_tick_s=0.02, backoff_s=0.02, view=False, approve_all=True, disk_retry_s=0.05)


def base_blueprint(**changes: Any) -> Blueprint:
    """One process: the simulated client, six quick steps."""
    data: dict[str, Any] = {
        "schema": "a3r/blueprint/v1",
        "name": "base",
        "config": {"total_training_steps": 6, "step_s": 0.01, "sim.noise": 0.02},
        "processes": [
            {
                "name": "client",
                "argv": ["{python}", "-S", "-E", "-m", "a3r.simulate", "--config", "{spec}", "--seed", "{seed}",
                         "--out", "{attempt_dir}"],
                "main": True,
            }
        ],
        "timeouts": {"first_step_s": 20.0, "stall_s": 20.0, "max_s": 60.0, "grace_s": 1.0},
        "metrics": {"steps": 6, "eval": "eval.json"},
        "checkpoint": {},
        "retry": {"infra": 200, "lost": 200, "stalled": 1},
    }  # fmt: skip
    config = data["config"] | changes.pop("config", {})
    return Blueprint.model_validate_json(json.dumps(data | changes | {"config": config})).sealed()


def goal_lock(base: Blueprint | None = None, **changes: Any) -> GoalLock:
    goal: dict[str, Any] = {
        "schema": "a3r/goal/v1",
        "title": "smallest x that still works",
        "question": {
            "type": "min_that_still",
            "factor": "x",
            "levels": LEVELS,
            "criterion": {"metric": "reward/mean", "at": {"last_k": 2}, "rule": {"at_least": 0.5}},
        },
        "base": "base.yaml",
        "hitl": {"approve": "none"},
    }
    data = {
        "schema": "a3r/goal-lock/v1",
        "goal": goal | changes,
        "base": json.loads((base or base_blueprint()).model_dump_json(by_alias=True)),
        "source_sha256": "0" * 64,
    }
    return GoalLock.model_validate_json(json.dumps(data))


def one_level() -> dict[str, Any]:
    """A question for the shortest of studies: its second level always passes."""
    criterion = {"metric": "reward/mean", "at": {"last_k": 2}, "rule": {"at_least": 0.5}}
    return {"type": "min_that_still", "factor": "x", "levels": [1.0, 10.0], "criterion": criterion}


class SmallLeader:
    """Every level with two seeds, then the smallest level that passes with two fresh seeds, then the answer. Pure."""

    def __init__(self, log: Path | None = None, journal: Any = None) -> None:
        self.log = log
        self.journal = journal

    def plan(self, goal: GoalLock, history: History) -> Plan | Decision:
        """With a journal, it answers as a model would: through it."""
        number = len(history.plans)
        if self.journal is None:
            return self.think(goal, history)
        answer = self.journal.ask(f"decision-{number}", {"number": number}, lambda _: self.spoken(goal, history))
        return parse_step(answer["answer"])

    def spoken(self, goal: GoalLock, history: History) -> dict[str, Any]:
        if self.log is not None:
            fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(fd, f"{len(history.plans)}\n".encode())
            os.close(fd)
        return {
            "answer": json.loads(self.think(goal, history).model_dump_json(by_alias=True)),
            "usage": {"total_tokens": 7},
        }

    def think(self, goal: GoalLock, history: History) -> Plan | Decision:
        question = goal.goal.question
        if not history.plans:
            return self.stage(goal, 0, question.levels, [1, 2])
        passing = [level for level in question.levels if self.value(history, level) >= 0.5]
        if not passing:
            return Decision(verdict=Verdict.NOT_MEASURED, sentence="No level passes.")
        if len(history.plans) == 1:
            return self.stage(goal, 1, passing[:1], [1, 2, 3, 4])
        return Decision(
            verdict=Verdict.SUPPORTED,
            sentence=f"The smallest is {passing[0]} with {self.value(history, passing[0]):.6f}.",
            level=passing[0],
        )

    def stage(self, goal: GoalLock, number: int, levels: list[Any], seeds: list[int]) -> Plan:
        arms = [
            Arm(
                blueprint=goal.base.sealed(
                    name=f"x{level}", seeds=seeds, config=goal.base.config | {goal.goal.question.factor: level}
                ),
                level=level,
                purpose=Purpose.DECIDE,
            )
            for level in levels
        ]
        return Plan(stage=number, title=f"stage {number}", reasoning="as written", arms=arms)

    def value(self, history: History, level: Any) -> float:
        """Mean over seeds of the last two steps; failures are not observations."""
        values = [
            statistics.fmean(v for _, v in o.series["reward/mean"][-2:])
            for o in history.of(f"x{level}")
            if "reward/mean" in o.series
        ]
        return statistics.fmean(values) if values else float("-inf")


class FileReporter:
    """Writes the decision and what it saw as JSON."""

    def stage(self, campaign: Path, number: int, history: History) -> None:
        (campaign / "stages" / f"{number:02d}" / "seen.json").write_text(str(len(history.observations)))

    def final(self, campaign: Path, decision: Decision, history: History) -> Path:
        path = campaign / "decision.json"
        path.write_text(decision.model_dump_json())
        return path

    def partial(self, goal: GoalLock, history: History, why: str) -> Decision:
        return Decision(verdict=Verdict.NOT_MEASURED, sentence=f"Not answered: {why}.", notes=[why])


@dataclass
class Maker:
    """Campaigns below one directory, with slots of their own."""

    base: Path

    def hosts(self, slots: int = 2, **changes: Any) -> Hosts:
        host = {"name": "here", "slots": slots, "lock_dir": str(self.base / "locks")} | changes
        return Hosts.model_validate_json(json.dumps({"hosts": [host]}))

    def create(self, name: str = "study", lock: GoalLock | None = None, hosts: Hosts | None = None) -> Path:
        directory = self.base / name
        ca.create(
            directory, "# goal\n", lock or goal_lock(), root=ROOT, leader={"name": "small"}, hosts=hosts or self.hosts()
        )
        return directory

    def open(self, directory: Path, settings: Settings = FAST, **options: Any) -> st.Study:
        return open_study(directory, settings, **options)

    def run(self, directory: Path, settings: Settings = FAST, **options: Any) -> st.Study:
        """Lead to the end; the study is closed but its journal can be read again."""
        study = self.open(directory, settings, **options)
        try:
            study.run(options.get("look"))
        finally:
            study.close()
        return study


def open_study(directory: Path, settings: Settings = FAST, **options: Any) -> st.Study:
    leader = options.get("leader")

    def make_leader(store: Any, ledger: Any, row: Mapping[str, Any]) -> Any:
        journal = StoreJournal(store, ledger) if options.get("journalled") else None
        return leader or SmallLeader(directory / "asked.log", journal)

    return st.Study.open(
        directory, make_leader=make_leader, reporter=FileReporter(), settings=settings,
        make_helper=options.get("make_helper"),
    )  # fmt: skip


def decision_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "decision.json").read_text())
