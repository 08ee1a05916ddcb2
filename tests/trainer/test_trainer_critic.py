"""PPO with a critic, KL in the rewards, and supervised steps, as whole updates on a small real model.

Rules:
1. Values are the critic's of the state before each sampled token; what it learns is the return.
2. Resuming with a critic and an adaptive KL coefficient continues bit for bit.
3. A supervised step makes the given tokens likelier, and touches no other model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_episodes import make_batch, sample

from swarmtune.config import ConfigError
from swarmtune.trainer.batch import build_rows
from swarmtune.trainer.trainer import HalfUpdated, Trainer
from swarmtune.types import FinishedEpisode, TrainBatch

Make = Callable[..., Trainer]
GAE = {"algorithm.advantage": "gae", "critic.lr": 1e-3}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def critic_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer._critic is not None
    return {name: value.clone() for name, value in trainer._critic.weights()}


def conversations(step: int = 1, lr: float = 3e-3) -> TrainBatch:
    rows = [sample(k, f"c{k}", "warmup", prompt=list(range(20)), turns=[(5, 2), (3, 0)]) for k in range(4)]
    return TrainBatch(step, [FinishedEpisode(f"c{k}", "warmup", 0.0, [r]) for k, r in enumerate(rows)], lr)


def test_values_are_the_value_models_of_the_state_before_each_sampled_token(trainer: Make, model_path: Path):
    from transformers import AutoModelForTokenClassification

    made = trainer(**GAE)
    rows = build_rows(make_batch().episodes).rows
    module = AutoModelForTokenClassification.from_pretrained(model_path, num_labels=1, dtype=torch.float32)
    module.load_state_dict(critic_weights(made))
    module.eval()
    for row, values in zip(rows, made.values(rows), strict=True):
        with torch.no_grad():
            hidden = module.model(input_ids=row.tokens[None], use_cache=False).last_hidden_state[0]
            plain = module.score(hidden)[:, 0]
        expected = torch.where(row.loss_mask, torch.cat([torch.zeros(1), plain[:-1]]), 0.0)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_the_critic_learns_the_returns_and_reports_by_verls_names(trainer: Make):
    made = trainer(**GAE, **{"critic.epochs": 2, "critic.mini_batches": 2})
    losses = [made.update(make_batch(step=step)) for step in range(1, 9)]
    assert losses[-1]["critic/vf_loss"] < 0.5 * losses[0]["critic/vf_loss"]
    assert losses[-1]["critic/vf_explained_var"] > losses[0]["critic/vf_explained_var"]
    assert losses[0]["critic/optimizer_steps"] == 4
    assert set(losses[0]) >= {
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
        "critic/values/mean",
        "critic/returns/mean",
        "critic/advantages/mean",
    }


def test_the_first_steps_of_its_warm_up_leave_the_policy_alone(trainer: Make):
    made = trainer(**GAE, **{"critic.warmup_steps": 1, "critic.lr_warmup_steps": 2})
    before = weights(made)
    metrics = made.update(make_batch())
    assert metrics["actor/skipped_critic_warmup"] == 1.0
    assert metrics["critic/lr"] == 5e-4
    assert same(before, weights(made))
    assert made.update(make_batch(step=2))["actor/skipped_critic_warmup"] == 0.0
    assert not same(before, weights(made))


def test_an_error_between_critic_and_policy_says_that_the_weights_are_lost(trainer: Make, monkeypatch):
    made = trainer(**GAE)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(made, "_train_policy", fail)
    with pytest.raises(HalfUpdated, match="after 1 optimizer steps"):
        made.update(make_batch())


@pytest.mark.parametrize(
    "keys",
    [GAE | {"critic.mini_batches": 2}, {"algorithm.kl_in_reward": {"kl_coef": 0.5, "type": "adaptive", "horizon": 10}}],
    ids=["critic", "adaptive kl"],
)
def test_resuming_continues_bit_for_bit(trainer: Make, tmp_path: Path, keys: dict):
    straight = trainer(**keys)
    for step in (1, 2):
        straight.update(make_batch(step=step))
    straight.save(tmp_path / "step-2")
    expected = straight.update(make_batch(step=3))
    resumed = trainer(resume=tmp_path / "step-2", **keys)
    metrics = resumed.update(make_batch(step=3))
    assert same(weights(straight), weights(resumed))
    timeless = {name for name in expected if not name.startswith(("s/", "perf/"))}
    assert {name: metrics[name] for name in timeless} == {name: expected[name] for name in timeless}


def test_a_checkpoint_without_critic_is_refused(trainer: Make, tmp_path: Path):
    trainer().save(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"critic: checkpoint None"):
        trainer(resume=tmp_path / "plain", **GAE)


def test_a_critic_with_another_tokenizer_is_refused(config, model_path: Path, tmp_path: Path):
    from shutil import copytree

    ours, other = copytree(model_path, tmp_path / "ours"), copytree(model_path, tmp_path / "other")
    (ours / "tokenizer.json").write_text("{}")
    (other / "tokenizer.json").write_text("{ }")
    with pytest.raises(ConfigError, match="another tokenizer"):
        Trainer(config(**GAE, **{"critic.model": str(other)}), ours, work_dir=tmp_path).start()


def test_kl_in_reward_is_taken_off_each_tokens_reward_and_the_coefficient_adapts(trainer: Make):
    keys = {"kl_coef": 0.5, "kl_penalty": "k2", "type": "adaptive", "target_kl": 1e-6, "horizon": 90}
    made = trainer(**{"algorithm.kl_in_reward": keys})
    first = made.update(make_batch())
    second = made.update(make_batch(step=2))
    assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-9)
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert second["actor/reward_kl_penalty"] > 1e-6
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 9 / 90))  # far below the target
    assert made.update(make_batch(step=3))["actor/reward_kl_penalty_coeff"] > second["actor/reward_kl_penalty_coeff"]


def test_a_long_episode_is_punished_up_to_the_whole_penalty(trainer: Make):
    overlong = {"max_resp_len": 10, "len": 4, "penalty_factor": 0.5}
    batch = make_batch()
    lengths = [e.sampled_tokens for e in batch.episodes]
    punished = [-0.5 * min(1.0, max(0.0, (n - 6) / 4)) for n in lengths]
    assert min(punished) == -0.5 < max(punished)
    metrics = trainer(**{"algorithm.overlong": overlong}).update(batch)
    assert metrics["overlong_reward"] == pytest.approx(sum(punished) / 9)
    assert metrics["overlong"] == pytest.approx(sum(p < 0 for p in punished) / 9)
    shaped = TrainBatch(1, [replace(e, reward=e.reward + p) for e, p in zip(batch.episodes, punished, strict=True)])
    plain = trainer().update(shaped)
    assert metrics["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baselines_get_the_squared_probabilities_of_the_model(trainer: Make, plain_model, name: str):
    made = trainer(**{"algorithm.advantage": name})
    rows = build_rows(make_batch().episodes).rows
    model = plain_model()
    for row, squares in zip(rows, made.sums_of_squares(rows), strict=True):
        with torch.no_grad():
            probs = torch.softmax(model(input_ids=row.tokens[None]).logits[0, :-1] / row.temperature, dim=-1)
        expected = probs.square().sum(-1)[row.loss_mask[1:]]
        torch.testing.assert_close(squares[row.loss_mask], expected, rtol=1e-4, atol=1e-6)
    assert made.update(make_batch())["actor/grad_norm"] > 0


def test_rows_that_are_all_rejected_leave_the_weights(trainer: Make):
    correction = {"rollout_rs": "token_k2", "rollout_rs_threshold": 1e-9}
    made = trainer(**{"algorithm.rollout_correction": correction})
    before = weights(made)
    metrics = made.update(make_batch())
    assert metrics["tokens/rejected"] == metrics["tokens/sampled"]
    assert metrics["actor/skipped_zero_advantage"] == 1.0
    assert same(before, weights(made))


def test_supervised_steps_teach_the_given_tokens_and_leave_the_critic(trainer: Make):
    made = trainer(**GAE)
    rows = build_rows(conversations().episodes).rows
    before, values = weights(made), made.values(rows)
    first = made.update(conversations())
    later = [made.update(conversations(step=step)) for step in range(2, 9)][-1]
    assert later["sft/loss"] < 0.5 * first["sft/loss"]
    assert first["actor/lr"] == 3e-3
    assert made.step == 8
    assert not same(before, weights(made))
    assert all(torch.equal(a, b) for a, b in zip(values, made.values(rows), strict=True))


def test_supervised_loss_is_the_plain_one(trainer: Make, plain_model):
    batch, model, found = conversations(), plain_model(), []
    for episode in batch.episodes:
        (row,) = episode.samples
        tokens = torch.tensor(row.token_ids)
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], dim=-1)
        found.append(logp.gather(1, tokens[1:, None])[:, 0][torch.tensor(row.loss_mask[1:]).bool()])
    assert trainer().update(batch)["sft/loss"] == pytest.approx(-float(torch.cat(found).mean()), rel=1e-4)
