"""The trainer: one batch of finished episodes in, one policy update with veRL out.

Owns the master weights (fp32), the optimizer and the step number of one model. `update` either finishes or leaves weights,
optimizer and step as they were before it. Knows nothing of HTTP, pools or engines: `weights` hands the tensors out.
Every method blocks and all of them must be called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swarmtune.config import TrainConfig
from swarmtune.types import TrainBatch

if TYPE_CHECKING:
    import torch


class Trainer:
    """Trains the model in `model_path` (a Hugging Face folder) as `config` says."""

    def __init__(self, config: TrainConfig, model_path: Path, *, work_dir: Path) -> None:
        """Check the configuration; nothing is loaded yet.

        Raises:
            ConfigError: an estimator, loss or combination that cannot be trained, with the known names.
        """
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Step of the last update; 0 for a fresh model."""
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, adapters left out."""
        raise NotImplementedError

    def start(self, resume: Path | None = None) -> int:
        """Load model and optimizer, from the checkpoint folder `resume` where given; return its step, 0 when fresh.

        Raises:
            FileNotFoundError: `resume` is not a complete checkpoint.
            ConfigError: the checkpoint was written with another model or adapter.
        """
        raise NotImplementedError

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`; afterwards `step == batch.step`. Metrics carry veRL's names.

        Raises:
            ValueError: the batch cannot be trained (no episodes, a baseline missing, non-finite loss).
        """
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights by Hugging Face name, fp32, adapters merged. Copy each tensor before the next is taken."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write a checkpoint folder `path` (weights, optimizer, RNG, step): complete or absent, also after a crash.

        Raises:
            OSError: not enough space or not writable; an existing checkpoint at `path` is intact.
        """
        raise NotImplementedError

    def track(self, metrics: dict[str, float], step: int) -> None:
        """Send a step's metrics to the configured tracking backends (TensorBoard, W&B, SwanLab)."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish tracking and release the model. Idempotent."""
        raise NotImplementedError
