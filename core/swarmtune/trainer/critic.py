"""The value model of PPO: veRL's value worker and its clipped value loss.

Values are those of the state before each sampled token. The loss is the mean over the sampled tokens of a mini-batch
(veRL's default for critics), however its rows were packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_value_loss
from verl.workers.utils.padding import no_padding_2_padding

from swarmtune import models
from swarmtune.config import ConfigError, CriticConfig, TrainConfig
from swarmtune.trainer import cpu_platform
from swarmtune.trainer.worker import Workers, start_workers, worker_config


def build_critic(config: TrainConfig, policy_path: Path, *, work_dir: Path) -> Workers:
    """A ready value model with a fresh head; the seed of torch's generator decides over the head.

    Raises:
        ConfigError: `critic.model` cannot be found, or reads other tokens than the policy.
    """
    assert config.critic is not None
    if config.engine.kind != "verl":
        cpu_platform.activate()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    path = _start_model(config.critic, policy_path)
    policy = worker_config(config, path, trained=True)
    verl_config = TrainingWorkerConfig(
        model_type="value_model",
        model_config=HFModelConfig(
            path=str(path),
            load_tokenizer=False,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=config.trainer.gradient_checkpointing,
        ),
        engine_config=policy.engine_config,
        optimizer_config=FSDPOptimizerConfig(
            lr=config.critic.lr,
            weight_decay=config.critic.weight_decay,
            betas=config.critic.betas,
            clip_grad=config.critic.grad_clip,
            total_training_steps=1,
            lr_warmup_steps=0,
        ),
        checkpoint_config=CheckpointConfig(),
    )
    critic = start_workers(config, verl_config, work_dir=work_dir)
    critic.set_loss_fn(ValueObjective(config.critic.value_clip))
    return critic


def _start_model(critic: CriticConfig, policy_path: Path) -> Path:
    if critic.model is None:
        return policy_path
    try:
        path = models.resolve(critic.model)
    except models.ModelError as error:
        raise ConfigError(f"critic.model: {error}") from error
    ours, theirs = ((folder / "tokenizer.json") for folder in (policy_path, path))
    if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
        raise ConfigError(
            f"critic.model: {critic.model!r} has another tokenizer than the policy, whose token ids it would misread; "
            "take a model of the same family, or leave the key out"
        )
    return path


def critic_lr_at(step: int, critic: CriticConfig) -> float:
    """Learning rate of update `step`, the first being 1: linear warm-up, then constant."""
    return critic.lr * min(1.0, step / critic.lr_warmup_steps) if critic.lr_warmup_steps else critic.lr


@dataclass(slots=True)
class ValueObjective:
    """Callable as veRL's engine calls a loss function. All metrics it returns are sums over tokens, to be added up."""

    value_clip: float

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        del dp_group
        values = no_padding_2_padding(model_output["values"], data)
        fields = data.select("response_mask", "values", "returns").to_padded_tensor()
        mask = fields["response_mask"].bool()
        ranks: Any = data["dp_size"]
        loss, clipped = compute_value_loss(
            vpreds=values,
            returns=fields["returns"],
            values=fields["values"],
            response_mask=mask,
            cliprange_value=self.value_clip,
            loss_agg_mode="token-mean",
            dp_size=ranks,
            # token-mean: each token's weight is one by the number of all.
            batch_num_tokens=round(1.0 / float(data["loss_weights"][0])),
        )
        targets = float(mask.sum())
        return loss, {
            "targets": targets,
            "critic/vf_loss": loss.item() / ranks,
            "critic/vf_clipfrac": float(clipped) * targets,
            "critic/vpred_mean": float((values.detach() * mask).sum()),
        }


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Share of the returns' variance that the values explain: 1 is all, 0 none; (N,) each."""
    return float(1.0 - torch.var(returns - values) / (torch.var(returns) + 1e-5))
