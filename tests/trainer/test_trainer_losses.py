"""The loss on a fixed batch equals an independent computation, for each of veRL's policy losses.

Rules:
1. Only sampled tokens count, in the policy, KL and entropy terms.
2. episode-mean: an episode's mean token loss counts 1/E, however many rows it has. token-mean: each token counts 1/T.
3. The sum over micro-batches is the loss, however the rows were packed.
4. Tokens whose training context is not the one they were sampled in get ratio 1 and importance weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from trainer_episodes import episode_advantages, make_batch
from verl.utils import tensordict_utils as tu

from swarmtune.config import AlgorithmConfig, ConfigError, RolloutCorrectionConfig
from swarmtune.trainer.batch import Row, build_rows, micro_batches
from swarmtune.trainer.correction import correct_rows
from swarmtune.trainer.critic import ValueObjective
from swarmtune.trainer.losses import TEACH, PolicyObjective, actor_config, check_loss, known_losses

LOW, HIGH, CAP = 0.2, 0.28, 3.0
DRO_BETA = 0.7


@dataclass
class Fixed:
    """Rows and, per row, made-up log-probabilities of its tokens and entropies; (T,) each."""

    rows: list[Row]
    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]


@pytest.fixture
def fixed() -> Fixed:
    episodes = make_batch().episodes
    rows = build_rows(episodes, episode_advantages(episodes, AlgorithmConfig())).rows
    rows = [replace(r, advantages=r.advantages + 0.3 * r.loss_mask) for r in rows]  # so that sums do not vanish
    generator = torch.Generator().manual_seed(5)
    logprobs = [r.rollout_logprobs + 0.4 * torch.randn(len(r.tokens), generator=generator) for r in rows]
    entropies = [torch.rand(len(r.tokens), generator=generator) for r in rows]
    return Fixed(rows, [p.requires_grad_() for p in logprobs], entropies)


def nested(values: list[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
    """As an engine gives them: an entry belongs to the next token, the last of a row to none."""
    shifted = torch.cat([torch.cat([v[1:], v.new_full((1,), 7.0)]) for v in values])
    return torch.nested.nested_tensor_from_jagged(shifted, offsets)


def objective(fixed: Fixed, *, tokens: int = 10**6, **keys: object) -> tuple[float, dict[str, float]]:
    """Loss of our objective, gradients left on `fixed.logprobs`. An entry belongs to the next token, as veRL has it."""
    algorithm = AlgorithmConfig.model_validate(
        {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": CAP, "dro_beta": DRO_BETA, **keys}
    )
    compute = PolicyObjective(algorithm, actor_config(algorithm))
    total, metrics = 0.0, {}
    for micro in micro_batches(fixed.rows, range(len(fixed.rows)), tokens=tokens, loss_agg=algorithm.loss_agg):
        tu.assign_non_tensor(micro.data, dp_size=1)

        offsets = micro.data["input_ids"].offsets()
        logprobs = nested([fixed.logprobs[i] for i in micro.rows], offsets)
        entropies = nested([fixed.entropies[i] for i in micro.rows], offsets)
        loss, found = compute({"log_probs": logprobs, "entropy": entropies}, micro.data)
        loss.backward()
        total += loss.item()
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return total, metrics


def weighted(fixed: Fixed, per_row: Callable[[int], torch.Tensor], agg: str = "episode-mean") -> torch.Tensor:
    """Σ weight · loss with the weights spelled out; `per_row` gives the losses of a row's sampled tokens."""
    losses: dict[int, list[torch.Tensor]] = {}
    for i, row in enumerate(fixed.rows):
        losses.setdefault(row.episode, []).append(per_row(i))
    if agg == "token-mean":
        return torch.cat([x for parts in losses.values() for x in parts]).mean()
    return torch.stack([torch.cat(parts).mean() for parts in losses.values()]).mean()


def on_tokens(formula: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]):
    """formula(logprobs, old, advantages) of a row's sampled tokens, as a function of fixed and the row."""

    def apply(fixed: Fixed, i: int) -> torch.Tensor:
        row, m = fixed.rows[i], fixed.rows[i].loss_mask
        return formula(fixed.logprobs[i][m], row.rollout_logprobs[m], row.advantages[m])

    return apply


def vanilla(p, o, a):
    r = (p - o).exp()
    clipped = torch.maximum(-a * r, -a * r.clamp(1 - LOW, 1 + HIGH))
    return torch.where(a < 0, torch.minimum(clipped, -a * CAP), clipped)


