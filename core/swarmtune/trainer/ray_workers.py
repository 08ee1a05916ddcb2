"""`worker.Workers` over Ray: one model on the ranks of the process's Ray session, which its other models share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from swarmtune.config import TrainConfig
from swarmtune.trainer.ray_session import RaySession, close_session, open_session

PIECE_BYTES = 32 << 20
"""Weights travel from rank 0 in pieces of about this size."""

_numbers = itertools.count()


class RayWorkers:
    """`worker.Workers` says what each method promises; each raises WorkersLost when a rank fails or is gone."""

    def __init__(self, config: TrainConfig, worker_config: Any, *, work_dir: Path) -> None:
        """Load the model on all ranks.

        Args:
            worker_config: veRL's TrainingWorkerConfig.
            work_dir: where Ray keeps its files when it is started here.

        Raises:
            ConfigError: no such cluster, or too few processors.
            WorkersLost: a rank could not load the model; the message has its error.
        """
        self._name = f"model-{next(_numbers)}"
        self._session: RaySession | None = open_session(config, work_dir)
        self.ranks = self._session.ranks
        try:
            loaded = self._session.call("load", *self._alike(self._name, worker_config, config.seed))
        except BaseException:
            self.close()
            raise
        self.hf_config, self.sizes = loaded[0]

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes."""
        return self._session.pids if self._session is not None else []

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
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if not session.is_lost:
                session.call("unload", *[[self._name] * self.ranks])
        finally:
            close_session(session)

    def _gathered(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors from rank 0, a piece at a time."""
        self._call("open_tensors", kind)
        try:
            while piece := self._call("next_tensors", PIECE_BYTES):
                for name, values in piece:
                    yield name, torch.from_numpy(values.copy())  # what Ray hands out is read-only shared memory
        finally:
            if self._session is not None and not self._session.is_lost:
                self._call("close_tensors")

    def _call(self, method: str, *arguments: Any) -> Any:
        """The same call on every rank; rank 0's result."""
        return self._on_ranks(method, *self._alike(*arguments))[0]

    def _in_rounds(self, method: str, micros: Sequence[TensorDict]) -> list[TensorDict]:
        outputs = self._on_ranks(method, [list(micros[rank :: self.ranks]) for rank in range(self.ranks)])
        return [output for of_round in zip(*outputs, strict=True) for output in of_round]

    def _on_ranks(self, method: str, *per_rank: list[Any]) -> list[Any]:
        if self._session is None:
            raise RuntimeError("this model is closed")
        return self._session.call("call", *self._alike(self._name, method), *per_rank)

    def _alike(self, *values: Any) -> list[list[Any]]:
        return [[value] * self.ranks for value in values]
