"""Learning rate as a function of the step, so that resuming needs nothing but the step number."""

from __future__ import annotations

import math

from swarmtune.config import OptimConfig


def lr_at(step: int, config: OptimConfig) -> float:
    """Learning rate of update `step`, the first being 1: linear warm-up, then the schedule, 0 after `total_steps`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    done = (step - 1 - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    done = min(1.0, done)
    return config.lr * (1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
