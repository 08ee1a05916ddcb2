"""What the trainer asks of a model and its optimizer, and the one that lives in this process.

`Workers` is the contract; `InProcess` is veRL's TinkerTrainingWorker as a world of one, `ray_workers.RayWorkers` one
such worker per rank. In this process the process group is process-global and made once; a second worker (the reference
model) shares it. The environment that veRL's workers read is set while one is being built and put back afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from swarmtune.config import TrainConfig
from swarmtune.trainer import cpu_platform
from swarmtune.trainer.adapter import named_adapter

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


@contextmanager
def passing_environment(values: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Set variables for the length of a block, and take out again what the block itself has set: veRL leaves some."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class WorkersLost(RuntimeError):
    """A process that held part of the model is gone, and the weights with it. Start from the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of parameters, over all ranks."""

    parameters: int
    """Of the model, adapters left out."""
    trained: int
    frozen: int


class Workers(Protocol):
    """One model with its optimizer, spread over `ranks` processes. Every call blocks.

    Micro-batches come in rounds: number r of each round is rank r's, so their number is a multiple of `ranks`. Outputs
    come in the same order. The metrics of an output count all ranks of its round: read them once per round.
    """

    ranks: int
    hf_config: Any
    sizes: Sizes

    def set_loss_fn(self, loss_fn: Any) -> None: ...

    def optimizer_zero_grad(self) -> None: ...

    def forward_backward(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        """Gradients of all micro-batches, added up; per micro-batch log_probs (nested) and metrics."""
        ...

    def infer_batch(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        """The same without gradient."""
        ...

    def optimizer_step(self, settings: dict[str, Any]) -> float:
        """Clip, step, zero; the gradient's norm before clipping. A norm that is not finite takes no step."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By Hugging Face name, fp32, adapters merged. A tensor may be the live one: copy it, write to none."""
        ...

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The LoRA adapter alone, by PEFT's names, fp32."""
        ...

    def save_checkpoint(self, folder: Path, step: int) -> None: ...

    def load_checkpoint(self, folder: Path) -> None: ...

    def close(self) -> None:
        """Release the model. Idempotent."""
        ...


class InProcess:
    """`Workers` of one rank: veRL's worker in this process."""

    ranks = 1

    def __init__(self, worker: Any) -> None:
        self._worker: Any = worker
        self.hf_config = worker.model_config.hf_config
        self.sizes = sizes(worker.engine.module)

    def set_loss_fn(self, loss_fn: Any) -> None:
        self._worker.set_loss_fn(loss_fn)

    def optimizer_zero_grad(self) -> None:
        self._worker.optimizer_zero_grad()

    def forward_backward(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        return [self._worker.forward_backward(micro) for micro in micros]

    def infer_batch(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        with kept_trainable(self._worker.engine.module):
            return [self._worker.infer_batch(micro) for micro in micros]

    def optimizer_step(self, settings: dict[str, Any]) -> float:
        return self._worker.optimizer_step(settings)["grad_norm"]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self._worker.engine)

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_adapter(self._worker.engine.module)

    def save_checkpoint(self, folder: Path, step: int) -> None:
        self._worker.engine.save_checkpoint(str(folder), global_step=step)

    def load_checkpoint(self, folder: Path) -> None:
        self._worker.engine.load_checkpoint(str(folder), del_local_after_load=False)

    def close(self) -> None:
        self._worker = None


@contextmanager
def kept_trainable(module: torch.nn.Module) -> Iterator[None]:
    """For inference: what is trainable afterwards is what was before.

    PEFT switches an adapter off by taking the gradient from the parameters that are registered at the moment. Under
    FSDP2 those may be the gathered ones, and the sharded ones, which the optimizer has, would stay without.
    """
    _reshard(module)
    trainable = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        _reshard(module)
        for parameter, was in trainable:
            parameter.requires_grad_(was)


def _reshard(module: torch.nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class SkipPadding:
    """A loss function that counts nothing of a micro-batch marked `padding`, whose backward pass still happens."""

    def __init__(self, loss_fn: Any) -> None:
        self._loss_fn = loss_fn

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, metrics = self._loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        if not tu.get_non_tensor_data(data, key="padding", default=False):
            return loss, metrics
        return loss * 0.0, {name: 0.0 for name in metrics}


def sizes(module: torch.nn.Module) -> Sizes:
    parameters = list(module.named_parameters())
    return Sizes(
        parameters=sum(p.numel() for name, p in parameters if "lora_" not in name),
        trained=sum(p.numel() for _, p in parameters if p.requires_grad),
        frozen=sum(p.numel() for _, p in parameters if not p.requires_grad),
    )


def named_weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What `Workers.weights` promises, of one veRL engine; every rank must take every tensor."""
    if engine.model_config.lora_rank == 0:
        yield from engine.get_per_tensor_param()[0]
        return
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

    # veRL's own merged export casts to bf16; the inference engine may compute in fp32.
    with merged_lora_context(engine.module, backup_adapters=True):
        for name, value in normalize_peft_param_name(engine.module.state_dict()).items():
            yield name, value.full_tensor() if hasattr(value, "full_tensor") else value


def build_worker(config: TrainConfig, model_path: Path, *, trained: bool = True, work_dir: Path) -> Workers:
    """A ready model; `trained=False` is the reference model: compute dtype only, no adapter.

    Raises:
        ConfigError: `ray`: no such cluster, or too few processors.
    """
    if config.engine.kind == "verl":
        from swarmtune.engines.verl_cluster import current_cluster

        if trained:
            return current_cluster().policy()
    else:
        with passing_environment():
            cpu_platform.activate()
    return start_workers(config, worker_config(config, model_path, trained=trained), work_dir=work_dir)


def start_workers(config: TrainConfig, verl_config: Any, *, work_dir: Path) -> Workers:
    """The model that veRL's TrainingWorkerConfig describes, here or over Ray. Raises as `build_worker` does."""
    if config.engine.kind == "verl":
        from swarmtune.engines.verl_cluster import current_cluster

        return current_cluster().load(verl_config, config.seed)
    if config.ray is not None:
        from swarmtune.trainer.ray_workers import load_over_ray

        return load_over_ray(config, verl_config, work_dir=work_dir)
    ensure_process_group()
    with passing_environment(WORLD_OF_ONE):
        from verl.workers.engine_workers_tinker import TinkerTrainingWorker

        worker = TinkerTrainingWorker(verl_config)
        worker.reset()
    return InProcess(worker)


def worker_config(config: TrainConfig, model_path: Path, *, trained: bool) -> Any:
    """veRL's TrainingWorkerConfig for `build_worker`'s model."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

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
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )


def shares_prefixes(hf_config: Any) -> bool:
    """Whether rows of this model may be computed behind a block mask (see `layout`)."""
    if hf_config.model_type not in PREFIX_SHARING_MODELS:
        return False
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return getattr(hf_config, "sliding_window", None) is None
