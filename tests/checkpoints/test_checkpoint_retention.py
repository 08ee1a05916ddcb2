"""Which checkpoints stay.

Rules:
1. The newest keep_last and the best keep_best stay; of equal scores the earlier one is better.
2. A checkpoint is judged by the step after it, whose batch its weights sampled, or by an evaluation of its weights.
3. What is best is known after a restart.
4. A removal that is interrupted leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_parts import step, steps_on_disk
from hypothesis import given
from hypothesis import strategies as st

from swarmtune import checkpoints
from swarmtune.protocol import EvaluationOutcome, EvaluationRecord, EvaluationRequest, Spread, StepRecord
from swarmtune.testing import LocalServer

BEST = {"checkpoint.keep_last": 1, "checkpoint.keep_best": 1}


@given(st.dictionaries(st.integers(0, 40), st.one_of(st.none(), st.integers(0, 3)), min_size=1), st.integers(1, 4))
def test_the_newest_and_the_best_are_kept_and_nothing_else(scores: dict[int, int | None], keep: int) -> None:
    found = checkpoints.kept(scores, keep_last=keep, keep_best=keep, score=lambda s: scores[s])
    known = sorted((s for s in scores if scores[s] is not None), key=lambda s: (-(scores[s] or 0), s))
    assert {s for s, why in found.items() if "last" in why} == set(sorted(scores)[-keep:])
    assert {s for s, why in found.items() if "best" in why} == set(known[:keep])


def test_a_step_metric_judges_the_weights_that_sampled_its_batch() -> None:
    records = [StepRecord(step=k, weight_version=k, ended_at=0.0, metrics={"reward/mean": k / 10}) for k in (1, 2, 3)]
    score = checkpoints.score_by("reward/mean", records, [])
    assert [score(s) for s in (0, 1, 2, 3)] == [0.1, 0.2, 0.3, None]


def test_an_evaluation_judges_the_weights_it_was_of() -> None:
    def record(version: int, name: str, mean: float) -> EvaluationRecord:
        return EvaluationRecord(
            evaluation_id=f"{version}{name}", name=name, weight_version=version, state="finished", began_at=version,
            tasks=1, k=1, hold_sync_s=1.0, mean=Spread(value=mean),
        )  # fmt: skip

    score = checkpoints.score_by("eval/test", [], [record(5, "test", 0.7), record(5, "other", 0.1)])
    assert (score(5), score(6)) == (0.7, None)


async def test_the_best_checkpoint_stays_through_later_steps_and_a_restart(tmp_path, model):
    run = tmp_path / "data" / "runs" / "0001"
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**BEST)
        for rewards in ((0, 0.2), (0, 0.4), (1, 0.8), (0, 0.1)):  # of the weights of steps 0, 1, 2, 3
            await step(local, rewards)
        assert steps_on_disk(run) == [2, 4]
    async with LocalServer(tmp_path / "data", model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        assert [(v.step, v.score, v.kept) for v in local.server.checkpoints()] == [
            (2, 0.9, ["best"]),
            (4, None, ["last"]),
        ]
        for rewards in ((0, 0.3), (0, 0.5)):
            await step(local, rewards)
        assert steps_on_disk(run) == [2, 6]
        await step(local, (1.0, 1.0))
        await step(local, (0.0, 0.0))
        assert steps_on_disk(run) == [6, 8]


async def test_keep_last_alone_keeps_only_the_newest(tmp_path, model):
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**{"checkpoint.keep_last": 1})
        for rewards in ((1.0, 0.9), (0.0, 0.1), (0.0, 0.2)):
            await step(local, rewards)
        assert steps_on_disk(tmp_path / "data" / "runs" / "0001") == [3]


async def evaluate(local: LocalServer, name: str, mean: float | None) -> str:
    """Begin an evaluation of the present weights; with a mean, finish it."""
    request = EvaluationRequest(evaluation_id=f"{name}{local.server.status().step}", name=name, tasks=1, k=1)
    await local.server.begin_evaluation(request)
    if mean is not None:
        outcome = EvaluationOutcome(episodes=1, mean=Spread(value=mean))
        await local.server.finish_evaluation(request.evaluation_id, outcome)
    return request.evaluation_id


async def test_an_evaluation_decides_which_checkpoint_is_best(tmp_path, model):
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**BEST, **{"checkpoint.best_by": "eval/test"})
        for mean in (0.2, 0.9, 0.1, 0.5):
            await evaluate(local, "test", mean)
            await evaluate(local, "another", 1 - mean)
            await step(local)
        assert steps_on_disk(tmp_path / "data" / "runs" / "0001") == [1, 4]


async def test_a_checkpoint_stays_while_its_weights_are_evaluated(tmp_path, model):
    run = tmp_path / "data" / "runs" / "0001"
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**{"checkpoint.keep_last": 1, "evaluation.hold_sync_s": 0.0})
        await step(local)
        begun = await evaluate(local, "slow", None)
        await step(local)
        assert steps_on_disk(run) == [1, 2]
        await local.server.finish_evaluation(begun, EvaluationOutcome(episodes=0))
        await step(local)
        assert steps_on_disk(run) == [3]


def test_a_removal_cut_short_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoints.folder_of(tmp_path, 3)
    whole.mkdir(parents=True)
    (whole / "weights").write_text("many")

    class PowerCut(BaseException):
        pass

    def cut(path: Path, **_: object) -> None:
        if Path(path).exists():
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut)
        with pytest.raises(PowerCut):
            checkpoints.remove(whole)
    assert checkpoints.find(tmp_path) == {}
    checkpoints.sweep(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_sweep_puts_back_what_was_being_replaced_and_clears_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step-000001", ".retired-step-000001", ".retired-step-000002", ".partial-step-000003", ".step-4-xy"):
        (folder / name).mkdir(parents=True)
    checkpoints.sweep(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000001", "step-000002"]
