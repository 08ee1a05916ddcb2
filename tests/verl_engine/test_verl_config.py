"""Our configuration as veRL's: the table names keys of the installed veRL, overrides win, unknown ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, HFModelConfig, RolloutConfig

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.engines.verl_config import ABSENT, TABLE, check_known, defaults, known_keys, verl_config

Make = Callable[..., TrainConfig]
MODEL = Path("/models/some")


def test_every_key_of_the_table_is_one_of_verls():
    assert set(TABLE) - set(known_keys(defaults())) == ABSENT
    assert "mixed_precision" in FSDPEngineConfig.__dataclass_fields__


def test_the_result_is_what_verls_dataclasses_take(config: Make):
    made = verl_config(
        config(**{"optim.lr": 3e-5, "engine.verl.gpus_per_node": 4, "engine.verl.tensor_parallel": 2}),
        MODEL,
        context_length=1024,
    )
    actor: Any = omega_conf_to_dataclass(made.actor_rollout_ref.actor)
    rollout: Any = omega_conf_to_dataclass(made.actor_rollout_ref.rollout)
    assert isinstance(actor, FSDPActorConfig)
    assert isinstance(rollout, RolloutConfig)
    assert HFModelConfig.__name__ in made.actor_rollout_ref.model._target_
    assert actor.optim.lr == 3e-5
    assert actor.engine.mixed_precision["param_dtype"] == "fp32"
    assert (rollout.tensor_model_parallel_size, rollout.max_model_len, rollout.dtype) == (2, 1024, "float32")
    assert rollout.prompt_length + rollout.response_length == 1024
    assert rollout.calculate_log_probs


@pytest.mark.parametrize(
    ("placement", "backend", "offload", "nodes"), [("colocated", "naive", True, 0), ("separate", "nccl", False, 3)]
)
def test_placement_decides_transfer_offloading_and_nodes(
    config: Make, placement: str, backend: str, offload: bool, nodes: int
):
    keys = {"engine.verl.placement": placement, "engine.verl.rollout_nodes": 3, "engine.verl.rollout": "sglang"}
    made = verl_config(config(**keys), MODEL, context_length=512).actor_rollout_ref
    assert made.rollout.checkpoint_engine.backend == backend
    assert made.actor.fsdp_config.param_offload is offload
    assert (made.rollout.nnodes, made.rollout.name) == (nodes, "sglang")
    assert made.hybrid_engine is (placement == "colocated")


def test_lora_is_merged_before_it_is_handed_over(config: Make):
    made = verl_config(config(**{"lora.rank": 4, "lora.alpha": 8}), MODEL, context_length=512).actor_rollout_ref.model
    assert (made.lora_rank, made.lora_alpha, made.lora.merge) == (4, 8, True)


def test_overrides_win_and_reach_open_sections(config: Make):
    overrides = {
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.7,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": 4,
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": 2,
    }
    made = verl_config(config(**{"engine.verl.overrides": overrides}), MODEL, context_length=512)
    assert made.actor_rollout_ref.rollout.gpu_memory_utilization == 0.7
    assert made.actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space == 4
    assert made.actor_rollout_ref.actor.fsdp_config.fsdp_size == 2


def test_an_override_that_verl_does_not_know_is_refused_with_the_nearest():
    made = defaults()
    with pytest.raises(ConfigError, match=r"is no key of veRL 0\.9\..*mean 'actor_rollout_ref.rollout.enforce_eager'"):
        check_known("actor_rollout_ref.rollout.enforce_eagr", made, known_keys(made))


def test_gpus_that_take_turns_cannot_overlap(config: Make):
    with pytest.raises(ConfigError, match="take placement separate"):
        config(**{"batching.overlap": True})
    config(**{"batching.overlap": True, "engine.verl.placement": "separate"})


def test_gpus_that_replicas_do_not_fill_are_refused(config: Make):
    with pytest.raises(ConfigError, match="replicas of 2 GPUs do not fill 3"):
        config(**{"engine.verl.gpus_per_node": 3, "engine.verl.tensor_parallel": 2})
