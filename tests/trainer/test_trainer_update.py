"""Whole updates on a small real model, beside a plain transformers computation of the same thing.

Rules:
1. Gradient and loss do not depend on the packing, on prefix sharing, or on the number of rows of an episode.
2. Logits are divided by the temperature a row was sampled at.
3. A batch with nothing to learn from changes neither weights nor optimizer.
4. `weights` are the trained ones, adapters merged, by Hugging Face names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from trainer_episodes import make_batch, sample

from swarmtune.config import ConfigError, OptimConfig
from swarmtune.trainer import trainer as trainer_module
from swarmtune.trainer.schedule import lr_at
from swarmtune.trainer.trainer import HalfUpdated, Trainer
from swarmtune.types import FinishedEpisode, TrainBatch

Make = Callable[..., Trainer]


def plain_logprobs(model: Any, row: Any) -> torch.Tensor:
    """(sampled tokens,) log-probabilities of a Sample's sampled tokens, by transformers, one row at a time."""
    tokens = torch.tensor(row.token_ids)
    logits = model(input_ids=tokens[None]).logits[0, :-1] / row.temperature
    logp = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    return logp[torch.tensor(row.loss_mask[1:], dtype=torch.bool)]


def with_rollout_of(model: Any, batch: TrainBatch) -> TrainBatch:
    """The batch with the log-probabilities the model really gives: as if it had sampled the tokens."""
    for episode in batch.episodes:
        for row in episode.samples:
            with torch.no_grad():
                values = iter(plain_logprobs(model, row).tolist())
            row.logprobs = [next(values) if m else 0.0 for m in row.loss_mask]
    return batch


def plain_gradient(model: Any, batch: TrainBatch, *, agg: str = "episode-mean") -> dict[str, torch.Tensor]:
    """Gradient of the GRPO loss at ratio 1: -Σ weight · advantage · log p, spelled out."""
    groups: dict[str, list[float]] = {}
    for e in batch.episodes:
        groups.setdefault(e.task_id, []).append(e.reward)
    total = sum(e.sampled_tokens for e in batch.episodes)
    loss = torch.zeros(())
    for e in batch.episodes:
        rewards = torch.tensor(groups[e.task_id])
        advantage = (e.reward - rewards.mean()) / (rewards.std() + 1e-6)
        weight = 1 / total if agg == "token-mean" else 1 / (len(batch.episodes) * e.sampled_tokens)
        for row in e.samples:
            loss = loss - weight * advantage * plain_logprobs(model, row).sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def norm(gradient: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.weights()}


