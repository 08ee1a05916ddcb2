"""Rewards → advantages with veRL's estimators, one credit per episode.

An episode counts once, whatever its number of rows: its sampled tokens, row after row, form the one response an
estimator sees, with the reward at its end. Groups are tasks. An episode alone in its group has nothing to be compared
with: for the estimators that compare within a group its advantage is 0.
"""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from swarmtune.config import BASELINE_METRIC, AlgorithmConfig, ConfigError
from swarmtune.types import FinishedEpisode

OPTIMAL_BASELINES = {"optimal_token_baseline", "tir_optimal_token_baseline"}
"""Estimators that weigh tokens by 1 - 2π + Σπ²."""

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
    *OPTIMAL_BASELINES,
}
"""Estimators whose baseline is the group's."""


def known_estimators() -> list[str]:
    return sorted(ADV_ESTIMATOR_REGISTRY)


def check_estimator(name: str, repeats: int) -> None:
    """Raises ConfigError when `name` is unknown or compares within groups of one."""
    if name not in ADV_ESTIMATOR_REGISTRY:
        near = difflib.get_close_matches(name, known_estimators(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"algorithm.advantage: unknown {name!r}; {hint}known: {', '.join(known_estimators())}")
    if name in WITHIN_GROUP and repeats < 2:
        raise ConfigError(
            f"algorithm.advantage: {name!r} compares episodes of one task, and repeats is {repeats}; "
            "set repeats to 2 or more, or take 'reinforce_plus_plus'"
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What was computed of the episodes' sampled tokens. Each list has one (sampled tokens,) tensor per episode."""

    computed: Sequence[torch.Tensor]
    """Boolean: the token is in a row. The others have no context, or were cut off or rejected."""
    penalties: Sequence[torch.Tensor] | None = None
    """Taken off each token's reward."""
    values: Sequence[torch.Tensor] | None = None
    """The critic's, of the state before each token."""
    old_logprobs: Sequence[torch.Tensor] | None = None
    sum_pi_squared: Sequence[torch.Tensor] | None = None
    importance: Sequence[torch.Tensor] | None = None
    """Importance weights trainer / engine."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Per episode, a value for each of its sampled tokens, row after row; 0 for those that were not computed."""

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]


def estimate(
    episodes: Sequence[FinishedEpisode],
    rewards: Sequence[float],
    config: AlgorithmConfig,
    facts: Facts | None = None,
) -> Estimate:
    """Run the estimator over all episodes.

    An episode that was split into several rows is one trajectory: its computed tokens, row after row in the order of
    its samples, and the reward at the last of them. For gae that means that the value after a row's last token is that
    of the state in which the next row begins.

    Args:
        rewards: per episode.
        facts: None where the rewards are all the estimator needs.

    Raises:
        ValueError: remax without the metric `reward_baseline` on each episode.
    """
    facts = facts or Facts([torch.ones(e.sampled_tokens, dtype=torch.bool) for e in episodes])
    sizes = Counter(e.task_id for e in episodes)
    alone = config.advantage in WITHIN_GROUP
    result = Estimate(*([torch.zeros(e.sampled_tokens) for e in episodes] for _ in range(2)))
    scored = [i for i, e in enumerate(episodes) if e.sampled_tokens and not (alone and sizes[e.task_id] < 2)]
    if sum(int(facts.computed[i].sum()) for i in scored) < 2:
        return result
    columns = _Columns([facts.computed[i] for i in scored])
    token_rewards = columns.at_end([rewards[i] for i in scored])
    if (penalties := columns.of(facts.penalties, scored)) is not None:
        token_rewards = token_rewards - penalties
    advantages, returns = _run(
        config,
        columns,
        token_level_rewards=token_rewards,
        index=np.array([episodes[i].task_id for i in scored], dtype=object),
        values=columns.of(facts.values, scored),
        old_log_probs=columns.of(facts.old_logprobs, scored),
        sum_pi_squared=columns.of(facts.sum_pi_squared, scored),
        rollout_is_weights=columns.of(facts.importance, scored),
        reward_baselines=torch.tensor(_baselines([episodes[i] for i in scored]))
        if config.advantage == "remax"
        else None,
    )
    for position, i in enumerate(scored):
        kept = columns.mask[position].bool()
        result.advantages[i][facts.computed[i]] = advantages[position][kept].float()
        result.returns[i][facts.computed[i]] = returns[position][kept].float()
    return result


class _Columns:
    """Computed tokens of E episodes as (E, longest) tensors.

    An episode without any has a masked place that holds its reward: it still counts in its group.
    """

    def __init__(self, computed: Sequence[torch.Tensor]) -> None:
        self._computed = computed
        self._lengths = torch.tensor([int(c.sum()) for c in computed])
        self.mask = (torch.arange(int(self._lengths.max())) < self._lengths[:, None]).float()

    def at_end(self, rewards: Sequence[float]) -> torch.Tensor:
        placed = torch.zeros_like(self.mask)
        placed[torch.arange(len(rewards)), (self._lengths - 1).clamp(min=0)] = torch.tensor(rewards)
        return placed

    def of(self, facts: Sequence[torch.Tensor] | None, scored: Sequence[int]) -> torch.Tensor | None:
        """The facts of the scored episodes in columns; None where there are none."""
        if facts is None:
            return None
        placed = torch.zeros_like(self.mask)
        for position, (i, computed) in enumerate(zip(scored, self._computed, strict=True)):
            placed[position, : int(computed.sum())] = facts[i][computed]
        return placed


def _run(config: AlgorithmConfig, columns: _Columns, **given: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, (E, longest) each, of veRL's estimator; it gets what it takes of `given`."""
    settings = AlgoConfig(
        gamma=config.gamma,
        lam=config.lam,
        adv_estimator=config.advantage,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std,
    )
    given |= {
        "response_mask": columns.mask,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std,
        "config": settings,
        "gamma": config.gamma,
        "lam": config.lam,
    }
    estimator = get_adv_estimator_fn(config.advantage)
    takes = inspect.signature(estimator).parameters
    return estimator(**{name: value for name, value in given.items() if name in takes and value is not None})


def _baselines(episodes: Sequence[FinishedEpisode]) -> list[float]:
    missing = [e.episode_id for e in episodes if BASELINE_METRIC not in e.metrics]
    if missing:
        raise ValueError(
            f"remax needs metrics[{BASELINE_METRIC!r}] (the reward of the task's greedy answer) on every episode; "
            f"missing on {len(missing)}, first {missing[0]!r}"
        )
    return [e.metrics[BASELINE_METRIC] for e in episodes]
