"""Trains a small instruct model to add one-digit numbers: a swarm client with the unchanged OpenAI SDK.

    python examples/arithmetic/train.py            # starts a server of its own; results in runs/<date>-arithmetic/

The agent asks one question and reads the answer; the reward is 1 when the last number in it is the sum, else 0. It is
the last one, so that listing many numbers does not pay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import openai
from pydantic import Field

from swarmtune.client import Episode
from swarmtune.script import Parameters, Script, run


class Sums(Parameters):
    """Which sums are trained."""

    largest: int = Field(default=9, ge=1)
    """Both numbers run from 0 to this."""


def make_tasks(sums: Sums, seed: int) -> list[dict[str, Any]]:
    """Every sum once; the training shuffles them by its seed."""
    numbers = range(sums.largest + 1)
    return [{"task_id": f"add-{a}-{b}", "a": a, "b": b} for a, b in product(numbers, numbers)]


def rollout(task: Mapping[str, Any], episode: Episode) -> tuple[float, dict[str, float]]:
    """One question, one answer."""
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    reply = llm.chat.completions.create(
        model=episode.model,
        messages=[{"role": "user", "content": f"What is {task['a']} + {task['b']}? Answer with the number only."}],
        max_tokens=16,
    )
    answer = reply.choices[0].message.content or ""
    reward = reward_of(answer, task["a"] + task["b"])
    return reward, {"answer_tokens": float(reply.usage.completion_tokens if reply.usage else 0)}


def reward_of(answer: str, expected: int) -> float:
    """1.0 when the last number in the answer is the expected one."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == expected)


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


ARITHMETIC = Script(
    name="arithmetic",
    parameters=Sums,
    tasks=make_tasks,
    rollout=rollout,
    defaults={
        "model": "smollm2-135m",
        "steps": 10,
        "batch_tasks": 16,
        "repeats": 8,
        "parallel": 128,
        "sampling.temperature": 1.0,
        "sampling.max_tokens": 16,
        "engine.context_length": 128,
        "engine.max_batch": 128,
        "optim.lr": 2e-5,
        "checkpoint.every_steps": 0,
    },
)

if __name__ == "__main__":
    run(ARITHMETIC)
