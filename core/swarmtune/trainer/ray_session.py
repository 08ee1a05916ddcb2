"""Ray for the trainer: one session per process, shared by its models, gone with it.

Without an address Ray is started on this machine for this process alone: no dashboard to open, no usage report, a small
object store, and the kernel ends its processes with this one, `kill -9` included. With an address it joins a cluster and
leaves it running. A machine where this process is killed keeps Ray's two agents for up to two minutes when nobody ends
its process group; the server does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

from swarmtune.config import ConfigError, RayConfig

log = logging.getLogger(__name__)

MODELS = 3
"""Policy, reference and critic: each rank has a place for each of them."""
SOCKET_LIMIT = 107
"""Bytes of a unix socket's path (Linux)."""
SOCKET_TAIL = len("/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Nothing is reported, and no Python workers are started that the actors, which have their own environment, cannot use."""


class RaySession:
    """Ray's connection of this process and the places of the ranks. Make it with `open_session`."""

    def __init__(self, config: RayConfig, work_dir: Path) -> None:
        """Raises ConfigError when there is no such cluster, or it has too few processors."""
        import ray

        self._users = 0
        self._temp_dir: Path | None = None
        os.environ.update(QUIET)
        if config.address is None:
            self._temp_dir = temp_dir(work_dir)
            shutil.rmtree(self._temp_dir, ignore_errors=True)  # of a session that was killed
            ray.init(
                address="local",
                num_cpus=config.processes * MODELS,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=config.object_store_mb << 20,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self._temp_dir),
            )
        else:
            self._join(config.address)
        try:
            self.pool = self._places(config)
        except BaseException:
            self._shutdown()
            raise

    def _join(self, address: str) -> None:
        import ray

        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(
                f"ray.address: no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`, or "
                "leave ray.address out"
            ) from error

    def _places(self, config: RayConfig) -> Any:
        """veRL's resource pool: `processes` bundles, evenly over `nodes` machines."""
        import ray
        from verl.single_controller.ray import RayResourcePool

        needed, free = config.processes * MODELS, ray.available_resources().get("CPU", 0)
        if free < needed:
            raise ConfigError(
                f"ray.processes: {config.processes} ranks take {needed} of the cluster's processors and {free:.0f} are "
                "free; lower it, or start Ray with more (`ray start --num-cpus`)"
            )
        return RayResourcePool(
            process_on_nodes=[config.processes // config.nodes] * config.nodes,
            use_gpu=False,
            max_colocate_count=MODELS,
        )

    def _shutdown(self) -> None:
        import ray

        ray.shutdown()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)


_lock = threading.Lock()
_session: RaySession | None = None


def open_session(config: RayConfig, work_dir: Path) -> RaySession:
    """The process's session, opened by its first user; each user closes it once.

    Raises:
        ConfigError: see RaySession.
    """
    global _session
    with _lock:
        if _session is None:
            _session = RaySession(config, work_dir)
        _session._users += 1
        return _session


def close_session(session: RaySession) -> None:
    """The last user ends it, and with it what was started for it."""
    global _session
    with _lock:
        session._users -= 1
        if session._users == 0 and _session is session:
            _session = None
            with contextlib.suppress(OSError):
                session._shutdown()


def temp_dir(work_dir: Path) -> Path:
    """Where Ray keeps sockets and logs: in the work folder where their paths fit, else under the system's."""
    inside = work_dir.resolve() / "ray"
    if len(os.fsencode(inside)) + SOCKET_TAIL <= SOCKET_LIMIT:
        return inside
    name = f"swarmtune-ray-{os.getuid()}-{zlib.crc32(os.fsencode(inside)):08x}"
    return Path(tempfile.gettempdir()) / name
