"""What trainer and engine of kind verl share: Ray, the ranks with policy and rollout, the replicas that generate.

One per process. The ranks hold shards of the weights, so none can go on without the others: a call that fails on one of
them ends them all and raises WorkersLost. Calls block: make them on the torch thread.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from swarmtune.backend import StartFailed
from swarmtune.config import TrainConfig, VerlConfig
from swarmtune.engines.verl_config import verl_config
from swarmtune.trainer.ray_session import (
    QUIET,
    clear_temp_dirs,
    gather,
    join_cluster,
    last_line,
    package_path,
    temp_dir,
)
from swarmtune.trainer.ray_workers import RayWorkers
from swarmtune.trainer.worker import Sizes, WorkersLost

T = TypeVar("T")

POLICY = "policy"
"""The ranks' name of the model that is trained and generates."""
ROLES = {"colocated": "actor_rollout", "separate": "actor"}


@dataclass(frozen=True, slots=True)
class Replicas:
    """The servers that generate."""

    manager: Any
    """veRL's LLMServerManager."""
    checkpoints: Any
    """veRL's CheckpointEngineManager: weights to the replicas, sleep, abort and resume."""


class VerlCluster:
    """Make it with `open_cluster`."""

    def __init__(
        self, config: TrainConfig, group: Any, start_replicas: Callable[[], Replicas], *, close: Callable[[], None]
    ) -> None:
        """Load the policy on all ranks, then start the replicas, so that they see what memory is left.

        Args:
            group: veRL's RayWorkerGroup of VerlRank.
            close: ends what was started for it.

        Raises:
            WorkersLost: a rank or a replica did not come up; the message has its error.
        """
        self.colocated = config.engine.verl.placement == "colocated"
        self.ranks: int = group.world_size
        self._group = group
        self._close = close
        self._lost = False
        self._policy: tuple[Any, Sizes] = self.call("build", [config.seed] * self.ranks)[0]
        self._replicas = self._watched(start_replicas)
        self.client = self._replicas.manager.get_client(client_cls=abortable_client())
        if self.colocated:
            self.sleep()

    @property
    def is_lost(self) -> bool:
        return self._lost

    def call(self, method: str, *per_rank: list[Any]) -> list[Any]:
        """A method of VerlRank on each rank, each argument being a list of one value per rank.

        Raises:
            WorkersLost: it failed on one of them; all are gone.
        """
        return self._watched(lambda: gather(self._group.execute_all_async(method, *per_rank)))

    def policy(self) -> RayWorkers:
        """The model that is trained and generates."""
        return RayWorkers(self, POLICY, self._policy, release=lambda: None)

    def load(self, worker_config: Any, seed: int) -> RayWorkers:
        """Another model on the same ranks: reference or critic. Raises as `call` does."""
        return RayWorkers.load(self, worker_config, seed, release=lambda: None)

    def sync_weights(self, version: int) -> None:
        """Hand the policy's weights to every replica, on the GPUs; colocated replicas wake up.

        Raises:
            WorkersLost: a rank or a replica failed.
        """
        self._watched(lambda: self._replicas.checkpoints.update_weights(global_steps=version))

    def sleep(self) -> None:
        """Colocated replicas give their memory to the trainer."""
        self._watched(self._replicas.checkpoints.sleep_replicas)

    def abort_generations(self) -> None:
        """End what runs, each with the tokens it has; what comes waits until `allow_generations`."""
        self._watched(self._replicas.checkpoints.abort_replicas)

    def allow_generations(self) -> None:
        self._watched(self._replicas.checkpoints.resume_generation_replicas)

    def close(self) -> None:
        self._lost = True
        self._close()

    def _watched(self, work: Callable[[], T]) -> T:
        if self._lost:
            raise WorkersLost("the processes on the GPUs are gone")
        try:
            return work()
        except RayError as error:
            self._lost = True
            for worker in self._group.workers:
                ray.kill(worker)
            raise WorkersLost(f"a rank or a replica failed: {last_line(error)}") from error


