"""One rank of a model on several processes: veRL's TinkerTrainingWorker as a Ray actor.

Importing this module fixes veRL's device, as veRL's own worker modules do; actors get the platform from their environment
(`ray_workers.environment_of`). Every call is made on all ranks, in the same order, with micro-batches of the same number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from swarmtune.trainer import cpu_platform
from swarmtune.trainer.adapter import named_adapter
from swarmtune.trainer.worker import Sizes, named_weights, sizes


class RankWorker(TinkerTrainingWorker):
    """See the module's text."""

    def __init__(self, config: Any, *, seed: int, threads: int) -> None:
        """Load this rank's part of the model; blocks until all ranks have theirs."""
        cpu_platform.activate()
        torch.set_num_threads(threads)
        # veRL would ask for "cpu:gloo,cpu:gloo", which torch refuses; it keeps a group that is there.
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(seed)
        super().__init__(config)
        self.reset()
        self._weights: Iterator[tuple[str, torch.Tensor]] = iter(())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self) -> tuple[Any, Sizes, int]:
        """Hugging Face configuration, sizes over all ranks, process id."""
        return self.model_config.hf_config, sizes(self.engine.module), os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Any) -> None:
        self.loss_fn = SkipPadding(loss_fn)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def forward_backward_all(self, micros: list[TensorDict]) -> list[TensorDict]:
        return [self.forward_backward(micro) for micro in micros]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def infer_all(self, micros: list[TensorDict]) -> list[TensorDict]:
        return [self.infer_batch(micro) for micro in micros]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weights(self) -> None:
        """Begin to hand out the weights; an earlier handing out ends."""
        self.close_weights()
        self._weights = named_weights(self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_adapter(self) -> None:
        """Begin to hand out the adapter's tensors; an earlier handing out ends."""
        self.close_weights()
        self._weights = named_adapter(self.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def next_weights(self, most_bytes: int) -> list[tuple[str, Any]]:
        """Rank 0: the next tensors, fp32 numpy arrays, until `most_bytes` are reached; empty at the end.

        The other ranks take the same ones along, since gathering a tensor needs them all, and return nothing.
        """
        taken: list[tuple[str, Any]] = []
        size = 0
        for name, value in self._weights:
            size += value.numel() * 4
            if self.rank == 0:
                taken.append((name, value.detach().float().cpu().numpy()))
            if size >= most_bytes:
                break
        return taken

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_weights(self) -> None:
        """End a handing out; adapters that were merged for it are taken out again."""
        close: Callable[[], None] | None = getattr(self._weights, "close", None)
        if close is not None:
            close()
        self._weights = iter(())


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
