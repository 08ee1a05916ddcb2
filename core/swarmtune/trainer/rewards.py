"""Rewards before they become advantages: the soft punishment of length, and the KL penalty per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from verl.trainer.ppo.core_algos import AdaptiveKLController, kl_penalty

from swarmtune.config import KlInRewardConfig, OverlongConfig
from swarmtune.types import FinishedEpisode


def overlong_reward(tokens: int, config: OverlongConfig) -> float:
    """DAPO's soft punishment of an answer of so many tokens: 0, then a line down to -penalty_factor, and no lower."""
    exceeds = tokens - (config.max_resp_len - config.len)
    return -config.penalty_factor * min(1.0, max(0.0, exceeds / config.len))


def shaped_rewards(
    episodes: Sequence[FinishedEpisode], config: OverlongConfig | None
) -> tuple[list[float], dict[str, float]]:
    """Per episode its reward with the punishment for its sampled tokens, and metrics by veRL's names."""
    if config is None:
        return [e.reward for e in episodes], {}
    punished = [overlong_reward(e.sampled_tokens, config) for e in episodes]
    metrics = {
        "overlong_reward": sum(punished) / len(punished),
        "overlong": sum(p < 0 for p in punished) / len(punished),
    }
    return [e.reward + p for e, p in zip(episodes, punished, strict=True)], metrics


def kl_penalties(
    logprobs: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    computed: Sequence[torch.Tensor],
    config: KlInRewardConfig,
    coefficient: float,
) -> tuple[list[torch.Tensor], float, dict[str, float]]:
    """Per episode what is taken off its tokens' rewards; the next step's coefficient; metrics by veRL's names.

    Args:
        logprobs, reference: per episode (sampled tokens,), of the policy before the step and of the start model.
        computed: per episode (sampled tokens,), boolean: the others cost nothing.
    """
    estimate = _of_floats(config.kl_penalty)
    kl = [torch.where(c, estimate(p, r), 0.0) for p, r, c in zip(logprobs, reference, computed, strict=True)]
    means = [float(k.sum() / c.sum()) for k, c in zip(kl, computed, strict=True) if c.any()]
    current = sum(means) / max(1, len(means))
    following = coefficient
    if config.type == "adaptive":
        controller = AdaptiveKLController(coefficient, config.target_kl, config.horizon)
        controller.update(current, len(kl))
        following = float(controller.value)
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}
    return [coefficient * k for k in kl], following, metrics


def _of_floats(kind: str):
    return lambda logprobs, reference: kl_penalty(logprobs, reference, kind)
