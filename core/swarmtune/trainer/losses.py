"""The training loss: veRL's policy losses by name, plus KL and entropy, with exact weights per token.

veRL's losses multiply each token's loss by `rollout_is_weights` before they aggregate. The loss weight of a token (see
`batch.loss_weights`) goes in there, together with the importance weight where one is used, and the aggregation is the
plain sum: so a micro-batch contributes exactly its part of the mini-batch's loss, however the rows were packed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.padding import no_padding_2_padding

from swarmtune.config import AlgorithmConfig, ConfigError

NEEDS = {
    "bypass_mode": "a configuration of its own; 'vanilla' already compares with the rollout's log-probabilities",
    "dro": "a coefficient (dro_beta) that the configuration does not have",
}
"""Losses of veRL that cannot be used, and what they need."""

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""veRL's KL estimators; a '+' after the name takes the gradient of k2."""


def known_losses() -> list[str]:
    return sorted(set(POLICY_LOSS_REGISTRY) - set(NEEDS))


def check_loss(algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError when the policy loss or the KL estimator is unknown or cannot be used."""
    name = algorithm.policy_loss
    if name in NEEDS:
        raise ConfigError(f"algorithm.policy_loss: {name!r} needs {NEEDS[name]}; known: {', '.join(known_losses())}")
    if name not in POLICY_LOSS_REGISTRY:
        near = difflib.get_close_matches(name, known_losses(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"algorithm.policy_loss: unknown {name!r}; {hint}known: {', '.join(known_losses())}")
    if algorithm.kl_type.removesuffix("+") not in KL_TYPES:
        raise ConfigError(f"algorithm.kl_type: unknown {algorithm.kl_type!r}; known: {', '.join(KL_TYPES)}")


def actor_config(algorithm: AlgorithmConfig) -> FSDPActorConfig:
    """What veRL's losses read of their configuration."""
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=algorithm.clip_ratio_high,
        clip_ratio_low=algorithm.clip_ratio_low,
        clip_ratio_high=algorithm.clip_ratio_high,
        clip_ratio_c=algorithm.clip_ratio_c,
        policy_loss=PolicyLossConfig(loss_mode=algorithm.policy_loss),
        loss_agg_mode="token-sum",
        entropy_coeff=algorithm.entropy_coef,
        use_kl_loss=algorithm.kl_coef > 0,
        kl_loss_coef=algorithm.kl_coef,
        kl_loss_type=algorithm.kl_type,
        use_torch_compile=False,
    )


@dataclass(slots=True)
class PolicyObjective:
    """Callable as veRL's engine calls a loss function. All metrics it returns are sums over tokens, to be added up."""

    algorithm: AlgorithmConfig
    actor: FSDPActorConfig

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        del dp_group
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        entropy = no_padding_2_padding(model_output["entropy"], data)
        # Each micro-batch holds its exact share of the loss; the data-parallel mean over ranks is undone by dp_size.
        ranks = data["dp_size"]
        self.actor.global_batch_info.update(dp_size=ranks, batch_num_tokens=1, global_batch_size=1)
        names = ["response_mask", "exact", "rollout_log_probs", "advantages"]
        names += [name for name in ("old_log_probs", "ref_log_prob") if name in data]
        fields = data.select(*names).to_padded_tensor()
        mask, exact = fields["response_mask"].bool(), fields["exact"].bool()
        weights = data["loss_weights"][:, None] * mask

        old = self._old(fields, log_prob, exact)
        importance, metrics = self._importance(fields, old, mask & exact)
        compute: Any = get_policy_loss_fn(self.algorithm.policy_loss)  # typed as positional-only there
        loss, pg_metrics = compute(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=fields["advantages"],
            response_mask=mask,
            loss_agg_mode="token-sum",
            config=self.actor,
            rollout_is_weights=_as_the_loss_takes_them(self.algorithm.policy_loss, weights * importance, mask),
        )
        targets = float(mask.sum())
        metrics |= {name: float(value) * targets for name, value in pg_metrics.items()}
        metrics["actor/pg_loss"] = loss.item() / ranks
        metrics["actor/entropy"] = float((entropy.detach() * mask).sum())
        metrics["targets"] = targets
        if self.algorithm.entropy_coef > 0:
            loss = loss - self.algorithm.entropy_coef * (entropy * weights).sum() * ranks
        if "ref_log_prob" in fields:
            estimate: Any = kl_penalty  # typed for torch.FloatTensor, which no tensor is to a type checker
            kl = estimate(log_prob, fields["ref_log_prob"], self.algorithm.kl_type)
            kl_loss = (torch.where(mask, kl, 0.0) * weights).sum()
            loss = loss + self.algorithm.kl_coef * kl_loss * ranks
            metrics["actor/kl_loss"] = kl_loss.item()
        metrics["loss"] = loss.item()
        return loss, metrics

    def _old(self, fields: TensorDict, log_prob: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """(R, T) log-probabilities the ratio is taken against.

        Those computed before the first optimizer step where there are any. Otherwise the rollout's, and our own of this
        pass (ratio 1) where the rollout's belong to another context or the importance weight already holds the ratio.
        """
        if "old_log_probs" in fields:
            return fields["old_log_probs"]
        if self.algorithm.rollout_correction is not None:
            return log_prob.detach()
        return torch.where(exact, fields["rollout_log_probs"], log_prob.detach())

    def _importance(
        self, fields: TensorDict, old: torch.Tensor, comparable: torch.Tensor
    ) -> tuple[torch.Tensor | float, dict[str, float]]:
        """(R, T) truncated importance weights, 1 where the rollout's log-probabilities cannot be compared."""
        if self.algorithm.rollout_correction is None or not comparable.any():
            return 1.0, {}
        weights, found = compute_rollout_correction_weights(
            old - fields["rollout_log_probs"],
            comparable,
            rollout_is=self.algorithm.rollout_correction.rollout_is or "token",
            rollout_is_threshold=self.algorithm.rollout_correction.rollout_is_threshold,
        )
        tokens = float(comparable.sum())
        return torch.where(comparable, weights, 1.0), {
            "rollout_corr/rollout_is_mean": found["rollout_is_mean"] * tokens,
            "comparable": tokens,
        }


def _as_the_loss_takes_them(name: str, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weights such that the loss comes out as the weighted sum, for the losses that aggregate in a way of their own.

    sapo divides each row by its tokens. geo_mean takes one weight per row (the geometric mean of what it is given) and
    the mean over rows; its row loss counts with the sum of the row's weights.
    """
    if name == "sapo":
        return weights * mask.sum(-1, keepdim=True)
    if name == "geo_mean":
        return (weights.sum(-1, keepdim=True) * len(weights)).expand_as(weights)
    return weights
