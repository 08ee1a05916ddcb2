"""The first client: sums of one-digit numbers, through the OpenAI SDK. Needs httpx, pydantic and openai only.

python sums.py --server URL --config FILE
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import cocktail_client
import openai

from swarmtune.client import Episode

TASKS = [{"task_id": f"add-{a}-{b}", "a": a, "b": b} for a in range(10) for b in range(10)]


def rollout(task: Mapping[str, Any], episode: Episode) -> float:
    """One question, one answer; 1 when its last number is the sum."""
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    question = f"What is {task['a']} + {task['b']}? Answer with the number only."
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = llm.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content or ""
    return reward_of(answer, task["a"] + task["b"])


def reward_of(answer: str, expected: int) -> float:
    """It is the last number, so that listing many does not pay."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == expected)


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


if __name__ == "__main__":
    cocktail_client.run("sums", TASKS, rollout)
