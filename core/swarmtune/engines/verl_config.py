"""Our configuration as veRL's: one table, and overrides for every other key of veRL's.

Reads veRL's own defaults (`verl/trainer/config/ppo_trainer.yaml` of the installed version); starts nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from swarmtune.config import ConfigError, TrainConfig, VerlConfig, flatten


@dataclass(frozen=True, slots=True)
class Source:
    """What the table reads."""

    config: TrainConfig
    model_path: Path
    context_length: int

    @property
    def verl(self) -> VerlConfig:
        return self.config.engine.verl

    @property
    def colocated(self) -> bool:
        return self.verl.placement == "colocated"


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

TABLE: dict[str, Callable[[Source], Any]] = {
    "trainer.nnodes": lambda s: s.verl.nodes,
    "trainer.n_gpus_per_node": lambda s: s.verl.gpus_per_node,
    "actor_rollout_ref.hybrid_engine": lambda s: s.colocated,
    f"{MODEL}.path": lambda s: str(s.model_path),
    f"{MODEL}.use_remove_padding": lambda s: True,
    f"{MODEL}.enable_gradient_checkpointing": lambda s: s.config.trainer.gradient_checkpointing,
    f"{MODEL}.lora_rank": lambda s: s.config.lora.rank if s.config.lora else 0,
    f"{MODEL}.lora_alpha": lambda s: s.config.lora.alpha if s.config.lora else 16,
    f"{MODEL}.target_modules": lambda s: s.config.lora.targets if s.config.lora else "all-linear",
    f"{MODEL}.lora.merge": lambda s: s.config.lora is not None,
    f"{ACTOR}.strategy": lambda s: "fsdp2",
    f"{ACTOR}.use_torch_compile": lambda s: False,
    f"{ACTOR}.use_dynamic_bsz": lambda s: False,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": lambda s: 1,
    f"{ACTOR}.ppo_mini_batch_size": lambda s: s.config.batch_tasks * s.config.repeats,
    f"{ACTOR}.fsdp_config.strategy": lambda s: "fsdp2",
    f"{ACTOR}.fsdp_config.model_dtype": lambda s: "fp32",
    f"{ACTOR}.fsdp_config.use_torch_compile": lambda s: False,
    f"{ACTOR}.fsdp_config.param_offload": lambda s: s.colocated,
    f"{ACTOR}.fsdp_config.optimizer_offload": lambda s: s.colocated,
    f"{ACTOR}.fsdp_config.mixed_precision": lambda s: {
        "param_dtype": s.config.trainer.dtype,
        "reduce_dtype": "fp32",
        "buffer_dtype": "fp32",
    },
    f"{ACTOR}.fsdp_config.seed": lambda s: s.config.seed,
    f"{ACTOR}.optim.lr": lambda s: s.config.optim.lr,
    f"{ACTOR}.optim.weight_decay": lambda s: s.config.optim.weight_decay,
    f"{ACTOR}.optim.betas": lambda s: list(s.config.optim.betas),
    f"{ACTOR}.optim.clip_grad": lambda s: s.config.optim.grad_clip,
    f"{ACTOR}.optim.total_training_steps": lambda s: 1,
    f"{ACTOR}.optim.lr_warmup_steps": lambda s: 0,
    f"{ROLLOUT}.name": lambda s: s.verl.rollout,
    f"{ROLLOUT}.nnodes": lambda s: 0 if s.colocated else s.verl.rollout_nodes,
    f"{ROLLOUT}.n_gpus_per_node": lambda s: s.verl.gpus_per_node if s.colocated else s.verl.rollout_gpus_per_node,
    f"{ROLLOUT}.tensor_model_parallel_size": lambda s: s.verl.tensor_parallel,
    f"{ROLLOUT}.pipeline_model_parallel_size": lambda s: s.verl.pipeline_parallel,
    f"{ROLLOUT}.gpu_memory_utilization": lambda s: s.verl.gpu_memory_utilization,
    f"{ROLLOUT}.free_cache_engine": lambda s: s.colocated,
    f"{ROLLOUT}.dtype": lambda s: DTYPES[s.config.trainer.dtype],
    f"{ROLLOUT}.seed": lambda s: s.config.seed,
    f"{ROLLOUT}.max_num_seqs": lambda s: s.config.engine.max_batch + s.config.evaluation.slots,
    f"{ROLLOUT}.max_model_len": lambda s: s.context_length,
    f"{ROLLOUT}.prompt_length": lambda s: max(1, s.context_length - s.config.sampling.max_tokens),
    f"{ROLLOUT}.response_length": lambda s: s.config.sampling.max_tokens,
    f"{ROLLOUT}.calculate_log_probs": lambda s: True,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": lambda s: False,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": lambda s: 1,
    f"{ROLLOUT}.checkpoint_engine.backend": lambda s: "naive" if s.colocated else "nccl",
}
"""veRL's key → its value. The learning rate and the other optimizer settings are sent again with every step."""

ABSENT = {f"{ACTOR}.fsdp_config.mixed_precision"}
"""Keys that veRL's dataclass has and its YAML leaves out."""


def verl_config(config: TrainConfig, model_path: Path, *, context_length: int) -> DictConfig:
    """veRL's whole configuration.

    Raises:
        ConfigError: an override names no key of the installed veRL.
    """
    source = Source(config, model_path, context_length)
    merged = defaults()
    for key, value in TABLE.items():
        OmegaConf.update(merged, key, value(source), force_add=key in ABSENT)
    known = known_keys(merged)
    for key, value in dict(flatten(config.engine.verl.overrides)).items():
        check_known(key, merged, known)
        OmegaConf.update(merged, key, value, force_add=True)
    return merged


def defaults() -> DictConfig:
    """veRL's defaults with their interpolations."""
    import verl

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(version_base=None, config_dir=str(folder)):
        return compose("ppo_trainer", overrides=["hydra/job_logging=disabled"])


def known_keys(config: DictConfig) -> list[str]:
    """Every dotted leaf key."""
    return [key for key, _ in flatten(as_mapping(config))]


def as_mapping(config: DictConfig) -> Mapping[str, Any]:
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, Mapping)
    return {str(key): value for key, value in values.items()}


def check_known(key: str, config: DictConfig, known: list[str]) -> None:
    """Raises ConfigError unless `key`, or an open section above it (`…engine_kwargs.vllm`), is veRL's."""
    if key in known:
        return
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = OmegaConf.select(config, ".".join(parts[:length]), default=None)
        if length == len(parts) and found is not None:
            return
        if isinstance(found, DictConfig):
            if len(found) == 0:
                return
            break
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"engine.verl.overrides: {key!r} is no key of veRL {installed_version()}{hint}")


def installed_version() -> str:
    from importlib.metadata import version

    return version("verl")