def gspo(p, o, a):
    s = (p - o).mean().exp().detach() * (p - p.detach()).exp()  # each token's gradient is its own
    return torch.maximum(-a * s, -a * s.clamp(1 - LOW, 1 + HIGH))


def sapo(p, o, a):
    tau = torch.where(a > 0, 1.0, 1.05)
    return -a * torch.sigmoid(tau * ((p - o).exp() - 1)) * 4 / tau


def cispo(p, o, a):
    return -(p - o).exp().clamp(1 - LOW, 1 + HIGH).detach() * a * p


def dppo_tv(p, o, a):
    moved = p.exp() - o.exp()
    keep = torch.where(a > 0, moved <= HIGH, moved >= -LOW)
    return -a * (p - o).exp().clamp(max=CAP).detach() * p * keep


def dppo_kl(p, o, a):
    q, w = p.exp(), o.exp()
    kl = w * (o - p) + (1 - w) * ((1 - w + 1e-8) / (1 - q + 1e-8)).log()
    keep = torch.where(a > 0, (kl <= HIGH) | (q <= w), (kl <= LOW) | (q >= w))
    return -a * (p - o).exp().clamp(max=CAP).detach() * p * keep


def geo_mean(p, o, a):
    moved = p - o
    sign = a.sign()
    bounded = sign * torch.minimum(sign * moved, sign * moved.clamp(-LOW, HIGH))
    return (-a.mean() * bounded.mean().exp()).expand_as(p)


FORMULAS = {
    "vanilla": vanilla,
    "gspo": gspo,
    "sapo": sapo,
    "gpg": lambda p, o, a: -p * a,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "geo_mean": geo_mean,
    "dro": lambda p, o, a: -(p * a - 0.5 * DRO_BETA * (p - o) ** 2),
}
SEES_THE_MICRO_BATCH = {"clip_cov", "kl_cov"}
"""Losses that pick tokens by statistics of the micro-batch they are in, which is veRL's definition of them."""


@pytest.fixture
def one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtune.trainer.batch.MAX_PADDING", 1.0)


