"""What the learning suite trains in seconds: random weights learn to write capital letters.

The reward is the share of capitals among an answer's letters. Nothing but the training signal can teach a random model
that, so a broken advantage, mask or loss shows within a few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai

from swarmtune.client import Episode
from swarmtune.script import Parameters, Script, run

WORDS = ("river", "stone", "cloud", "bread", "lamp", "train", "glass", "storm")


def make_tasks(parameters: Parameters, seed: int) -> list[dict[str, Any]]:
    return [{"task_id": word, "word": word} for word in WORDS]


def rollout(task: Mapping[str, Any], episode: Episode) -> float:
    """One question, one answer of at most 16 tokens."""
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as llm:
        reply = llm.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": str(task["word"])}], max_tokens=16
        )
    return capitals(reply.choices[0].message.content or "")


def capitals(answer: str) -> float:
    letters = [c for c in answer if c.isalpha()]
    return sum(c.isupper() for c in letters) / len(letters) if letters else 0.0


LETTERS = Script(
    name="letters",
    parameters=Parameters,
    tasks=make_tasks,
    rollout=rollout,
    defaults={
        "model": "tiny",
        "steps": 6,
        "batch_tasks": 4,
        "repeats": 8,
        "parallel": 32,
        "sampling.max_tokens": 16,
        "sampling.top_k": 64,
        "engine.context_length": 128,
        "engine.threads": 1,
        "trainer.dtype": "fp32",
        "optim.lr": 3e-3,
        "checkpoint.every_steps": 0,
    },
)

if __name__ == "__main__":
    run(LETTERS)
