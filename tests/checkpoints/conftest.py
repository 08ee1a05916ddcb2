"""Scripted servers on a folder of their own, and a real trainer on a Llama of 0.2 M parameters with a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmtune.testing import chatml_model

# importmode=importlib puts no test folder on the path, and `tests` is a package of others, too.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder: random weights, tokenizer, chat template, generation settings. Heads of 32, the smallest
    that vLLM computes on a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = chatml_model(tmp_path_factory.mktemp("model") / "llama")
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def trained(tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`trained(**keys)` → (a trainer after one step, the folder of a run it belongs to)."""
    import json

    from checkpoint_parts import make_batch

    from swarmtune.config import TrainConfig
    from swarmtune.trainer.trainer import Trainer

    started: list[Trainer] = []

    def make(**keys: Any) -> tuple[Trainer, Path]:
        base = {
            "model": str(tiny_llama),
            "trainer.dtype": "fp32",
            "optim.lr": 1e-2,
            "engine.context_length": 256,
            "sampling.max_tokens": 32,
        }
        config = TrainConfig.from_dict(base | keys)
        run = tmp_path / f"run{len(started)}"
        run.mkdir()
        (run / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
        trainer = Trainer(config, tiny_llama, work_dir=tmp_path)
        started.append(trainer)
        trainer.start()
        trainer.update(make_batch())
        return trainer, run

    yield make
    for trainer in started:
        trainer.close()