def abortable_client() -> Any:
    """A subclass of veRL's LLMServerClient that can abort one call; veRL is imported when it is asked for."""
    from verl.workers.rollout.llm_server import LLMServerClient

    class AbortableClient(LLMServerClient):
        """`call_id` names the call of the task that runs; the server knows its request by that name."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self._servers: dict[str, Any] = {}

        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
            name, handle = await super()._acquire_server(request_id, **extra)
            self._servers[call_id.get()] = handle
            return name, handle

        def _vllm_request_id(self, request_id: str) -> str:
            del request_id
            return call_id.get()

        def server_of(self, call: str) -> Any:
            """The actor that serves a call; None when it has none yet."""
            return self._servers.get(call)

        def forget(self, call: str) -> None:
            self._servers.pop(call, None)

    return AbortableClient


call_id: ContextVar[str] = ContextVar("call_id")


_lock = threading.Lock()
_cluster: VerlCluster | None = None


def open_cluster(config: TrainConfig, model_path: Path, *, context_length: int, work_dir: Path) -> VerlCluster:
    """Start Ray (or join `ray.address`), the ranks and the replicas.

    Raises:
        StartFailed: no GPU, too few, or a package is missing: what to do.
        ConfigError: an unknown key among the overrides, or no such Ray cluster.
    """
    global _cluster
    with _lock:
        if _cluster is not None and not _cluster.is_lost:
            raise StartFailed("this process has a veRL cluster already; start another process")
        settings = verl_config(config, model_path, context_length=context_length)
        check_machine(config)
        close = _start_ray(config, work_dir)
        try:
            check_gpus(config.engine.verl, _gpus_of_cluster())
            group, start_replicas = _ranks(config, settings)
            _cluster = VerlCluster(config, group, start_replicas, close=close)
        except BaseException:
            close()
            raise
        return _cluster


def current_cluster() -> VerlCluster:
    """The one that the engine opened."""
    if _cluster is None:
        raise RuntimeError("engine.kind verl: the engine is loaded before the trainer starts")
    return _cluster


def check_machine(config: TrainConfig) -> None:
    """Raises StartFailed when this machine cannot do what is asked of it alone; a joined cluster answers for itself."""
    verl = config.engine.verl
    if config.ray is not None and config.ray.address is not None:
        return
    import torch

    if not torch.cuda.is_available():
        raise StartFailed(
            "engine.kind verl needs NVIDIA GPUs, and torch sees none here; join a Ray cluster that has them "
            "(ray.address), install a CUDA build of torch, or take engine.kind vllm or hf"
        )
    check_gpus(verl, torch.cuda.device_count())
    if importlib.util.find_spec(verl.rollout) is None:
        raise StartFailed(
            f"engine.verl.rollout {verl.rollout}: the package {verl.rollout!r} is not installed; "
            f"pip install 'verl[{verl.rollout}]==0.9.1'"
        )


def check_gpus(verl: VerlConfig, there: int) -> None:
    """Raises StartFailed when there are fewer GPUs than the configuration takes."""
    needed = verl.nodes * verl.gpus_per_node
    if verl.placement == "separate":
        needed += verl.generating_gpus
    if there < needed:
        raise StartFailed(
            f"engine.verl takes {needed} GPUs and {there} are there; lower nodes and gpus_per_node (separate: also "
            "rollout_nodes and rollout_gpus_per_node), or join a Ray cluster (ray.address)"
        )


def environment_of_ranks() -> dict[str, str]:
    return {
        "PYTHONPATH": package_path(),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
    }


def _start_ray(config: TrainConfig, work_dir: Path) -> Callable[[], None]:
    """What ends it."""
    os.environ.update(QUIET)
    runtime_env = {"env_vars": environment_of_ranks()}
    address = config.ray.address if config.ray else None
    folder = temp_dir(work_dir)
    if address is None:
        clear_temp_dirs(folder)
        ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), runtime_env=runtime_env)
    else:
        join_cluster(address, runtime_env=runtime_env)

    def end() -> None:
        ray.shutdown()
        if address is None:
            shutil.rmtree(folder, ignore_errors=True)

    return end


def _gpus_of_cluster() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def _ranks(config: TrainConfig, settings: Any) -> tuple[Any, Callable[[], Replicas]]:
    """The worker group, and what starts the replicas once it has its model."""
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import LLMServerManager

    from swarmtune.engines.verl_ranks import VerlRank

    verl = config.engine.verl
    pool = RayResourcePool(process_on_nodes=[verl.gpus_per_node] * verl.nodes, use_gpu=True, max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(VerlRank), config=settings.actor_rollout_ref, role=ROLES[verl.placement]
        ),
        device_name="cuda",
    )

    def start_replicas() -> Replicas:
        manager: Any = LLMServerManager.create(
            config=settings, worker_group=group if verl.placement == "colocated" else None
        )
        transfer: Any = omega_conf_to_dataclass(settings.actor_rollout_ref.rollout.checkpoint_engine)
        return Replicas(manager, CheckpointEngineManager(transfer, group, manager.get_replicas()))

    return group, start_replicas
