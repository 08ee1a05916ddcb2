"""A step's metrics to TensorBoard, W&B, SwanLab and the console, through veRL's Tracking.

metrics.jsonl is not written here: the server does, for every backend.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.trainer.worker import environment

MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab"}
"""Backend → the module it needs."""

FOLDERS = {"TENSORBOARD_DIR": "tensorboard", "SWANLAB_LOG_DIR": "swanlab", "WANDB_DIR": "."}
"""Variable that veRL or the backend reads when it opens a run → folder under the working directory."""


class Tracker:
    """Owns the open runs of the tracking backends; without backends it does nothing."""

    def __init__(self, config: TrainConfig, work_dir: Path) -> None:
        """Open the runs; TensorBoard and SwanLab write under `work_dir` unless their own variables say otherwise.

        Raises:
            ConfigError: a backend's package is not installed.
        """
        self._tracking = None
        backends: list[str] = [*config.tracking.backends]
        if not backends:
            return
        from importlib.util import find_spec

        from verl.utils.tracking import Tracking

        for backend in backends:
            if backend in MODULES and find_spec(MODULES[backend]) is None:
                raise ConfigError(
                    f"tracking.backends: {backend!r} needs the package {MODULES[backend]!r}; install it or leave it out"
                )
        places = {name: str(work_dir / folder) for name, folder in FOLDERS.items() if name not in os.environ}
        with environment(places):
            self._tracking = Tracking(
                project_name=config.tracking.project,
                experiment_name=config.tracking.name or work_dir.name,
                default_backend=backends,
                config=config.model_dump(),
            )

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._tracking is not None:
            self._tracking.log(metrics, step)

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.finish()
            self._tracking = None
