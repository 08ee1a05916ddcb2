"""A Llama-shaped model of 0.2 M parameters, made-up episodes, and a trainer on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmtune.config import TrainConfig
from swarmtune.trainer.trainer import Trainer
from swarmtune.types import FinishedEpisode, Sample, TrainBatch

VOCABULARY = 512


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


def sample(
    index: int, episode: str, task: str, *, prompt: list[int], turns: list[tuple[int, int]], **fields: Any
) -> Sample:
    """A row: the prompt, then per turn so many sampled tokens and so many tokens of the environment."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens, mask = list(prompt), [0] * len(prompt)
    for sampled, environment in turns:
        tokens += torch.randint(0, VOCABULARY, (sampled + environment,), generator=generator).tolist()
        mask += [1] * sampled + [0] * environment
    logprobs = (-torch.rand(len(tokens), generator=generator) * 3 - 4).tolist()
    return Sample(
        sample_id=f"{episode}-{index}",
        episode_id=episode,
        task_id=task,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=[p if m else 0.0 for p, m in zip(logprobs, mask, strict=True)],
        weight_versions=[0 if m else -1 for m in mask],
        **fields,
    )


@pytest.fixture
def batch() -> TrainBatch:
    return make_batch()


def make_batch(step: int = 1, seed: int = 0) -> TrainBatch:
    """3 tasks × 3 episodes: one or two rows, one or two turns, prompts shared within a task, mixed rewards."""
    generator = torch.Generator().manual_seed(seed)
    episodes = []
    for task in range(3):
        prompt = torch.randint(0, VOCABULARY, (20 + 3 * task,), generator=generator).tolist()
        for repeat in range(3):
            n = 3 * task + repeat
            rows = [sample(10 * n + seed, f"e{n}", f"t{task}", prompt=prompt, turns=[(4 + n, 3), (2 + repeat, 0)])]
            if repeat == 1:
                rows.append(sample(10 * n + seed + 5, f"e{n}", f"t{task}", prompt=prompt[:9], turns=[(6, 0)]))
            episodes.append(FinishedEpisode(f"e{n}", f"t{task}", reward=[0.0, 1.0, 0.3][(n + task) % 3], samples=rows))
    return TrainBatch(step=step, episodes=episodes)
