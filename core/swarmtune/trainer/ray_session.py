"""Ray for the trainer: one session per process, with the ranks that all of its models share, gone with it.

Without an address Ray is started on this machine for this process alone: no dashboard to open, no usage report, a small
object store, and the kernel ends its processes with this one, `kill -9` included. With an address it joins a cluster
and leaves it running. Ray's two agents notice the end of a killed session only after about a minute: whoever kills this
process ends its process group, as the server does.

The ranks hold shards of the weights (FSDP2), so none can go on without the others: a call that fails on one of them
ends them all and raises WorkersLost, whether that rank was killed or raised. Nothing waits in a collective for a rank
that is gone.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from swarmtune.config import ConfigError, RayConfig, TrainConfig
from swarmtune.trainer import cpu_platform
from swarmtune.trainer.worker import WorkersLost

PROBE_S = 10.0
SOCKET_LIMIT = 107
"""Bytes of a unix socket's path (Linux)."""
SOCKET_TAIL = len("/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store")
TEMP_PREFIX = "swarmtune-ray-"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Nothing is reported, and no Python processes are started beside the ranks."""


class RaySession:
    """See the module's text. Make it with `open_session`."""

    def __init__(self, config: TrainConfig, work_dir: Path) -> None:
        """Start or join Ray, then start the ranks and wait until they have found each other.

        Raises:
            ConfigError: no such cluster, or too few processors.
            WorkersLost: a rank could not be started; the message has its error.
        """
        assert config.ray is not None
        cpu_platform.activate()
        self.ranks = config.ray.processes
        self._users = 0
        self._group: Any = None
        """veRL's RayWorkerGroup of RankWorker; None when the ranks are gone."""
        self._temp_dir = temp_dir(work_dir) if config.ray.address is None else None
        os.environ.update(QUIET)
        if self._temp_dir is not None:
            _check_machine(config.ray)
            _start(config.ray, self._temp_dir)
        else:
            _join(config.ray)
        try:
            _check_room(config.ray)
            self._group = _ranks(config, config.ray)
            self.pids: list[int] = self.call("pid")
            """Of the ranks' processes."""
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *per_rank: list[Any]) -> list[Any]:
        """A method of RankWorker on each rank, each argument being a list of one value per rank.

        Raises:
            WorkersLost: it failed on one of them; all are gone.
        """
        if self._group is None:
            raise WorkersLost("the processes of the trainer are gone")
        try:
            return gather(self._group.execute_all_async(method, *per_rank))
        except RayError as error:
            self._end_ranks()
            raise WorkersLost(f"a rank of the trainer failed: {last_line(error)}") from error

    @property
    def is_lost(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """End the ranks, and Ray where it was started here. Idempotent."""
        self._end_ranks()
        ray.shutdown()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _end_ranks(self) -> None:
        group, self._group = self._group, None
        for worker in group.workers if group is not None else ():
            ray.kill(worker)


_lock = threading.Lock()
_session: RaySession | None = None


def open_session(config: TrainConfig, work_dir: Path) -> RaySession:
    """The process's session, opened by its first user; each user closes it once with `close_session`.

    Raises:
        ConfigError, WorkersLost: see RaySession.
    """
    global _session
    with _lock:
        if _session is None or _session.is_lost:
            if _session is not None:
                _session.close()
            _session = RaySession(config, work_dir)
        _session._users += 1
        return _session


def close_session(session: RaySession) -> None:
    """The last user ends it."""
    global _session
    with _lock:
        session._users -= 1
        if session._users == 0 and _session is session:
            _session = None
            session.close()


def _start(config: RayConfig, folder: Path) -> None:
    clear_temp_dirs(folder)
    ray.init(
        address="local",
        num_cpus=config.processes,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=config.object_store_mb << 20,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder),
    )


def _join(config: RayConfig) -> None:
    assert config.address is not None
    join_cluster(config.address, log_to_driver=False, configure_logging=False)


def join_cluster(address: str, **settings: Any) -> None:
    """`ray.init` to a cluster that runs.

    Raises:
        ConfigError: nobody answers there, or it wants something else.
    """
    try:
        _probe(address)
        ray.init(address=address, **settings)
    except (OSError, RuntimeError, ValueError) as error:  # Ray has no type of its own for it
        raise ConfigError(
            f"ray.address: no Ray cluster can be joined at {address!r} ({last_line(error)}); start one with "
            "`ray start --head`, set RAY_AUTH_MODE=token where it asks for a token, or leave ray.address out"
        ) from error


def _probe(address: str) -> None:
    """Raises OSError when nothing listens: Ray would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()


def _check_machine(config: RayConfig) -> None:
    """Raises ConfigError before a machine is filled with more ranks than it has processors; two are always allowed."""
    most = max(2, os.cpu_count() or 1)
    if config.processes > most:
        raise ConfigError(
            f"ray.processes: {config.processes} ranks on a machine of {os.cpu_count()} processors would only slow each "
            f"other down; set it to at most {most}, or name a larger cluster with ray.address"
        )


def _check_room(config: RayConfig) -> None:
    """Raises ConfigError now instead of waiting for processors that nobody will give back."""
    free = ray.available_resources().get("CPU", 0)
    if free < config.processes:
        raise ConfigError(
            f"ray.processes: {config.processes} ranks take a processor each and {free:.0f} of the cluster's are free; "
            "lower it, or start Ray with more (`ray start --num-cpus`)"
        )


def _ranks(config: TrainConfig, places: RayConfig) -> Any:
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from swarmtune.trainer.rank_worker import RankWorker

    pool = RayResourcePool(
        process_on_nodes=[places.processes // places.nodes] * places.nodes, use_gpu=False, max_colocate_count=1
    )
    threads = threads_of(config, places)
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(RankWorker), threads=threads),
        device_name="cpu",
        worker_env=environment_of(threads),
    )


def threads_of(config: TrainConfig, places: RayConfig) -> int:
    """Torch threads of each rank: an even share of this machine, or of `engine.threads`."""
    return max(1, (config.engine.threads or os.cpu_count() or 1) // (places.processes // places.nodes))


def environment_of(threads: int) -> dict[str, str]:
    """Of a rank's process: veRL's platform, and this package where it is only on sys.path."""
    return {
        "PYTHONPATH": package_path(),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "swarmtune.trainer.cpu_platform",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }


def package_path() -> str:
    """PYTHONPATH with which another process finds this package."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return f"{package_root}{os.pathsep}{path}" if path else package_root


def gather(references: list[Any]) -> list[Any]:
    """What the calls return; raises as soon as one of them fails, whatever the others wait for."""
    waiting = list(references)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        ray.get(done)
    return ray.get(references)


def last_line(error: Exception) -> str:
    """The last line that says something: Ray wraps whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def temp_dir(work_dir: Path) -> Path:
    """Where Ray keeps sockets and logs: in the work folder where their paths fit, else in the system's own."""
    name = f"{TEMP_PREFIX}{os.getuid()}-{os.getpid()}"
    candidates = [work_dir.resolve() / "ray", Path(tempfile.gettempdir()) / name, Path("/tmp") / name]
    return next((path for path in candidates if _fits(path)), candidates[-1])


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + SOCKET_TAIL <= SOCKET_LIMIT


def clear_temp_dirs(folder: Path) -> None:
    """Remove `folder`, and beside it what this user's processes left that were killed."""
    shutil.rmtree(folder, ignore_errors=True)
    for left in folder.parent.glob(f"{TEMP_PREFIX}{os.getuid()}-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
