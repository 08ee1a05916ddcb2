"""From observations to marks and answers, on values written by hand.

1. A mark needs an interval wholly on one side of the bar; else it is undecided.
2. Holm: the levels tested together share a look's error, the strongest first.
3. A mark that has fallen stays.
4. Missing runs: the mark must survive their worst and best value, or the row says that it does not.
5. The answer is a level only when the next one fails; else a bracket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from a3r import analysis
from a3r.blueprint import load_blueprint
from a3r.formats import sha256
from a3r.goal import At, Goal, GoalLock
from a3r.leader import History, Plan, Purpose, Verdict
from a3r.results import (
    FailureClass,
    Observation,
    RunRecord,
    RunStatus,
    TamperedError,
    observe,
    read_series,
)

BASE, _ = load_blueprint(Path(__file__).resolve().parents[2] / "blueprints" / "simulated.yaml")
LEVELS = [1, 2, 4, 8]


def lock_of(rule: Mapping[str, Any] | None = None, **question: Any) -> GoalLock:
    criterion = {"metric": "reward/mean", "at": {"last_k": 1}, "rule": dict(rule or {"at_least": 0.5})}
    if "not_worse_by" in criterion["rule"] or "ratio_at_least" in criterion["rule"]:
        criterion["reference"] = {"level": 8}
    asked = {"type": "min_that_still", "factor": "batch_size", "levels": LEVELS, "criterion": criterion}
    goal = Goal.model_validate({"title": "t", "question": asked | question, "base": "b.yaml"})
    return GoalLock(goal=goal, base=BASE, source_sha256="0" * 64)


def seen(arm: str, seed: int, value: float | None, stage: int) -> Observation:
    if value is None:
        return Observation(f"{arm}/s{seed}", arm, "", seed, RunStatus.FAILED, FailureClass.OOM, stage=stage)
    series = {"reward/mean": ((1, value),)}
    return Observation(f"{arm}/s{seed}", arm, "", seed, RunStatus.COMPLETED, series=series, stage=stage)


def history_of(lock: GoalLock, *stages: Mapping[int, Sequence[float | None]]) -> History:
    """Stages of a look each: level → values by seed; the look is the number of values."""
    plans: list[Plan] = []
    observations: dict[tuple[str, int], Observation] = {}
    for i, stage in enumerate(stages):
        arms = []
        for level, values in stage.items():
            seeds = list(range(100, 100 + len(values)))
            arm = analysis.make_arm(lock, level, {}, seeds, Purpose.DECIDE, i)
            arms.append(arm)
            for seed, value in zip(seeds, values, strict=True):
                observations.setdefault((arm.name, seed), seen(arm.name, seed, value, i))
        look = max(len(v) for v in stage.values())
        rules = analysis.threshold_rules(lock.goal.question.criterion)
        plans.append(Plan(stage=i, title="look", reasoning="r", arms=arms, rules=rules, look=look))
    return History(tuple(plans), tuple(observations.values()))


def marks(lock: GoalLock, history: History) -> dict[Any, str]:
    return {row.level: row.mark for row in analysis.conclude(lock, history).table}


HIGH, LOW, WIDE = [0.9, 0.92, 0.88], [0.1, 0.12, 0.08], [0.45, 0.50, 0.56]


def test_interval_beyond_the_bar_decides_and_one_across_it_does_not() -> None:
    lock = lock_of()
    assert marks(lock, history_of(lock, {1: LOW, 2: WIDE, 4: HIGH})) == {1: "fails", 2: "undecided", 4: "passes"}


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ({"at_most": 0.5}, LOW, HIGH),
        ({"not_worse_by": 0.2}, HIGH, LOW),
        ({"ratio_at_least": 0.8}, HIGH, LOW),
    ],
)
def test_every_rule_marks_both_ways(rule: Mapping[str, float], good: list[float], bad: list[float]) -> None:
    lock = lock_of(rule)
    found = marks(lock, history_of(lock, {1: bad, 4: good, 8: [0.9, 0.93, 0.87]}))
    assert found[1] == "fails"
    assert found[4] == "passes"


def test_lower_is_better_turns_the_margin_round() -> None:
    criterion = {
        "metric": "reward/mean", "at": {"last_k": 1}, "better": "lower", "rule": {"not_worse_by": 0.2},
        "reference": {"level": 8},
    }  # fmt: skip
    lock = lock_of(criterion=criterion)
    found = marks(lock, history_of(lock, {1: HIGH, 4: LOW, 8: LOW}))
    assert (found[1], found[4]) == ("fails", "passes")


def test_holm_gives_the_strongest_level_the_smallest_error() -> None:
    lock = lock_of()
    decision = analysis.conclude(lock, history_of(lock, {1: LOW, 2: [0.30, 0.35, 0.25], 4: HIGH}))
    alphas = sorted(row.numbers["ci_low"].params["alpha"] for row in decision.table)
    spend = analysis.statistics.look_alphas([3, 6, 12], 0.05)[0]
    assert alphas == pytest.approx([spend / 3, spend / 2, spend])


def test_holm_stops_at_the_first_undecided_level() -> None:
    """Alone, 0.75 would pass at this look; behind an undecided stronger level it may not."""
    lock = lock_of()
    one = [0.66, 0.70, 0.68]
    alone = marks(lock, history_of(lock, {4: one}))
    assert alone[4] == "passes"
    many = {1: one, 2: one, 4: one, 8: one}
    together = marks(lock, history_of(lock, many))
    assert set(together.values()) == {"undecided"}


def test_a_mark_that_has_fallen_stays() -> None:
    lock = lock_of()
    later = [*HIGH, 0.1, 0.0, 0.2]
    assert marks(lock, history_of(lock, {4: HIGH}, {4: later}))[4] == "passes"


@pytest.mark.parametrize(
    ("values", "robust"), [([0.90, 0.92, 0.88, 0.91, 0.89, None], True), ([0.90, 0.92, 0.88, 0.91, None, None], False)]
)
def test_marks_say_whether_they_survive_their_missing_runs(values: list[float | None], robust: bool) -> None:
    lock = lock_of({"at_least": 0.3})
    decision = analysis.conclude(lock, history_of(lock, {1: [0.28, 0.27, 0.29, 0.28, 0.28, 0.27], 4: values}))
    row = next(r for r in decision.table if r.level == 4)
    assert row.mark == "passes"
    assert row.robust is robust
    assert set(row.excluded.values()) == {"oom"}
    assert any("would not survive" in note for note in decision.notes) is not robust


def test_failed_runs_are_never_values() -> None:
    lock = lock_of()
    decision = analysis.conclude(lock, history_of(lock, {4: [None, None, None]}))
    assert decision.table[0].mark == "not measured"
    assert decision.verdict is Verdict.NOT_MEASURED


@pytest.mark.parametrize(
    ("stage", "verdict", "level", "lo", "hi"),
    [
        ({1: LOW, 2: LOW, 4: HIGH, 8: HIGH}, "SUPPORTED", 4, 2, 4),
        ({2: LOW, 4: HIGH}, "SUPPORTED", 4, 2, 4),
        ({1: HIGH, 2: HIGH}, "SUPPORTED", 1, None, 1),
        ({4: LOW, 8: LOW}, "REFUTED", None, 8, None),
        ({1: LOW, 8: HIGH}, "UNDECIDED", None, 1, 8),
        ({1: LOW, 2: WIDE, 4: HIGH}, "UNDECIDED", None, 1, 4),
        ({2: HIGH, 4: LOW}, "NON_MONOTONE", None, 4, 2),
    ],
)
def test_answers(stage: Mapping[int, list[float]], verdict: str, level: int | None, lo: Any, hi: Any) -> None:
    lock = lock_of()
    decision = analysis.conclude(lock, history_of(lock, stage))
    answer = decision.answers[0]
    assert (decision.verdict, decision.level, answer.lo, answer.hi) == (verdict, level, lo, hi)
    if verdict == "UNDECIDED":
        assert f"between {lo} (excluded) and {hi}" in decision.sentence


def test_fresh_seeds_that_contradict_withdraw_the_answer() -> None:
    lock = lock_of()
    history = history_of(lock, {2: LOW, 4: HIGH})
    arm = analysis.make_arm(lock, 4, {}, [200, 201, 202], Purpose.CONFIRM, 1)
    confirm = Plan(stage=1, title="confirm", reasoning="r", arms=[arm])
    fresh = tuple(seen(arm.name, s, v, 1) for s, v in zip(arm.seeds, [0.1, 0.11, 0.12], strict=True))
    decision = analysis.conclude(lock, History((*history.plans, confirm), (*history.observations, *fresh)))
    assert decision.verdict is Verdict.UNDECIDED
    assert "Fresh seeds contradict" in decision.sentence
    assert decision.level is None


def test_every_number_recomputes_from_its_sources() -> None:
    lock = lock_of({"not_worse_by": 0.2})
    history = history_of(lock, {1: LOW, 4: HIGH, 8: HIGH})
    values = {f"{o.run}:reward/mean@last1.mean": o.series["reward/mean"][0][1] for o in history.observations}
    for row in analysis.conclude(lock, history).table:
        for n in row.numbers.values():
            again = analysis.FUNCTIONS[n.fn]([values[a] for a in n.src], [values[a] for a in n.ref], n.params)
            assert again == n.v


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (At(step=2), 0.2),
        (At(last_k=2), 0.35),
        (At(last_k=2, stat="max"), 0.4),
        (At(last_k=3, stat="median"), 0.3),
        (At(), 0.4),
        (At(last_k=9), None),
        (At(step=9), None),
    ],
)
def test_selectors(at: At, expected: float | None) -> None:
    assert analysis.select(((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)), at) == (
        pytest.approx(expected) if expected is not None else None
    )


# --- records


def test_resumed_run_keeps_the_last_row_of_a_step_and_skips_a_torn_line(tmp_path: Path) -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 5.0, "b": "text"}, {"step": 3, "a": None}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 4, "a"')
    assert read_series(path) == {"a": ((1, 1.0), (2, 5.0))}


def test_metric_file_that_changed_since_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    files = {"metrics.jsonl": sha256((tmp_path / "metrics.jsonl").read_bytes())}
    record = RunRecord(run="a/s1", arm="a", blueprint="b", seed=1, nonce="n", status=RunStatus.COMPLETED, files=files)
    assert observe(record, tmp_path).series == {"reward/mean": ((1, 0.5),)}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.6}\n')
    with pytest.raises(TamperedError, match="changed since the run ended"):
        observe(record, tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(TamperedError, match="missing"):
        observe(record, tmp_path)


def test_record_is_read_back_the_same(tmp_path: Path) -> None:
    record = RunRecord(run="a/s1", arm="a", blueprint="b", seed=1, nonce="n", status=RunStatus.FAILED)
    (tmp_path / "result.json").write_text(record.to_json())
    assert RunRecord.read(tmp_path / "result.json") == record
    assert json.loads(record.to_json())["schema"] == "a3r/result/v1"
