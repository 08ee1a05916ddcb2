"""`worker.Workers` over Ray: one model on ranks that the process's other models share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDict

from swarmtune.config import TrainConfig
from swarmtune.trainer.ray_session import close_session, open_session
from swarmtune.trainer.worker import Sizes

PIECE_BYTES = 32 << 20
"""Weights travel from rank 0 in pieces of about this size."""

_numbers = itertools.count()


class Ranks(Protocol):
    """Processes that hold shards of models: a RaySession, or a VerlCluster."""

    ranks: int

    @property
    def is_lost(self) -> bool: ...

    def call(self, method: str, *per_rank: list[Any]) -> list[Any]:
        """A method on each rank, each argument being a list of one value per rank.

        Raises:
            WorkersLost: it failed on one of them; all are gone.
        """
        ...


class RayWorkers:
    """`worker.Workers` says what each method promises; each raises WorkersLost when a rank fails or is gone."""

    def __init__(self, group: Ranks, name: str, loaded: tuple[Any, Sizes], *, release: Callable[[], None]) -> None:
        """A model that the ranks have loaded as `name`.

        Args:
            loaded: its Hugging Face configuration and sizes.
            release: called once, when it is closed.
        """
        self.ranks = group.ranks
        self.hf_config, self.sizes = loaded
        self._name = name
        self._release = release
        self._group: Ranks | None = group

    @classmethod
    def load(cls, group: Ranks, worker_config: Any, seed: int, *, release: Callable[[], None]) -> Self:
        """Load a model on all ranks.

        Args:
            worker_config: veRL's TrainingWorkerConfig.
            release: called once, when the model is closed or could not be loaded.

        Raises:
            WorkersLost: a rank could not load the model; the message has its error.
        """
        name = f"model-{next(_numbers)}"
        try:
            loaded = group.call("load", *([value] * group.ranks for value in (name, worker_config, seed)))
        except BaseException:
            release()
            raise
        return cls(group, name, loaded[0], release=release)

    def set_loss_fn(self, loss_fn: Any) -> None:
        self._call("set_loss_fn", loss_fn)

    def optimizer_zero_grad(self) -> None:
        self._call("optimizer_zero_grad")

    def forward_backward(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        return self._in_rounds("forward_backward", micros)

    def infer_batch(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        return self._in_rounds("infer_batch", micros)

    def optimizer_step(self, settings: dict[str, Any]) -> float:
        return self._call("optimizer_step", settings)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._gathered("weights")

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._gathered("adapter")

    def save_checkpoint(self, folder: Path, step: int) -> None:
        self._call("save_checkpoint", str(folder), step)

    def load_checkpoint(self, folder: Path) -> None:
        self._call("load_checkpoint", str(folder))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        try:
            if not group.is_lost:
                group.call("unload", [self._name] * self.ranks)
        finally:
            self._release()

    def _gathered(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors from rank 0, a piece at a time."""
        self._call("open_tensors", kind)
        try:
            while piece := self._call("next_tensors", PIECE_BYTES):
                for name, values in piece:
                    yield name, torch.from_numpy(values.copy())  # what Ray hands out is read-only shared memory
        finally:
            if self._group is not None and not self._group.is_lost:
                self._call("close_tensors")

    def _call(self, method: str, *arguments: Any) -> Any:
        """The same call on every rank; rank 0's result."""
        return self._on_ranks(method, *self._alike(*arguments))[0]

    def _in_rounds(self, method: str, micros: Sequence[TensorDict]) -> list[TensorDict]:
        outputs = self._on_ranks(method, [list(micros[rank :: self.ranks]) for rank in range(self.ranks)])
        return [output for of_round in zip(*outputs, strict=True) for output in of_round]

    def _on_ranks(self, method: str, *per_rank: list[Any]) -> list[Any]:
        if self._group is None:
            raise RuntimeError("this model is closed")
        return self._group.call("call", *self._alike(self._name, method), *per_rank)

    def _alike(self, *values: Any) -> list[list[Any]]:
        return [[value] * self.ranks for value in values]


def load_over_ray(config: TrainConfig, worker_config: Any, *, work_dir: Path) -> RayWorkers:
    """A model on the ranks of the process's Ray session, which is started where there is none.

    Raises:
        ConfigError: no such cluster, or too few processors.
        WorkersLost: the ranks or the model did not come up; the message has the error.
    """
    session = open_session(config, work_dir)
    return RayWorkers.load(session, worker_config, config.seed, release=lambda: close_session(session))
