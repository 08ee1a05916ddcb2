"""Rollout correction that is fixed before the first optimizer step: veRL's importance weights and rejection.

A row is a sequence for what works per sequence. Tokens whose training context is not the one they were sampled in
cannot be compared: they have weight 1, and are rejected only with their whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_rejection_mask,
)

from swarmtune.config import AlgorithmConfig, ConfigError, RolloutCorrectionConfig
from swarmtune.trainer.batch import Row

EXAMPLE = torch.zeros(1, 1)
"""One token on which engine and trainer agree: what veRL refuses for it, it refuses for all."""


def check_correction(algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError when veRL would not take the options, or they do not go together."""
    config = algorithm.rollout_correction
    if config is None:
        return
    try:
        correction_of(EXAMPLE, EXAMPLE, EXAMPLE + 1, config)
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
        raise ConfigError(f"algorithm.rollout_correction: {error} (rollout_rs knows {known})") from None
    if config.bypass_mode and algorithm.policy_loss != "vanilla":
        raise ConfigError(
            f"algorithm.policy_loss: {algorithm.policy_loss!r} with rollout_correction.bypass_mode; that mode has "
            "losses of its own (loss_type): leave policy_loss at 'vanilla', or set bypass_mode to false"
        )
    if config.bypass_mode and config.rollout_is_batch_normalize:
        raise ConfigError(
            "algorithm.rollout_correction.rollout_is_batch_normalize: in bypass_mode the weights change with each "
            "pass, so that their mean would be that of a micro-batch; leave one of the two out"
        )


def correction_of(
    log_probs: torch.Tensor, rollout: torch.Tensor, comparable: torch.Tensor, config: RolloutCorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(R, T) each → importance weights (1 where none are asked for), kept tokens (boolean), veRL's metrics.

    `comparable` has at least one token.
    """
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_probs,
        rollout_log_prob=rollout,
        response_mask=comparable.float(),
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    importance = torch.ones_like(log_probs) if weights is None else weights.batch["rollout_is_weights"]
    return importance, kept.bool(), metrics


def keep_whole_rows(kept: torch.Tensor, comparable: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(R, T) booleans → what stays under the mask: `kept`, and what cannot be compared where its row stays."""
    stays = kept.any(-1, keepdim=True) | ~comparable.any(-1, keepdim=True)
    return torch.where(comparable, kept, stays) & mask


def correct_rows(rows: Sequence[Row], config: RolloutCorrectionConfig) -> tuple[list[Row], dict[str, float]]:
    """Rows with their importance weights; rejected tokens lose their place under the mask, and rows without any go.

    Args:
        rows: with `old_logprobs`.
    """
    lengths = [len(row.tokens) for row in rows]

    def padded(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    mask = padded([row.loss_mask for row in rows])
    comparable = mask & padded([row.exact for row in rows])
    if not comparable.any():
        return list(rows), {}
    old = padded([row.old_logprobs for row in rows if row.old_logprobs is not None])
    importance, kept, metrics = correction_of(old, padded([row.rollout_logprobs for row in rows]), comparable, config)
    importance = torch.where(comparable, importance, 1.0)
    kept = keep_whole_rows(kept, comparable, mask)
    metrics["tokens/rejected"] = float((mask & ~kept).sum())
    corrected = [
        replace(row, importance=importance[i, :length], loss_mask=kept[i, :length])
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]
    return [row for row in corrected if row.targets], metrics