@pytest.mark.parametrize("agg", ["episode-mean", "token-mean"])
@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize("tokens", [40, 10**6])
def test_loss_equals_its_formula(fixed: Fixed, name: str, agg: str, tokens: int):
    value, _ = objective(fixed, policy_loss=name, loss_agg=agg, tokens=tokens)
    got = [p.grad.clone() for p in fixed.logprobs if p.grad is not None]
    row_loss = on_tokens(FORMULAS[name])
    expected = weighted(fixed, lambda i: row_loss(fixed, i), agg)
    assert value == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    for ours, theirs in zip(got, torch.autograd.grad(expected, fixed.logprobs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_every_known_loss_is_checked_here():
    assert set(known_losses()) == set(FORMULAS) | SEES_THE_MICRO_BATCH


def test_kl_cov_adds_the_penalty_to_the_token_of_largest_covariance(fixed: Fixed, one_micro_batch: None):
    value, _ = objective(fixed, policy_loss="kl_cov")
    plain = weighted(fixed, lambda i: on_tokens(lambda p, o, a: -a * (p - o).exp())(fixed, i))
    p = torch.cat([x[r.loss_mask] for x, r in zip(fixed.logprobs, fixed.rows, strict=True)])
    a = torch.cat([r.advantages[r.loss_mask] for r in fixed.rows])
    chosen = ((a - a.mean()) * (p - p.mean())).max()

    def penalty(p_row, o_row, a_row):
        hit = torch.isclose((a_row - a.mean()) * (p_row - p.mean()), chosen, atol=0)
        return torch.where(hit, 0.1 * (p_row - o_row).abs(), 0.0)

    expected = plain + weighted(fixed, lambda i: on_tokens(penalty)(fixed, i))
    assert value == pytest.approx(expected.item(), rel=1e-4)


def test_clip_cov_leaves_out_one_token_of_high_covariance(fixed: Fixed, one_micro_batch: None):
    value, _ = objective(fixed, policy_loss="clip_cov")
    p = torch.cat([x[r.loss_mask] for x, r in zip(fixed.logprobs, fixed.rows, strict=True)])
    a = torch.cat([r.advantages[r.loss_mask] for r in fixed.rows])

    def clipped(p_row, o_row, a_row):
        r = (p_row - o_row).exp()
        return torch.maximum(-a_row * r, -a_row * r.clamp(1 - LOW, 1 + HIGH))

    whole = weighted(fixed, lambda i: on_tokens(clipped)(fixed, i)).item()
    counts: dict[int, int] = {}
    for row in fixed.rows:
        counts[row.episode] = counts.get(row.episode, 0) + row.targets
    candidates = []
    for i, row in enumerate(fixed.rows):
        m = row.loss_mask
        cov = (row.advantages[m] - a.mean()) * (fixed.logprobs[i][m] - p.mean())
        r = (fixed.logprobs[i][m] - row.rollout_logprobs[m]).exp()
        bound = -row.advantages[m] * r.clamp(1 - LOW, 1 + HIGH) > -row.advantages[m] * r
        losses = on_tokens(clipped)(fixed, i) / (len(counts) * counts[row.episode])
        candidates += losses[(cov > 1) & (cov < 5) & ~bound].tolist()
    assert candidates
    assert min(abs(whole - c - value) for c in candidates) < 1e-6


def test_an_episode_split_into_two_rows_weighs_as_much_as_in_one(fixed: Fixed):
    weights = {}
    for micro in micro_batches(fixed.rows, range(len(fixed.rows)), tokens=64, loss_agg="episode-mean"):
        for i, w in zip(micro.rows, micro.data["loss_weights"].tolist(), strict=True):
            row = fixed.rows[i]
            weights[row.episode] = weights.get(row.episode, 0.0) + w * row.targets
    assert len(weights) == 9
    assert list(weights.values()) == pytest.approx([1 / 9] * 9)


@pytest.mark.parametrize("agg", ["episode-mean", "token-mean"])
@pytest.mark.parametrize("kind", ["low_var_kl", "kl", "abs", "mse"])
def test_kl_term_covers_sampled_tokens_only(fixed: Fixed, kind: str, agg: str):
    for i, row in enumerate(fixed.rows):
        reference = torch.full((len(row.tokens),), 3.0)  # elsewhere than under the mask it must not be seen
        reference[row.loss_mask] = row.rollout_logprobs[row.loss_mask] - 0.1 * (i + 1)
        object.__setattr__(row, "ref_logprobs", reference)
    keys = {"kl_type": kind, "loss_agg": agg}
    with_kl, metrics = objective(fixed, kl_coef=0.5, **keys)

    def kl(i: int) -> torch.Tensor:
        row = fixed.rows[i]
        d = fixed.logprobs[i][row.loss_mask] - row.ref_logprobs[row.loss_mask]
        return {"kl": d, "abs": d.abs(), "mse": d * d / 2, "low_var_kl": (-d).exp() + d - 1}[kind]

    expected = weighted(fixed, kl, agg).item()
    assert metrics["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)
    assert with_kl == pytest.approx(metrics["actor/pg_loss"] + 0.5 * expected, rel=1e-4)


def test_entropy_bonus_is_subtracted_over_sampled_tokens_only(fixed: Fixed):
    fixed.entropies = [e.requires_grad_() for e in fixed.entropies]
    value, metrics = objective(fixed, entropy_coef=0.3)
    expected = weighted(fixed, lambda i: fixed.entropies[i][fixed.rows[i].loss_mask]).item()
    assert value == pytest.approx(metrics["actor/pg_loss"] - 0.3 * expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_importance_weights_are_truncated_and_skip_inexact_tokens(fixed: Fixed, kind: str):
    for row in fixed.rows[::2]:
        row.exact[row.loss_mask.nonzero()[0, 0]] = False
    _, metrics = objective(fixed, rollout_correction={"rollout_is": kind, "rollout_is_threshold": 1.3})

    def row_loss(i: int) -> torch.Tensor:
        row = fixed.rows[i]
        m, exact = row.loss_mask, row.exact[row.loss_mask]
        log_ratio = (fixed.logprobs[i][m] - row.rollout_logprobs[m]).detach()
        if kind == "sequence":
            log_ratio = (log_ratio * exact).sum().expand_as(log_ratio)
        weight = torch.where(exact, log_ratio.exp().clamp(max=1.3), 1.0)
        return -row.advantages[m] * weight

    assert metrics["actor/pg_loss"] == pytest.approx(weighted(fixed, row_loss).item(), rel=1e-4)


def test_without_correction_an_inexact_token_has_ratio_one(fixed: Fixed):
    for row in fixed.rows:
        row.exact[:] = False
    value, metrics = objective(fixed, loss_agg="token-mean")
    expected = weighted(fixed, lambda i: -fixed.rows[i].advantages[fixed.rows[i].loss_mask], "token-mean").item()
    assert value == pytest.approx(expected, rel=1e-5)
    assert metrics["actor/ppo_kl"] == 0.0


def test_metrics_are_means_over_sampled_tokens_across_micro_batches(fixed: Fixed):
    _, metrics = objective(fixed, tokens=40)
    p = torch.cat([x[r.loss_mask] for x, r in zip(fixed.logprobs, fixed.rows, strict=True)])
    o = torch.cat([r.rollout_logprobs[r.loss_mask] for r in fixed.rows])
    assert metrics["targets"] == len(p)
    assert metrics["actor/ppo_kl"] / metrics["targets"] == pytest.approx((o - p).mean().item(), rel=1e-4)
    assert math.isfinite(metrics["actor/pg_clipfrac"])


def test_unknown_loss_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown 'vanila'; did you mean 'vanilla'\? known: .*gspo"):
        check_loss(AlgorithmConfig(policy_loss="vanila"))


def test_bypass_mode_by_name_says_which_key_it_is():
    with pytest.raises(ConfigError, match=r"rollout_correction\.bypass_mode"):
        check_loss(AlgorithmConfig(policy_loss="bypass_mode"))


def test_dro_without_its_weight_is_refused():
    with pytest.raises(ConfigError, match="dro_beta"):
        check_loss(AlgorithmConfig(policy_loss="dro"))


BYPASS = {"bypass_mode": True, "rollout_is": "token", "rollout_is_threshold": 1.3}


@pytest.mark.parametrize("agg", ["episode-mean", "token-mean"])
@pytest.mark.parametrize("tokens", [40, 10**6])
@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_bypass_mode_rejects_by_the_present_policy(fixed: Fixed, kind: str, tokens: int, agg: str):
    rejects = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.08}
    value, metrics = objective(
        fixed, rollout_correction=BYPASS | rejects | {"loss_type": kind}, tokens=tokens, loss_agg=agg
    )

    def row_loss(i: int) -> torch.Tensor:
        row, m = fixed.rows[i], fixed.rows[i].loss_mask
        p, o, a = fixed.logprobs[i][m], row.rollout_logprobs[m], row.advantages[m]
        kept = 0.5 * (p - o) ** 2 <= 0.08
        losses = vanilla(p, o, a) if kind == "ppo_clip" else -a * p * (p - o).exp().clamp(max=1.3).detach()
        return losses * kept

    assert value == pytest.approx(weighted(fixed, row_loss, agg).item(), rel=1e-4, abs=1e-6)
    assert 0 < metrics["tokens/rejected"] < metrics["targets"]


def test_importance_weights_outside_of_two_bounds_are_zero(fixed: Fixed):
    _, metrics = objective(fixed, rollout_correction={"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"})

    def row_loss(i: int) -> torch.Tensor:
        row, m = fixed.rows[i], fixed.rows[i].loss_mask
        ratio = (fixed.logprobs[i][m] - row.rollout_logprobs[m]).detach().exp()
        return -row.advantages[m] * torch.where((ratio >= 0.8) & (ratio <= 1.25), ratio, 0.0)

    assert metrics["actor/pg_loss"] == pytest.approx(weighted(fixed, row_loss).item(), rel=1e-4)


@pytest.mark.parametrize(
    ("rejects", "bound", "statistic"),
    [
        ("token_k1", "0.7_1.4", lambda k: (k >= math.log(0.7)) & (k <= math.log(1.4))),
        ("token_k3", 0.05, lambda k: (-k).exp() - 1 + k <= 0.05),
        ("seq_sum_k1", "0.5_2.0", lambda k: (math.log(0.5) <= k.sum()) & (k.sum() <= math.log(2.0))),
        ("seq_mean_k1", "0.95_1.1", lambda k: (math.log(0.95) <= k.mean()) & (k.mean() <= math.log(1.1))),
        ("seq_mean_k3", 0.08, lambda k: ((-k).exp() - 1 + k).mean() <= 0.08),
        ("seq_max_k2", 0.2, lambda k: (0.5 * k**2).max() <= 0.2),
    ],
)
def test_rejection_takes_tokens_or_rows_out_before_the_step(fixed: Fixed, rejects: str, bound, statistic):
    rows = [replace(r, old_logprobs=p.detach()) for r, p in zip(fixed.rows, fixed.logprobs, strict=True)]
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs=rejects, rollout_rs_threshold=bound)
    corrected, metrics = correct_rows(rows, config)
    expected = []
    for row in rows:
        k = row.rollout_logprobs[row.loss_mask] - row.old_logprobs[row.loss_mask]
        mask = row.loss_mask.clone()
        mask[row.loss_mask] = statistic(k).expand_as(k)
        if mask.any():
            expected.append((mask, torch.where(row.loss_mask, (row.old_logprobs - row.rollout_logprobs).exp(), 0)))
    assert 0 < metrics["tokens/rejected"] < sum(r.targets for r in rows)
    for row, (mask, weights) in zip(corrected, expected, strict=True):
        assert torch.equal(row.loss_mask, mask)
        torch.testing.assert_close(row.importance[mask], weights[mask].clamp(max=2.0))


def test_tokens_that_cannot_be_compared_are_rejected_only_with_their_row(fixed: Fixed):
    rows = [replace(r, old_logprobs=r.rollout_logprobs.clone()) for r in fixed.rows]
    for row in rows[:2]:
        row.exact[row.loss_mask.nonzero()[0, 0]] = False
    rows[1] = replace(rows[1], old_logprobs=rows[1].rollout_logprobs + 1.0)
    corrected, _ = correct_rows(rows, RolloutCorrectionConfig(rollout_rs="seq_mean_k2", rollout_rs_threshold=0.1))
    assert len(corrected) == len(rows) - 1
    assert torch.equal(corrected[0].loss_mask, rows[0].loss_mask)
    assert float(corrected[0].importance[rows[0].loss_mask][0]) == 1.0


def test_normalized_importance_weights_have_mean_one(fixed: Fixed):
    rows = [replace(r, old_logprobs=p.detach()) for r, p in zip(fixed.rows, fixed.logprobs, strict=True)]
    corrected, _ = correct_rows(rows, RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True))
    assert float(torch.cat([r.importance[r.loss_mask] for r in corrected]).mean()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"rollout_rs": "seq_sum_k9", "rollout_rs_threshold": 1.0}, "seq_sum_k9"),
        ({"rollout_is_threshold": "wide"}, "wide"),
        ({"bypass_mode": True, "rollout_is_batch_normalize": True}, "bypass_mode"),
    ],
)
def test_a_correction_that_cannot_be_done_is_refused(keys: dict, told: str):
    with pytest.raises(ConfigError, match=rf"rollout_correction.*{told}"):
        check_loss(AlgorithmConfig.model_validate({"rollout_correction": keys}))


