"""veRL's own client and checkpoint manager over actors that write down what they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmtune.config import TrainConfig
from swarmtune.engines import verl_cluster
from swarmtune.trainer import cpu_platform

cpu_platform.activate()  # before a test module imports veRL's workers, which fixes the device of the process

# importmode=importlib puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config() -> Callable[..., TrainConfig]:
    def make(**keys: Any) -> TrainConfig:
        base = {"model": "tiny", "engine.kind": "verl", "sampling.max_tokens": 64, "trainer.dtype": "fp32"}
        return TrainConfig.from_dict(base | keys)

    return make


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of the stand-ins are the values themselves."""
    from verl.checkpoint_engine import base

    monkeypatch.setattr(verl_cluster, "gather", list)
    monkeypatch.setattr(base.ray, "get", lambda results: results)


@pytest.fixture(scope="session")
def settings() -> Any:
    from swarmtune.engines.verl_config import verl_config

    made = TrainConfig.from_dict({"model": "tiny", "engine.kind": "verl", "sampling.max_tokens": 64})
    return verl_config(made, Path("/models/tiny"), context_length=512)
