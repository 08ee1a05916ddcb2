"""What an update reports: sums over its passes, and numbers by veRL's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from swarmtune.config import TrainConfig
from swarmtune.trainer.batch import Row
from swarmtune.trainer.critic import explained_variance
from swarmtune.types import FinishedEpisode

_SUMMED = {"loss", "targets", "comparable", "tokens/rejected", "actor/entropy", "actor/kl_loss"}
_SUMMED_FAMILIES = ("actor/pg_", "actor/ppo_", "rollout_corr/", "critic/")


@dataclass(slots=True)
class Tally:
    """Sums over one model's update."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    grad_norms: list[float] = field(default_factory=list)
    """Of the optimizer steps that were taken."""
    skipped: int = 0
    """Optimizer steps not taken because the gradient was not finite."""
    computed_tokens: int = 0
    diffs: list[torch.Tensor] = field(default_factory=list)
    """Pairs (2, n) of rollout and trainer log-probabilities, before the first optimizer step."""

    @property
    def steps(self) -> int:
        return len(self.grad_norms) + self.skipped

    def add(self, output: TensorDict) -> None:
        """The metrics of one round of micro-batches."""
        for name, value in tu.get(output, "metrics").items():
            if name in _SUMMED or name.startswith(_SUMMED_FAMILIES):
                self.sums[name] += float(torch.as_tensor(value, dtype=torch.float64).sum())

    def per_token(self, name: str, by: str = "targets") -> float:
        return self.sums[name] / max(1.0, self.sums[by])


def batch_metrics(episodes: Sequence[FinishedEpisode], rows: Sequence[Row]) -> dict[str, float]:
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "episodes": len(episodes),
        "tasks": len({e.task_id for e in episodes}),
    } | row_metrics(rows)


def row_metrics(rows: Sequence[Row]) -> dict[str, float]:
    return {
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "tokens/sampled": sum(row.targets for row in rows),
    }


def judged_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Advantages, and where there is a critic its values and what it should have said."""
    found = spread_of("critic/advantages", [row.advantages[row.loss_mask] for row in rows])
    valued = [row for row in rows if row.values is not None and row.returns is not None]
    if not valued:
        return found
    values = [row.values[row.loss_mask] for row in valued if row.values is not None]
    returns = [row.returns[row.loss_mask] for row in valued if row.returns is not None]
    found |= spread_of("critic/values", values) | spread_of("critic/returns", returns)
    found["critic/vf_explained_var"] = explained_variance(torch.cat(values), torch.cat(returns))
    return found


def spread_of(name: str, parts: Sequence[torch.Tensor]) -> dict[str, float]:
    together = torch.cat(list(parts)) if parts else torch.zeros(1)
    return {
        f"{name}/mean": float(together.mean()),
        f"{name}/min": float(together.min()),
        f"{name}/max": float(together.max()),
    }


def policy_metrics(tally: Tally, config: TrainConfig) -> dict[str, float]:
    algorithm = config.algorithm
    metrics = {
        "actor/pg_loss": tally.sums["actor/pg_loss"] / tally.steps,
        "actor/loss": tally.sums["loss"] / tally.steps,
        "actor/entropy": tally.per_token("actor/entropy"),
    } | optimizer_metrics("actor", tally)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        if name in tally.sums:
            metrics[name] = tally.per_token(name)
    if algorithm.kl_coef > 0:
        metrics["actor/kl_loss"] = tally.sums["actor/kl_loss"] / tally.steps
        metrics["actor/kl_coef"] = algorithm.kl_coef
    for name in [n for n in tally.sums if n.startswith("rollout_corr/")]:
        metrics[name] = tally.per_token(name, "comparable")
    if "tokens/rejected" in tally.sums:
        metrics["tokens/rejected"] = tally.sums["tokens/rejected"]
    return metrics | mismatch(tally.diffs)


def critic_metrics(tally: Tally) -> dict[str, float]:
    metrics = {"critic/vf_loss": tally.sums["critic/vf_loss"] / tally.steps} | optimizer_metrics("critic", tally)
    return metrics | {name: tally.per_token(name) for name in ("critic/vf_clipfrac", "critic/vpred_mean")}


def optimizer_metrics(of: str, tally: Tally) -> dict[str, float]:
    metrics: dict[str, float] = {
        f"{of}/skipped_non_finite": tally.skipped,
        f"{of}/optimizer_steps": len(tally.grad_norms),
    }
    if tally.grad_norms:
        metrics[f"{of}/grad_norm"] = sum(tally.grad_norms) / len(tally.grad_norms)
    return metrics


def mismatch(pairs: Sequence[torch.Tensor]) -> dict[str, float]:
    """How far engine and trainer are apart on the sampled tokens, as log-probability and as probability."""
    both = torch.cat(list(pairs), dim=1) if pairs else torch.zeros(2, 0)
    if not both.shape[1]:
        return {}
    logprobs, probs = (both[0] - both[1]).abs(), (both[0].exp() - both[1].exp()).abs()
    return {
        "training/rollout_logprobs_diff_mean": float(logprobs.mean()),
        "training/rollout_logprobs_diff_max": float(logprobs.max()),
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
    }
