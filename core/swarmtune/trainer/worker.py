"""veRL's TinkerTrainingWorker, in this process, as a world of one.

The process group is process-global and made once; a second worker (the reference model) shares it. The environment that
veRL's workers read is set while one is being built and put back afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swarmtune.config import TrainConfig
from swarmtune.trainer import cpu_platform

WORLD_OF_ONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "RAY_LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What veRL's Worker reads. Nothing listens on the address: the group is made from a store in this process."""

PREFIX_SHARING_MODELS = {"llama", "qwen2", "qwen3", "smollm3"}
"""Model types whose layers are all plain causal attention unless their configuration says otherwise: a block mask is
exact for them. Others compute every row by itself."""


def ensure_process_group() -> None:
    """Make torch's default process group of this one process, without a port; keep the one that is there.

    Raises:
        RuntimeError: the process is part of a larger group.
    """
    if torch.distributed.is_initialized():
        if torch.distributed.get_world_size() != 1:
            raise RuntimeError(
                "the in-process trainer needs a process that is not part of a larger torch.distributed group"
            )
        return
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public in the documentation
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the length of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def build_worker(config: TrainConfig, model_path: Path, *, trained: bool = True) -> Any:
    """A ready TinkerTrainingWorker; `trained=False` is the reference model: compute dtype only, no adapter."""
    cpu_platform.activate()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    ensure_process_group()
    lora = config.lora if trained else None
    dtype = config.trainer.dtype
    adapter = (
        {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets, "lora": {"merge": True}}
        if lora
        else {}
    )
    model = HFModelConfig(
        path=str(model_path),
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=config.trainer.gradient_checkpointing and trained,
        **adapter,
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32" if trained else dtype,
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        reshard_after_forward=False,
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        use_remove_padding=False,
    )
    optimizer = FSDPOptimizerConfig(
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        betas=config.optim.betas,
        clip_grad=config.optim.grad_clip,
        total_training_steps=1,
        lr_warmup_steps=0,
    )
    with environment(WORLD_OF_ONE):
        worker = TinkerTrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    return worker


def shares_prefixes(hf_config: Any) -> bool:
    """Whether rows of this model may be computed behind a block mask (see `layout`)."""
    if hf_config.model_type not in PREFIX_SHARING_MODELS:
        return False
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return getattr(hf_config, "sliding_window", None) is None
