"""The second client: a format task over plain HTTP; the answer is to be one word. Needs httpx and pydantic only.

python one_word.py --server URL --config FILE
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import cocktail_client
import httpx

from swarmtune.client import Episode

THINGS = (
    "animal colour fruit river planet metal tool country city tree flower bird fish drink vegetable sport insect "
    "language season month instrument shape spice ocean mountain profession vehicle gemstone fabric dance"
).split()
TASKS = [{"task_id": f"name-{thing}", "thing": thing} for thing in THINGS]


def rollout(task: Mapping[str, Any], episode: Episode) -> float:
    """One question, one answer; an answer that was cut off is worth 0."""
    question = f"Name one {task['thing']}. Answer with one word only."
    reply = _http().post(
        f"{episode.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.api_key}"},
        json={"model": episode.model, "messages": [{"role": "user", "content": question}]},
    )
    (choice,) = reply.raise_for_status().json()["choices"]
    return reward_of(choice["message"]["content"] or "") if choice["finish_reason"] == "stop" else 0.0


def reward_of(answer: str) -> float:
    """1.0 for one word, with or without a full stop behind it."""
    return float(bool(re.fullmatch(r"[A-Za-z]+\.?", answer.strip())))


@cache
def _http() -> httpx.Client:
    return httpx.Client(timeout=600)


if __name__ == "__main__":
    cocktail_client.run("one-word", TASKS, rollout)
