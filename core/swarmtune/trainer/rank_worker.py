"""One rank of a trainer on several processes: a Ray actor that holds its shards of each model.

Importing this module fixes veRL's device, as veRL's own worker modules do; the actor gets the platform from its
environment (`ray_session.environment_of`). Every call is made on all ranks, in the same order, with the same number of
micro-batches. Policy, reference and critic share the process and its process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from tensordict import TensorDict
from verl.single_controller.base import Worker
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from swarmtune.trainer import cpu_platform
from swarmtune.trainer.adapter import named_adapter
from swarmtune.trainer.worker import Sizes, SkipPadding, kept_trainable, named_weights, sizes


class RankWorker(Worker):
    """See the module's text."""

    def __init__(self, *, threads: int) -> None:
        """Join the other ranks; blocks until all are there."""
        cpu_platform.activate()
        torch.set_num_threads(threads)
        super().__init__()
        # veRL would ask for "cpu:gloo,cpu:gloo", which torch refuses; it keeps a group that is there.
        torch.distributed.init_process_group("gloo")
        self._models: dict[str, RankModel] = {}

    def pid(self) -> int:
        return os.getpid()

    def load(self, name: str, config: Any, seed: int) -> tuple[Any, Sizes]:
        """Load a model under a name; its Hugging Face configuration and its sizes over all ranks."""
        torch.manual_seed(seed)
        worker = TinkerTrainingWorker(config)
        worker.reset()
        self._models[name] = model = RankModel(worker, first=self.rank == 0)
        return model.hf_config, model.sizes

    def unload(self, name: str) -> None:
        self._models.pop(name, None)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """A method of RankModel."""
        return getattr(self._models[name], method)(*arguments)


class RankModel:
    """This rank's shards of one model: veRL's TinkerTrainingWorker, called for many micro-batches at once."""

    def __init__(self, worker: TinkerTrainingWorker, *, first: bool) -> None:
        """`first`: this is rank 0, which hands out the weights."""
        self._worker = worker
        self._first = first
        self._handed: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.hf_config = self._worker.model_config.hf_config
        self._engine: Any = self._worker.engine
        self.sizes = sizes(self._engine.module)

    def set_loss_fn(self, loss_fn: Any) -> None:
        self._worker.set_loss_fn(SkipPadding(loss_fn))

    def optimizer_zero_grad(self) -> None:
        self._worker.optimizer_zero_grad()

    def forward_backward(self, micros: list[TensorDict]) -> list[TensorDict]:
        with self._engine.train_mode(zero_grad_on_exit=False):  # what is offloaded is brought once, not per micro-batch
            return [self._worker.forward_backward(_as_loaded(micro)) for micro in micros]

    def infer_batch(self, micros: list[TensorDict]) -> list[TensorDict]:
        with self._engine.eval_mode(), kept_trainable(self._engine.module):
            return [self._worker.infer_batch(_as_loaded(micro)) for micro in micros]

    def optimizer_step(self, settings: Any) -> float:
        return self._worker.optimizer_step(settings)["grad_norm"]

    def save_checkpoint(self, folder: str, step: int) -> None:
        self._engine.save_checkpoint(folder, global_step=step)

    def load_checkpoint(self, folder: str) -> None:
        self._engine.load_checkpoint(folder, del_local_after_load=False)

    def open_tensors(self, kind: Literal["weights", "adapter"]) -> None:
        """Begin to hand out the weights, or the adapter alone; an earlier handing out ends."""
        self.close_tensors()
        self._handed = named_weights(self._engine) if kind == "weights" else named_adapter(self._engine.module)

    def next_tensors(self, most_bytes: int) -> list[tuple[str, Any]]:
        """Rank 0: the next tensors, fp32 numpy arrays, until `most_bytes` are reached; empty at the end.

        The other ranks take the same ones along, since gathering a tensor needs them all, and return nothing.
        """
        taken: list[tuple[str, Any]] = []
        size = 0
        for name, value in self._handed:
            size += value.numel() * 4
            if self._first:
                taken.append((name, value.detach().float().cpu().numpy().copy()))
            if size >= most_bytes:
                break
        return taken

    def close_tensors(self) -> None:
        """End a handing out; adapters that were merged for it are taken out again."""
        close: Callable[[], None] | None = getattr(self._handed, "close", None)
        if close is not None:
            close()
        self._handed = iter(())


def _as_loaded(micro: TensorDict) -> TensorDict:
    tu.assign_non_tensor(micro, disable_auto_offload=True)
    return micro
