"""Studies on disk, as the store leaves them, from runs drawn in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from a3r.analysis import conclude
from a3r.compile import compile_goal
from a3r.formats import sha256
from a3r.goal import GoalLock
from a3r.leader import Decision, History
from a3r.leaders.adaptive import AdaptiveLeader
from a3r.report import StudyReporter
from a3r.results import Observation, Provenance, RunRecord, RunStatus, Usage
from a3r.simulate import study

GOALS = Path(__file__).resolve().parents[2] / "blueprints" / "goals"


def write_run(campaign: Path, observation: Observation) -> None:
    folder = campaign / "runs" / observation.run / "attempts" / "1"
    folder.mkdir(parents=True)
    files = {}
    if observation.series:
        points = observation.series["reward/mean"]
        text = "".join(json.dumps({"step": s, "reward/mean": v}) + "\n" for s, v in points)
        (folder / "metrics.jsonl").write_text(text)
        files["metrics.jsonl"] = sha256(text)
    record = RunRecord(
        run=observation.run,
        arm=observation.arm,
        blueprint=observation.blueprint,
        seed=observation.seed,
        attempt=1,
        nonce="n",
        status=observation.status,
        failure_class=observation.failure_class,
        failure_detail=observation.failure_detail,
        steps=len(observation.series.get("reward/mean", ())),
        usage=Usage(wall_s=1.25),
        provenance=Provenance(commit="0123abc", dirty=False, seed=observation.seed, versions={"python": "3.11"}),
        files=files,
    )
    (folder / "result.json").write_text(record.to_json())


def write_study(campaign: Path, lock: GoalLock, history: History, decision: Decision) -> Path:
    """The directory that a finished study leaves; returns it."""
    campaign.mkdir(parents=True)
    (campaign / "goal.lock.yaml").write_text(lock.to_yaml())
    reporter = StudyReporter()
    for observation in history.observations:
        if observation.status is not RunStatus.CANCELLED:
            write_run(campaign, observation)
    for i, plan in enumerate(history.plans):
        (campaign / "stages" / f"{i:02d}").mkdir(parents=True)
        (campaign / "stages" / f"{i:02d}" / "plan.yaml").write_text(plan.to_yaml())
        known = tuple(o for o in history.observations if o.stage <= i)
        reporter.stage(campaign, i, History(history.plans[: i + 1], known))
    reporter.final(campaign, decision, history)
    return campaign


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`finished(goal, **fixed)`: the directory of that example goal's study, made once per goal and settings."""
    made: dict[str, Path] = {}

    def make(name: str, **fixed: object) -> Path:
        key = f"{name}{sorted(fixed.items())}"
        if key not in made:
            answers = {"fixed": dict(compile_goal(GOALS / f"{name}.md").goal.fixed) | fixed} if fixed else None
            lock = compile_goal(GOALS / f"{name}.md", answers)
            decision, history = study(lock, AdaptiveLeader(), slots=8, attempts=1)
            assert decision.verdict == conclude(lock, history).verdict
            made[key] = write_study(tmp_path_factory.mktemp("study") / "study", lock, history, decision)
        return made[key]

    return make
