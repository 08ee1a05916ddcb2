"""Made-up episodes for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swarmtune.config import AlgorithmConfig
from swarmtune.trainer.advantages import estimate
from swarmtune.types import FinishedEpisode, Sample, TrainBatch

VOCABULARY = 512


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


def episode_advantages(episodes: Sequence[FinishedEpisode], config: AlgorithmConfig) -> list[torch.Tensor]:
    """Advantages from the rewards alone."""
    return estimate(episodes, [e.reward for e in episodes], config).advantages