@pytest.mark.parametrize("tokens", [40, 10**6])
def test_supervised_loss_is_the_mean_over_the_taught_tokens(fixed: Fixed, tokens: int):
    algorithm = AlgorithmConfig()
    compute, total = PolicyObjective(algorithm, actor_config(algorithm)), 0.0
    for micro in micro_batches(fixed.rows, range(len(fixed.rows)), tokens=tokens):
        tu.assign_non_tensor(micro.data, dp_size=1, **{TEACH: True})
        offsets = micro.data["input_ids"].offsets()
        loss, _ = compute({"log_probs": nested([fixed.logprobs[i] for i in micro.rows], offsets)}, micro.data)
        total += loss.item()
    p = torch.cat([x[r.loss_mask] for x, r in zip(fixed.logprobs, fixed.rows, strict=True)])
    assert total == pytest.approx(-p.mean().item(), rel=1e-5)


@pytest.mark.parametrize("tokens", [40, 10**6])
def test_value_loss_is_clipped_and_the_mean_over_sampled_tokens(fixed: Fixed, tokens: int):
    generator = torch.Generator().manual_seed(7)
    old, returns, new = ([torch.randn(len(r.tokens), generator=generator) for r in fixed.rows] for _ in range(3))
    rows = [replace(r, values=v, returns=g) for r, v, g in zip(fixed.rows, old, returns, strict=True)]
    total, clipped = 0.0, 0.0
    for micro in micro_batches(rows, range(len(rows)), tokens=tokens):
        tu.assign_non_tensor(micro.data, dp_size=1)
        offsets = micro.data["input_ids"].offsets()
        loss, metrics = ValueObjective(0.5)({"values": nested([new[i] for i in micro.rows], offsets)}, micro.data)
        total += loss.item()
        clipped += metrics["critic/vf_clipfrac"]
    v, g, o = (torch.cat([x[r.loss_mask] for x, r in zip(part, rows, strict=True)]) for part in (new, returns, old))
    bounded = torch.maximum(torch.minimum(v, o + 0.5), o - 0.5)
    expected = 0.5 * torch.maximum((v - g) ** 2, (bounded - g) ** 2)
    assert total == pytest.approx(expected.mean().item(), rel=1e-5)
    assert clipped == pytest.approx(float(((bounded - g) ** 2 > (v - g) ** 2).sum()), rel=1e-5)


def test_unknown_kl_type_is_refused():
    with pytest.raises(ConfigError, match=r"kl_type: unknown 'full'"):
        check_loss(AlgorithmConfig(kl_type="full"))
