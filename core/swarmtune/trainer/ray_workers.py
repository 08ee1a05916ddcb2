"""`worker.Workers` over Ray: one `RankWorker` per process, driven by veRL's RayWorkerGroup.

The ranks hold shards of the weights (FSDP2), so none can go on without the others: a call that fails on one of them ends
them all and raises WorkersLost, whether a rank was killed or raised. Nothing waits in a collective for a rank that is
gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from swarmtune.config import TrainConfig
from swarmtune.trainer.rank_worker import RankWorker
from swarmtune.trainer.ray_session import close_session, open_session
from swarmtune.trainer.worker import WorkersLost

WEIGHTS_BYTES = 32 << 20
"""Weights travel from rank 0 in pieces of about this size."""


class RayWorkers:
    """See the module's text; `worker.Workers` says what each method promises."""

    def __init__(self, config: TrainConfig, worker_config: Any, *, work_dir: Path) -> None:
        """Start the ranks and wait until the model is loaded.

        Args:
            worker_config: veRL's TrainingWorkerConfig.
            work_dir: where Ray keeps its files when it is started here.

        Raises:
            ConfigError: no such cluster, or too few processors.
            WorkersLost: a rank could not load the model; the message has its error.
        """
        assert config.ray is not None
        self.ranks = config.ray.processes
        self._session = open_session(config.ray, work_dir)
        self._group: RayWorkerGroup | None = None
        try:
            self._group = RayWorkerGroup(
                resource_pool=self._session.pool,
                ray_cls_with_init=RayClassWithInitArgs(
                    cls=ray.remote(RankWorker),
                    config=worker_config,
                    seed=config.seed,
                    threads=threads_of(config),
                ),
                bin_pack=config.ray.nodes == 1,
                device_name="cpu",
                worker_env=environment_of(config),
            )
            described = self._call("describe")
        except BaseException:
            self.close()
            raise
        self.hf_config, self.sizes, _ = described[0]
        self.pids = [pid for *_, pid in described]
        """Of the ranks' processes."""

    def set_loss_fn(self, loss_fn: Any) -> None:
        self._call("set_loss_fn", [loss_fn] * self.ranks)

    def optimizer_zero_grad(self) -> None:
        self._call("optimizer_zero_grad")

    def forward_backward(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        return self._in_rounds("forward_backward_all", micros)

    def infer_batch(self, micros: Sequence[TensorDict]) -> list[TensorDict]:
        return self._in_rounds("infer_all", micros)

    def optimizer_step(self, settings: dict[str, Any]) -> float:
        return self._call("optimizer_step", [settings] * self.ranks)[0]["grad_norm"]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._handed_out("open_weights")

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._handed_out("open_adapter")

    def _handed_out(self, opening: str) -> Iterator[tuple[str, torch.Tensor]]:
        self._call(opening)
        try:
            while piece := self._call("next_weights", [WEIGHTS_BYTES] * self.ranks)[0]:
                for name, values in piece:
                    yield name, torch.from_numpy(values.copy())  # what Ray hands out is read-only shared memory
        finally:
            if self._group is not None:
                self._call("close_weights")

    def save_checkpoint(self, folder: Path, step: int) -> None:
        self._call("save_checkpoint", [str(folder)] * self.ranks, [None] * self.ranks, [step] * self.ranks)

    def load_checkpoint(self, folder: Path) -> None:
        self._call("load_checkpoint", [str(folder)] * self.ranks)

    def close(self) -> None:
        self._end_ranks()
        if self._session is not None:
            close_session(self._session)
            self._session = None

    def _in_rounds(self, method: str, micros: Sequence[TensorDict]) -> list[TensorDict]:
        outputs = self._call(method, [list(micros[rank :: self.ranks]) for rank in range(self.ranks)])
        return [output for of_round in zip(*outputs, strict=True) for output in of_round]

    def _call(self, method: str, *per_rank: list[Any]) -> list[Any]:
        """The method's result on each rank, each argument being a list of one value per rank."""
        if self._group is None:
            raise WorkersLost("the processes of this model are gone")
        references = self._group.execute_all_async(method, *per_rank)
        waiting = references
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                ray.get(done)
            return ray.get(references)
        except RayError as error:
            self._end_ranks()
            raise WorkersLost(f"a rank failed in {method}: {reason(error)}") from error

    def _end_ranks(self) -> None:
        group, self._group = self._group, None
        for worker in group.workers if group is not None else ():
            ray.kill(worker)


def reason(error: RayError) -> str:
    """The last line that says something: Ray wraps the rank's whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def threads_of(config: TrainConfig) -> int:
    """Torch threads of each rank: an even share of this machine, or of `engine.threads`."""
    assert config.ray is not None
    here = config.ray.processes // config.ray.nodes
    return max(1, (config.engine.threads or os.cpu_count() or 1) // here)


def environment_of(config: TrainConfig) -> dict[str, str]:
    """Of a rank's process: veRL's platform, and this package where it is only on sys.path."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{package_root}{os.pathsep}{path}" if path else package_root,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "swarmtune.trainer.cpu_platform",
        "OMP_NUM_THREADS": str(threads_of(config)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
