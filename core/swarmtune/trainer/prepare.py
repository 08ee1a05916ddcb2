"""What is settled of a batch before the first optimizer step: rewards, corrections, values, advantages.

Changes nothing. Asks the models only for what the configuration needs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from swarmtune.config import AlgorithmConfig
from swarmtune.trainer.advantages import OPTIMAL_BASELINES, Facts, estimate
from swarmtune.trainer.batch import Row, from_episodes, to_episodes
from swarmtune.trainer.correction import correct_rows
from swarmtune.trainer.rewards import kl_penalties, shaped_rewards
from swarmtune.types import FinishedEpisode


class Models(Protocol):
    """Forward passes without gradient; per row (T,), 0 off the mask."""

    def logprobs(self, rows: Sequence[Row], *, reference: bool = False) -> list[torch.Tensor]:
        """Of the policy as it is, or of the start model."""
        ...

    def sums_of_squares(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Σπ² over the vocabulary, of the policy as it is."""
        ...

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """The critic's, of the state before each token."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    rows: list[Row]
    """With advantages and whatever else the losses need; rejected tokens and rows are gone."""
    nothing: bool
    """Whether there is nothing for the policy to learn."""
    kl_coef: float | None
    """The next step's coefficient of `kl_in_reward`; None without."""
    metrics: dict[str, float]


def prepare(
    episodes: Sequence[FinishedEpisode],
    rows: list[Row],
    algorithm: AlgorithmConfig,
    models: Models,
    kl_coef: float | None,
) -> Prepared:
    """Rows as `build_rows` makes them → rows to train on.

    Raises:
        ValueError: remax without the metric `reward_baseline` on each episode.
    """
    rewards, metrics = shaped_rewards(episodes, algorithm.overlong)
    if not asks_models(algorithm):
        judged = _judge(episodes, rows, rewards, algorithm, _facts(episodes, rows))
        if not _learns(judged, algorithm):
            return Prepared(judged, True, kl_coef, metrics)
    rows, found = _with_logprobs(rows, algorithm, models)
    metrics |= found
    facts = _facts(episodes, rows)
    if algorithm.kl_in_reward is not None and kl_coef is not None:
        own, reference = (
            to_episodes(rows, _present(rows, name), episodes) for name in ("own_logprobs", "ref_logprobs")
        )
        penalties, kl_coef, found = kl_penalties(own, reference, facts.computed, algorithm.kl_in_reward, kl_coef)
        facts, metrics = replace(facts, penalties=penalties), metrics | found
    if algorithm.advantage in OPTIMAL_BASELINES:
        facts = replace(
            facts,
            old_logprobs=to_episodes(rows, _present(rows, "own_logprobs"), episodes),
            sum_pi_squared=to_episodes(rows, models.sums_of_squares(rows), episodes),
        )
        if all(row.importance is not None for row in rows):
            facts = replace(facts, importance=to_episodes(rows, _present(rows, "importance"), episodes))
    if algorithm.advantage == "gae":
        values = models.values(rows)
        rows = [replace(row, values=v) for row, v in zip(rows, values, strict=True)]
        facts = replace(facts, values=to_episodes(rows, values, episodes))
    rows = _judge(episodes, rows, rewards, algorithm, facts)
    return Prepared(rows, not _learns(rows, algorithm), kl_coef, metrics)


def asks_models(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages depend on more than the rewards."""
    return algorithm.kl_in_reward is not None or algorithm.advantage in {"gae", *OPTIMAL_BASELINES}


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether the start model is asked."""
    return algorithm.kl_coef > 0 or algorithm.kl_in_reward is not None


def _learns(rows: Sequence[Row], algorithm: AlgorithmConfig) -> bool:
    return bool(rows) and (
        algorithm.kl_coef > 0 or algorithm.entropy_coef > 0 or any(bool(row.advantages.any()) for row in rows)
    )


def _facts(episodes: Sequence[FinishedEpisode], rows: Sequence[Row]) -> Facts:
    return Facts([c.bool() for c in to_episodes(rows, [row.loss_mask for row in rows], episodes)])


def _judge(
    episodes: Sequence[FinishedEpisode],
    rows: Sequence[Row],
    rewards: Sequence[float],
    algorithm: AlgorithmConfig,
    facts: Facts,
) -> list[Row]:
    """Rows with their advantages, and with gae their returns."""
    found = estimate(episodes, rewards, algorithm, facts)
    judged = [replace(row, advantages=a) for row, a in zip(rows, from_episodes(rows, found.advantages), strict=True)]
    if algorithm.advantage != "gae":
        return judged
    return [replace(row, returns=r) for row, r in zip(judged, from_episodes(rows, found.returns), strict=True)]


def _with_logprobs(rows: list[Row], algorithm: AlgorithmConfig, models: Models) -> tuple[list[Row], dict[str, float]]:
    """Rows with the log-probabilities that stay fixed during the update, and corrected where they decide over that.

    Our own are computed only where something is compared with them before the step: with a single step, and no
    rejection, the importance weights follow from the step's own forward pass.
    """
    correction = algorithm.rollout_correction
    decoupled = correction is not None and not correction.bypass_mode
    several = algorithm.epochs * algorithm.mini_batches > 1
    inexact = not all(bool(row.exact[row.loss_mask].all()) for row in rows)
    batchwise = correction is not None and (correction.rollout_rs is not None or correction.rollout_is_batch_normalize)
    wanted = algorithm.kl_in_reward is not None or algorithm.advantage in OPTIMAL_BASELINES
    if needs_reference(algorithm):
        values = models.logprobs(rows, reference=True)
        rows = [replace(row, ref_logprobs=v) for row, v in zip(rows, values, strict=True)]
    if not (wanted or (decoupled and (several or batchwise)) or (several and correction is None and inexact)):
        return rows, {}
    rows = [replace(row, own_logprobs=v) for row, v in zip(rows, models.logprobs(rows), strict=True)]
    own = _present(rows, "own_logprobs")
    if correction is not None and decoupled:
        rows = [replace(row, old_logprobs=v) for row, v in zip(rows, own, strict=True)]
        return correct_rows(rows, correction)
    if correction is None and several and inexact:
        old = [torch.where(row.exact, row.rollout_logprobs, v) for row, v in zip(rows, own, strict=True)]
        rows = [replace(row, old_logprobs=v) for row, v in zip(rows, old, strict=True)]
    return rows, {}


def _present(rows: Sequence[Row], name: str) -> list[torch.Tensor]:
    return [getattr(row, name) for row in rows]
