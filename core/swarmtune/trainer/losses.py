"""The training losses: veRL's policy losses by name, KL, entropy and the supervised loss; exact weights per token.

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
from verl.trainer.ppo.core_algos import (
    POLICY_LOSS_REGISTRY,
    compute_policy_loss_reinforce,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import no_padding_2_padding

from swarmtune.config import AlgorithmConfig, ConfigError
from swarmtune.trainer.correction import check_correction, correction_of, keep_whole_rows

NOT_BY_NAME = {"bypass_mode": "is the key algorithm.rollout_correction.bypass_mode"}
"""Losses of veRL that are chosen otherwise."""

TEACH = "teach"
"""Non-tensor of a micro-batch: it holds given answers to be learned, not sampled ones to be judged."""

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""veRL's KL estimators; a '+' after the name takes the gradient of k2."""


def known_losses() -> list[str]:
    return sorted(set(POLICY_LOSS_REGISTRY) - set(NOT_BY_NAME))


def check_loss(algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError when policy loss, a KL estimator or the rollout correction is unknown or cannot be used."""
    name = algorithm.policy_loss
    if name in NOT_BY_NAME:
        raise ConfigError(f"algorithm.policy_loss: {name!r} {NOT_BY_NAME[name]}; known: {', '.join(known_losses())}")
    if name not in POLICY_LOSS_REGISTRY:
        near = difflib.get_close_matches(name, known_losses(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"algorithm.policy_loss: unknown {name!r}; {hint}known: {', '.join(known_losses())}")
    if name == "dro" and algorithm.dro_beta is None:
        raise ConfigError("algorithm.dro_beta: policy_loss 'dro' needs the weight of its quadratic penalty; set it")
    kinds = {"kl_type": algorithm.kl_type}
    if algorithm.kl_in_reward is not None:
        kinds["kl_in_reward.kl_penalty"] = algorithm.kl_in_reward.kl_penalty
    for key, kind in kinds.items():
        if kind.removesuffix("+") not in KL_TYPES:
            raise ConfigError(f"algorithm.{key}: unknown {kind!r}; known: {', '.join(KL_TYPES)}")
    check_correction(algorithm)


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
        policy_loss=PolicyLossConfig(loss_mode=algorithm.policy_loss, dro_beta=algorithm.dro_beta),
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
        if tu.get_non_tensor_data(data, key=TEACH, default=False):
            return _taught(model_output, data)
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        entropy = no_padding_2_padding(model_output["entropy"], data)
        # Each micro-batch holds its exact share of the loss; the data-parallel mean over ranks is undone by dp_size.
        ranks: Any = data["dp_size"]
        self.actor.global_batch_info.update(dp_size=ranks, batch_num_tokens=1, global_batch_size=1)
        names = ["response_mask", "exact", "rollout_log_probs", "advantages"]
        names += [name for name in ("old_log_probs", "ref_log_prob", "rollout_is_weights") if name in data]
        fields = data.select(*names).to_padded_tensor()
        mask, exact = fields["response_mask"].bool(), fields["exact"].bool()
        weights = data["loss_weights"][:, None] * mask

        if self._bypasses:
            loss, pg_metrics, metrics = self._bypass_loss(fields, log_prob, mask, mask & exact, weights)
        else:
            loss, pg_metrics, metrics = self._policy_loss(fields, log_prob, mask, exact, weights)
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

    @property
    def _bypasses(self) -> bool:
        return self.algorithm.rollout_correction is not None and self.algorithm.rollout_correction.bypass_mode

    def _policy_loss(
        self,
        fields: TensorDict,
        log_prob: torch.Tensor,
        mask: torch.Tensor,
        exact: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any], dict[str, float]]:
        """The loss by its name, its own metrics, and those of the correction."""
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
        return loss, pg_metrics, metrics

    def _bypass_loss(
        self,
        fields: TensorDict,
        log_prob: torch.Tensor,
        mask: torch.Tensor,
        comparable: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any], dict[str, float]]:
        """veRL's bypass mode: the engine's policy is the old one; weights and rejection follow the present policy."""
        config = self.algorithm.rollout_correction
        assert config is not None
        own = log_prob.detach()
        rollout = torch.where(comparable, fields["rollout_log_probs"], own)
        importance, kept, metrics = torch.ones_like(own), mask, dict[str, float]()
        if comparable.any():
            importance, kept, found = correction_of(own, rollout, comparable, config)
            importance = torch.where(comparable, importance, 1.0)
            kept = keep_whole_rows(kept, comparable, mask)
            metrics = _summed(found, float(comparable.sum())) | {"tokens/rejected": float((mask & ~kept).sum())}
        given = {
            "log_prob": log_prob,
            "advantages": fields["advantages"],
            "response_mask": kept,
            "loss_agg_mode": "token-sum",
            "config": self.actor,
        }
        if config.loss_type == "reinforce":
            loss, pg_metrics = compute_policy_loss_reinforce(
                rollout_log_prob=rollout, rollout_is_weights=weights * importance, **given
            )
        else:
            compute: Any = get_policy_loss_fn("vanilla")
            loss, pg_metrics = compute(old_log_prob=rollout, rollout_is_weights=weights, **given)
        return loss, pg_metrics, metrics

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
        """(R, T) importance weights, 1 where the rollout's log-probabilities cannot be compared.

        Those fixed before the first optimizer step where there are any; with a single step they follow from its own
        forward pass.
        """
        if "rollout_is_weights" in fields:
            return fields["rollout_is_weights"], {}
        config = self.algorithm.rollout_correction
        if config is None or not comparable.any():
            return 1.0, {}
        weights, _, found = correction_of(old, fields["rollout_log_probs"], comparable, config)
        return torch.where(comparable, weights, 1.0), _summed(found, float(comparable.sum()))


def _summed(metrics: dict[str, float], tokens: float) -> dict[str, float]:
    """Means of a micro-batch weighted by its comparable tokens, to be added up and divided by all of them."""
    means = {name: float(value) * tokens for name, value in metrics.items() if name.endswith(_MEANS)}
    return means | {"comparable": tokens}


_MEANS = ("/rollout_is_mean", "/rollout_is_oob_ratio", "_masked_fraction", "/kl", "/k3_kl")
"""Ends of those of veRL's correction metrics that are means over tokens."""


def _taught(model_output: dict[str, torch.Tensor], data: TensorDict) -> tuple[torch.Tensor, dict[str, float]]:
    """veRL's supervised loss: the mean of -log p over the tokens under the mask of the whole mini-batch."""
    # token-mean: each token's weight is one by the number of all.
    tu.assign_non_tensor(data, batch_num_tokens=round(1.0 / float(data["loss_weights"][0])))
    config: Any = None  # it reads none
    loss, _ = sft_loss(config, model_output, data)
    return loss, {"loss": loss.item()}


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