def largest_change(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("agg", ["episode-mean", "token-mean"])
def test_gradient_equals_a_plain_computation(trainer: Make, plain_model, batch: TrainBatch, agg: str):
    batch = with_rollout_of(plain_model(), batch)
    metrics = trainer(**{"algorithm.loss_agg": agg}).update(batch)
    assert metrics["actor/grad_norm"] == pytest.approx(norm(plain_gradient(plain_model(), batch, agg=agg)), rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4


def test_update_is_the_adam_step_of_that_gradient(trainer: Make, plain_model, batch: TrainBatch):
    model = plain_model()
    batch = with_rollout_of(model, batch)
    gradient = plain_gradient(model, batch)
    made = trainer(**{"optim.lr": 1e-3, "optim.grad_clip": 0.5})
    before = snapshot(made)
    made.update(batch)
    scale = 0.5 / norm(gradient)
    for name, value in made.weights():
        if name in gradient:
            g = gradient[name] * scale
            clear = g.abs() > 1e-5
            expected = before[name] - 1e-3 * g / (g.abs() + 1e-8)
            torch.testing.assert_close(value[clear], expected[clear], rtol=0, atol=1e-5)


def test_gradient_does_not_depend_on_the_budget(trainer: Make, batch: TrainBatch):
    norms = [
        trainer(**{"trainer.tokens_per_micro_batch": budget}).update(batch)["actor/grad_norm"]
        for budget in (64, 256, 8192)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_gradient_does_not_depend_on_prefix_sharing(trainer: Make, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch):
    shared = trainer().update(batch)
    monkeypatch.setattr(trainer_module, "shares_prefixes", lambda _: False)
    single = trainer().update(batch)
    assert shared["tokens/computed"] < single["tokens/computed"]
    assert shared["actor/grad_norm"] == pytest.approx(single["actor/grad_norm"], rel=1e-4)
    assert shared["actor/entropy"] == pytest.approx(single["actor/entropy"], rel=1e-5)


def test_gradient_does_not_depend_on_how_an_episode_is_split_into_rows(trainer: Make, plain_model):
    """Two turns in one row, or each turn in a row of its own: the same tokens in the same contexts."""

    def split(episode: FinishedEpisode) -> FinishedEpisode:
        (row,) = episode.samples
        first_turn_ends = row.loss_mask.index(0, row.loss_mask.index(1))
        early = replace(row, token_ids=row.token_ids[:first_turn_ends], loss_mask=row.loss_mask[:first_turn_ends])
        late = replace(row, loss_mask=[0] * first_turn_ends + row.loss_mask[first_turn_ends:])
        return replace(episode, samples=[early, late])

    def one_row(k: int) -> FinishedEpisode:
        rows = [sample(k, f"e{k}", "t", prompt=list(range(18)), turns=[(3 + k, 2), (4, 0)])]
        return FinishedEpisode(f"e{k}", "t", float(k == 1), rows)

    whole = TrainBatch(1, [one_row(k) for k in range(3)])
    apart = TrainBatch(1, [split(e) for e in whole.episodes])
    norms = [trainer().update(with_rollout_of(plain_model(), b))["actor/grad_norm"] for b in (whole, apart)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_logits_are_divided_by_each_rows_temperature(trainer: Make, plain_model, batch: TrainBatch):
    for k, episode in enumerate(batch.episodes):
        for row in episode.samples:
            row.temperature = (0.7, 1.0, 1.6)[k % 3]
    batch = with_rollout_of(plain_model(), batch)
    metrics = trainer().update(batch)
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    assert metrics["actor/grad_norm"] == pytest.approx(norm(plain_gradient(plain_model(), batch)), rel=1e-4)


def test_a_tokens_own_environment_reply_is_not_trained(trainer: Make, plain_model, batch: TrainBatch):
    """The loss sees environment tokens as context only: their made-up log-probabilities change nothing."""
    first = trainer().update(batch)
    for episode in batch.episodes:
        for row in episode.samples:
            row.logprobs = [p if m else -3.0 for p, m in zip(row.logprobs, row.loss_mask, strict=True)]
    assert trainer().update(batch)["actor/pg_loss"] == first["actor/pg_loss"]


def test_kl_to_the_start_model_is_zero_at_first_and_then_grows(trainer: Make, batch: TrainBatch):
    made = trainer(**{"algorithm.kl_coef": 0.1})
    first = made.update(batch)
    second = made.update(make_batch(step=2))
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert second["actor/kl_loss"] > 1e-4


def test_kl_pulls_back_to_the_start_model(trainer: Make, batch: TrainBatch):
    made = trainer(**{"algorithm.kl_coef": 1.0, "optim.lr": 3e-4})
    made.update(batch)
    made.update(make_batch(step=2))
    drifted, *_, later = (made.update(flat(make_batch(step=step)))["actor/kl_loss"] for step in range(3, 9))
    assert 0 < later < drifted


def flat(batch: TrainBatch) -> TrainBatch:
    """The same episodes, all with the same reward: advantage 0."""
    return TrainBatch(batch.step, [replace(e, reward=0.5) for e in batch.episodes])


def test_zero_advantage_changes_nothing_and_is_reported(trainer: Make, batch: TrainBatch):
    made = trainer(**{"optim.weight_decay": 0.1})
    made.update(batch)  # momentum that a careless step would apply
    before = snapshot(made)
    metrics = made.update(flat(make_batch(step=2)))
    assert metrics["actor/skipped_zero_advantage"] == 1.0
    assert largest_change(before, snapshot(made)) == 0.0
    assert made.step == 2


def test_zero_advantage_still_learns_from_the_entropy_bonus(trainer: Make, batch: TrainBatch):
    made = trainer(**{"algorithm.entropy_coef": 0.1})
    before = made.update(flat(batch))
    assert before["actor/skipped_zero_advantage"] == 0.0
    assert made.update(flat(make_batch(step=2)))["actor/entropy"] > before["actor/entropy"]


def test_a_gradient_that_is_not_finite_is_not_applied(trainer: Make, batch: TrainBatch, caplog):
    made = trainer()
    before = snapshot(made)
    batch.episodes[0].reward = math.inf
    with caplog.at_level(logging.WARNING):
        metrics = made.update(batch)
    assert metrics["actor/skipped_non_finite"] == 1.0
    assert largest_change(before, snapshot(made)) == 0.0
    assert all(math.isfinite(v) for v in metrics.values())
    assert made.update(make_batch(step=2))["actor/skipped_non_finite"] == 0.0


def test_batch_without_episodes_is_refused(trainer: Make):
    with pytest.raises(ValueError, match="step 7: a batch without episodes"):
        trainer().update(TrainBatch(7, []))


def test_rows_longer_than_the_model_do_not_crash(trainer: Make, batch: TrainBatch):
    batch.episodes[0].samples.append(sample(99, "e0", "t0", prompt=[1] * 250, turns=[(20, 0)]))
    assert trainer().update(batch)["tokens/over_context"] == 14


def test_epochs_and_mini_batches_take_their_steps_and_move_away_from_the_rollout(
    trainer: Make, plain_model, batch: TrainBatch
):
    batch = with_rollout_of(plain_model(), batch)
    metrics = trainer(**{"algorithm.epochs": 2, "algorithm.mini_batches": 3}).update(batch)
    assert metrics["actor/optimizer_steps"] == 6
    assert metrics["actor/ppo_kl"] != pytest.approx(0.0, abs=1e-4)
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4  # measured before the first step


def test_importance_weights_with_several_steps_use_the_logprobs_before_the_first(
    trainer: Make, plain_model, batch: TrainBatch
):
    """Rollout log-probabilities 0.2 too low everywhere: every weight is e^0.2, in the last epoch as in the first."""
    batch = with_rollout_of(plain_model(), batch)
    for episode in batch.episodes:
        for row in episode.samples:
            row.logprobs = [p - 0.2 if m else 0.0 for p, m in zip(row.logprobs, row.loss_mask, strict=True)]
    keys = {"algorithm.rollout_correction.rollout_is": "token", "optim.lr": 5e-3}
    for epochs in (1, 3):
        metrics = trainer(**keys, **{"algorithm.epochs": epochs}).update(batch)
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(0.2), rel=1e-3)


def test_inexact_tokens_do_not_count_as_mismatch(trainer: Make, plain_model, batch: TrainBatch):
    batch = with_rollout_of(plain_model(), batch)
    row = batch.episodes[0].samples[0]
    row.context_exact = [0] * len(row.token_ids)
    row.logprobs = [-30.0 if m else 0.0 for m in row.loss_mask]
    metrics = trainer().update(batch)
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    assert metrics["actor/grad_norm"] == pytest.approx(norm(plain_gradient(plain_model(), batch)), rel=1e-4)


def test_an_error_before_the_first_step_leaves_the_weights(
    trainer: Make, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
):
    made, twin = trainer(), trainer()
    before = snapshot(made)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(made, "_take_step", fail)
        with pytest.raises(MemoryError):
            made.update(batch)
    assert largest_change(before, snapshot(made)) == 0.0
    assert made.step == 0
    assert made.update(batch)["actor/grad_norm"] == twin.update(batch)["actor/grad_norm"]


def test_an_error_after_a_step_says_that_the_weights_are_lost(
    trainer: Make, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
):
    made = trainer(**{"algorithm.mini_batches": 3})
    take, calls = made._take_step, []

    def fail_second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no room")
        take(*args)

    monkeypatch.setattr(made, "_take_step", fail_second)
    with pytest.raises(HalfUpdated, match="after 1 optimizer steps"):
        made.update(batch)
    with pytest.raises(HalfUpdated):
        made.update(batch)


def test_weights_are_those_of_the_folder_at_first_and_load_into_transformers(trainer: Make, plain_model, batch):
    made, model = trainer(), plain_model()
    names = dict(model.named_parameters())
    got = snapshot(made)
    assert set(names) <= set(got)
    assert all(torch.equal(got[name], value) for name, value in names.items())
    made.update(batch)
    model.load_state_dict(snapshot(made))
    trained = with_rollout_of(model, make_batch(step=2))
    assert made.update(trained)["training/rollout_logprobs_diff_max"] < 1e-4


def test_lora_trains_only_adapters_and_weights_are_merged(trainer: Make, plain_model, batch: TrainBatch):
    made = trainer(**{"lora.rank": 4, "lora.alpha": 8, "optim.lr": 1e-2})
    model = plain_model()
    assert made.parameters == sum(p.numel() for p in model.parameters())
    before = snapshot(made)
    assert set(before) >= {name for name, _ in model.named_parameters()}
    made.update(batch)
    after = snapshot(made)
    assert all(value.dtype == torch.float32 for value in after.values())
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved
    assert all(".q_proj." in n or "_proj." in n for n in moved)
    model.load_state_dict(after)
    trained = with_rollout_of(model, make_batch(step=2))
    assert made.update(trained)["training/rollout_logprobs_diff_max"] < 1e-4
    assert largest_change(after, snapshot(made)) > 0


def test_lora_measures_kl_against_the_model_without_adapter(trainer: Make, batch: TrainBatch):
    made = trainer(**{"lora.rank": 4, "optim.lr": 1e-2, "algorithm.kl_coef": 0.1})
    assert made.update(batch)["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert made.update(make_batch(step=2))["actor/kl_loss"] > 1e-6


@pytest.mark.parametrize("adapter", [{}, {"lora.rank": 4}], ids=["full", "lora"])
def test_gradient_checkpointing_gives_the_same_gradient(trainer: Make, batch: TrainBatch, adapter: dict[str, Any]):
    norms = [trainer(**{"trainer.gradient_checkpointing": on}, **adapter).update(batch) for on in (True, False)]
    assert norms[0]["actor/grad_norm"] == pytest.approx(norms[1]["actor/grad_norm"], rel=1e-5)


def test_a_model_of_another_family_with_a_head_of_its_own(config, tmp_path, batch: TrainBatch):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **shape, **heads)).save_pretrained(tmp_path / "qwen")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "qwen", dtype=torch.float32)
    batch = with_rollout_of(model, batch)
    made = Trainer(config(), tmp_path / "qwen", work_dir=tmp_path)
    made.start()
    metrics = made.update(batch)
    assert metrics["tokens/computed"] < metrics["tokens"]  # prompts are shared here, too
    assert metrics["actor/grad_norm"] == pytest.approx(norm(plain_gradient(model, batch)), rel=1e-4)
    model.load_state_dict(snapshot(made))


def test_everything_works_from_another_thread(config, model_path, tmp_path, batch: TrainBatch):
    def work() -> float:
        made = Trainer(config(), model_path, work_dir=tmp_path)
        made.start()
        return made.update(batch)["actor/grad_norm"]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == work()


def test_bf16_computes_in_bf16_on_fp32_weights(trainer: Make, batch: TrainBatch):
    metrics = trainer(**{"trainer.dtype": "bf16"}).update(batch)
    exact = trainer().update(batch)
    assert metrics["actor/grad_norm"] == pytest.approx(exact["actor/grad_norm"], rel=0.1)
    assert metrics["actor/grad_norm"] != exact["actor/grad_norm"]


def test_repeating_good_episodes_makes_them_likelier(trainer: Make):
    made = trainer(**{"optim.lr": 3e-3})
    prompt = list(range(20))

    def episodes(step: int) -> TrainBatch:
        rows = [sample(k, f"e{k}", "t", prompt=prompt, turns=[(5, 0)]) for k in range(4)]
        return TrainBatch(step, [FinishedEpisode(f"e{k}", "t", float(k == 0), [r]) for k, r in enumerate(rows)])

    losses = [made.update(episodes(step)) for step in range(1, 7)]
    assert losses[-1]["actor/pg_loss"] < losses[0]["actor/pg_loss"] - 0.1


def test_metrics_carry_the_names_others_read(trainer: Make, batch: TrainBatch):
    metrics = trainer().update(batch)
    assert set(metrics) >= {
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/lr",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/entropy",
        "reward/mean",
        "reward/std",
        "reward/min",
        "reward/max",
        "critic/advantages/mean",
        "rows",
        "tokens",
        "training/rollout_logprobs_diff_mean",
        "training/rollout_logprobs_diff_max",
        "s/update",
    }


@pytest.mark.parametrize(
    ("key", "value"), [("algorithm.advantage", "grop"), ("algorithm.policy_loss", "ppo"), ("algorithm.kl_type", "x")]
)
def test_unknown_names_are_refused_before_anything_is_loaded(config, tmp_path, key: str, value: str):
    with pytest.raises(ConfigError, match=f"{key}: unknown '{value}'"):
        Trainer(config(**{key: value}), tmp_path / "absent", work_dir=tmp_path)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0])],
)
def test_learning_rate_warms_up_and_follows_its_schedule(schedule: Any, expected: list[float]):
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=2, total_steps=6)
    assert [lr_at(step, optim) for step in range(1, 8)] == pytest.approx(expected)


def test_cosine_ends_where_linear_does_and_is_above_it_before_half():
    optim = OptimConfig(lr=1.0, schedule="cosine", total_steps=4)
    assert [lr_at(step, optim) for step in range(1, 7)] == pytest.approx([1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_learning_rate_of_the_schedule_reaches_the_optimizer(trainer: Make, batch: TrainBatch):
    made = trainer(**{"optim.lr": 1e-2, "optim.schedule": "linear", "optim.total_steps": 2})
    before = snapshot(made)
    assert made.update(batch)["actor/lr"] == 1e-2
    middle = snapshot(made)
    assert made.update(make_batch(step=3))["actor/lr"] == 0.0
    assert largest_change(before, middle) == pytest.approx(1e-2, rel=0.05)
    assert largest_change(middle, snapshot(made)) == 0.0
