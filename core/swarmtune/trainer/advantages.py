"""Rewards → advantages with veRL's estimators, one credit per episode.

An episode counts once, whatever its number of rows: its sampled tokens, row after row, form the one response an
estimator sees, with the reward at its end. Groups are tasks. An episode alone in its group has nothing to be compared
with: for the estimators that compare within a group its advantage is 0.
"""

from __future__ import annotations

import difflib
import inspect
from collections import Counter

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from swarmtune.config import BASELINE_METRIC, AlgorithmConfig, ConfigError
from swarmtune.types import FinishedEpisode

WITHIN_GROUP = {
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "gpg",
    "gdpo",
    "rloo",
    "rloo_vectorized",
    "opo",
    "reinforce_plus_plus_baseline",
}
"""Estimators whose baseline is the group's."""

NEEDS = {
    "gae": "a critic, which this trainer does not have",
    "optimal_token_baseline": "the sum of squared probabilities per token, which this trainer does not compute",
    "tir_optimal_token_baseline": "the sum of squared probabilities per token, which this trainer does not compute",
}
"""Estimators of veRL that cannot be used, and what they lack."""


def known_estimators() -> list[str]:
    return sorted(set(ADV_ESTIMATOR_REGISTRY) - set(NEEDS))


def check_estimator(name: str, repeats: int) -> None:
    """Raises ConfigError when `name` is unknown, lacks something here, or compares within groups of one."""
    if name in NEEDS:
        raise ConfigError(
            f"algorithm.advantage: {name!r} needs {NEEDS[name]}; take one of {', '.join(known_estimators())}"
        )
    if name not in ADV_ESTIMATOR_REGISTRY:
        near = difflib.get_close_matches(name, known_estimators(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"algorithm.advantage: unknown {name!r}; {hint}known: {', '.join(known_estimators())}")
    if name in WITHIN_GROUP and repeats < 2:
        raise ConfigError(
            f"algorithm.advantage: {name!r} compares episodes of one task, and repeats is {repeats}; "
            "set repeats to 2 or more, or take 'reinforce_plus_plus'"
        )


def episode_advantages(episodes: list[FinishedEpisode], config: AlgorithmConfig) -> list[torch.Tensor]:
    """Per episode, the advantage of each of its sampled tokens, row after row: shape (sampled tokens,).

    Raises:
        ValueError: remax without the metric `reward_baseline` on each episode.
    """
    sizes = Counter(e.task_id for e in episodes)
    alone = config.advantage in WITHIN_GROUP
    result = [torch.zeros(e.sampled_tokens) for e in episodes]
    scored = [i for i, e in enumerate(episodes) if e.sampled_tokens and not (alone and sizes[e.task_id] < 2)]
    if sum(episodes[i].sampled_tokens for i in scored) < 2:
        return result
    advantages, mask = _estimate([episodes[i] for i in scored], config)
    for i, row, kept in zip(scored, advantages, mask.bool(), strict=True):
        result[i] = row[kept].float()
    return result


def _estimate(episodes: list[FinishedEpisode], config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and mask, (E, longest) each, of veRL's estimator."""
    lengths = torch.tensor([e.sampled_tokens for e in episodes])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(episodes)), lengths - 1] = torch.tensor([e.reward for e in episodes])
    given = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array([e.task_id for e in episodes], dtype=object),
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std,
        "config": AlgoConfig(
            gamma=config.gamma,
            lam=config.lam,
            adv_estimator=config.advantage,
            norm_adv_by_std_in_grpo=config.norm_adv_by_std,
        ),
    }
    if config.advantage == "remax":
        given["reward_baselines"] = torch.tensor(_baselines(episodes))
    estimator = get_adv_estimator_fn(config.advantage)
    takes = inspect.signature(estimator).parameters
    advantages, _ = estimator(**{name: value for name, value in given.items() if name in takes})
    return advantages, mask


def _baselines(episodes: list[FinishedEpisode]) -> list[float]:
    missing = [e.episode_id for e in episodes if BASELINE_METRIC not in e.metrics]
    if missing:
        raise ValueError(
            f"remax needs metrics[{BASELINE_METRIC!r}] (the reward of the task's greedy answer) on every episode; "
            f"missing on {len(missing)}, first {missing[0]!r}"
        )
    return [e.metrics[BASELINE_METRIC] for e in episodes]
