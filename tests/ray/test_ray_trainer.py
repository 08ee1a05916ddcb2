"""Two gloo ranks over Ray train as one process does.

Rules:
1. Loss, gradient norm and metrics agree to 1e-4, the weights after the update to the optimizer's rounding.
2. A checkpoint of k ranks resumes bit for bit on k ranks, and is refused by name on any other number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ray_processes import alive, descendants, until
from trainer_episodes import make_batch, sample

from swarmtune.config import ConfigError, LoraConfig, TrainConfig
from swarmtune.trainer.export import read_weights, whole_weights
from swarmtune.trainer.ray_session import RaySession, close_session, open_session
from swarmtune.trainer.trainer import Trainer
from swarmtune.types import FinishedEpisode, TrainBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Make = Callable[..., Trainer]

SAME = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "actor/ppo_kl")


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySession]:
    """Keeps the ranks between the tests; each trainer loads its own models into them. Nothing of Ray outlives it."""
    config = TrainConfig.from_dict({"model": "tiny", "ray.processes": 2, "engine.threads": 2})
    others = {process.pid for process in descendants(os.getpid())}
    opened = open_session(config, tmp_path_factory.mktemp("ray"))
    below = [process for process in descendants(os.getpid()) if process.pid not in others]
    assert set(opened.pids) <= {process.pid for process in below}
    yield opened
    close_session(opened)
    until(lambda: not alive(below), "the session's processes")


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.weights()}


KINDS = {
    "shared prompts": {},
    "small micro-batches": {"trainer.tokens_per_micro_batch": 64, "algorithm.loss_agg": "token-mean"},
    "kl and entropy": {"algorithm.kl_coef": 0.3, "algorithm.entropy_coef": 0.01},
    "lora with kl": {"lora.rank": 4, "algorithm.kl_coef": 0.3},
    "several optimizer steps": {"algorithm.mini_batches": 2, "algorithm.epochs": 2},
    "gae with critic": {"algorithm.advantage": "gae", "critic.lr": 1e-3},
}


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
def test_two_ranks_get_the_loss_and_gradient_norm_of_one_process(trainer: Make, keys: dict):
    alone, spread = trainer(**keys), trainer(ranks=2, **keys)
    for step in (1, 2):
        expected, got = alone.update(make_batch(step=step)), spread.update(make_batch(step=step))
        for name in SAME:
            assert (name in got) == (name in expected), name
            if name in expected:
                assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        if "critic/vf_loss" in expected:
            assert got["critic/vf_loss"] == pytest.approx(expected["critic/vf_loss"], rel=1e-4)
    ours, theirs = weights(alone), weights(spread)
    assert ours.keys() == theirs.keys()
    moved = {name: value.clone() for name, value in trainer(**keys).weights()}
    assert any(not torch.equal(moved[name], ours[name]) for name in ours)
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=3e-5)


def test_the_distance_to_the_start_model_has_no_gradient_at_the_start_with_an_adapter(trainer: Make):
    """Computing the start model's log-probabilities, the adapter switched off, leaves every weight trainable."""
    plain, held = trainer(**{"lora.rank": 4}), trainer(**{"lora.rank": 4, "algorithm.kl_coef": 0.3})
    expected, got = plain.update(make_batch()), held.update(make_batch())
    assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)


def test_a_rank_without_a_row_of_its_own_changes_nothing(trainer: Make):
    rows = [sample(n, f"e{n}", "t", prompt=[1, 2, 3], turns=[(6 + n, 0)]) for n in range(2)]
    rewarded = [FinishedEpisode(f"e{n}", "t", reward=float(n), samples=[rows[n]]) for n in range(2)]
    batch = TrainBatch(step=1, episodes=rewarded)
    keys = {"repeats": 2, "algorithm.mini_batches": 2}
    expected, got = trainer(**keys).update(batch), trainer(ranks=2, **keys).update(batch)
    assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert got["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-4)
    assert got["tokens/sampled"] == expected["tokens/sampled"]


def test_a_checkpoint_of_two_ranks_resumes_on_two_bit_for_bit_is_exported_and_refused_on_one(
    trainer: Make, tmp_path: Path
):
    keys = {"lora.rank": 4, "optim.schedule": "cosine", "optim.total_steps": 5}
    straight = trainer(ranks=2, **keys)
    straight.update(make_batch(step=1))
    straight.save(tmp_path / "step-1")
    straight.update(make_batch(step=2))
    resumed = trainer(ranks=2, resume=tmp_path / "step-1", **keys)
    assert resumed.step == 1
    resumed.update(make_batch(step=2))
    ours, theirs = weights(straight), weights(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    straight.save(tmp_path / "step-2")
    exported = dict(whole_weights(read_weights(tmp_path / "step-2"), LoraConfig(rank=4)))
    assert exported.keys() == ours.keys()
    for name in ours:
        torch.testing.assert_close(exported[name], ours[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"ranks: checkpoint 2, configuration 1.*ray.processes"):
        trainer(resume=tmp_path / "step-1", **keys)


def test_the_adapter_alone_is_gathered(trainer: Make):
    made, alone = trainer(ranks=2, **{"lora.rank": 4}), trainer(**{"lora.rank": 4})
    ours, theirs = dict(made._model.adapter()), dict(alone._model.adapter())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_reader_that_stops_early_leaves_the_weights_readable(trainer: Make):
    made = trainer(ranks=2, **{"lora.rank": 4})
    before = weights(made)
    reading = made.weights()
    next(reading)
    reading.close()
    after = weights(made)
    assert all(torch.equal(before[name], after[name]) for name in before)
