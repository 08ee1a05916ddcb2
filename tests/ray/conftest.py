"""A Llama-shaped model of 0.2 M parameters, and trainers in one process or over two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmtune.config import TrainConfig
from swarmtune.trainer import cpu_platform
from swarmtune.trainer.trainer import Trainer

# Helpers here and the trainer's made-up episodes; importmode=importlib puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))
sys.path.insert(0, str(Path(__file__).parent))
from trainer_episodes import VOCABULARY

cpu_platform.activate()  # before a test module imports veRL's workers, which fixes the device of the process


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded random weights, sharp enough that probabilities differ; the head is not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.2, **shape)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def trainer_config(**keys: Any) -> TrainConfig:
    base = {"model": "tiny", "trainer.dtype": "fp32", "optim.lr": 1e-3, "optim.grad_clip": 1e9, "engine.threads": 2}
    return TrainConfig.from_dict(base | keys)


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Build and start a trainer: `trainer(ranks=2, **{"algorithm.kl_coef": 0.1})`."""
    started: list[Trainer] = []

    def make(*, ranks: int = 1, resume: Path | None = None, **keys: Any) -> Trainer:
        spread = {"ray.processes": ranks} if ranks > 1 else {}
        made = Trainer(trainer_config(**spread, **keys), model_path, work_dir=tmp_path)
        started.append(made)
        made.start(resume)
        return made

    yield make
    for made in started:
        made.close()
