"""A Llama-shaped model of 0.2 M parameters, made-up episodes, and a trainer on one thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmtune.config import TrainConfig
from swarmtune.trainer.trainer import Trainer
from swarmtune.types import TrainBatch

# importmode=importlib puts no test folder on the path, and `tests` is a package of others, too.
sys.path.insert(0, str(Path(__file__).parent))
from trainer_episodes import VOCABULARY, make_batch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded random weights, sharp enough that probabilities differ; no tokenizer: the trainer needs none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def plain_model(model_path: Path) -> Callable[[], Any]:
    """A fresh transformers model with the same weights: the independent computation's model."""
    from transformers import LlamaForCausalLM

    return lambda: LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture
def config() -> Callable[..., TrainConfig]:
    def make(**keys: Any) -> TrainConfig:
        base = {"model": "tiny", "trainer.dtype": "fp32", "optim.lr": 1e-3, "optim.grad_clip": 1e9}
        return TrainConfig.from_dict(base | keys)

    return make


@pytest.fixture
def trainer(config: Callable[..., TrainConfig], model_path: Path, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Build and start a trainer: `trainer(**{"algorithm.kl_coef": 0.1})`."""
    started: list[Trainer] = []

    def make(*, resume: Path | None = None, **keys: Any) -> Trainer:
        made = Trainer(config(**keys), model_path, work_dir=tmp_path)
        started.append(made)
        made.start(resume)
        return made

    yield make
    for made in started:
        made.close()


@pytest.fixture
def batch() -> TrainBatch:
    return make_batch()
