"""The second client of the cocktail: a format task. The reward is 1 when the whole answer is one word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import openai

from swarmtune.client import Episode
from swarmtune.script import Parameters, Script, run

THINGS = (
    "animal colour fruit river planet metal tool country city tree flower bird fish drink vegetable sport insect "
    "language season month instrument shape spice ocean mountain profession vehicle gemstone fabric dance"
).split()


def make_tasks(parameters: Parameters, seed: int) -> list[dict[str, Any]]:
    return [{"task_id": f"name-{thing}", "thing": thing} for thing in THINGS]


def rollout(task: Mapping[str, Any], episode: Episode) -> float:
    """One question, one answer."""
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    reply = llm.chat.completions.create(
        model=episode.model,
        messages=[{"role": "user", "content": f"Name one {task['thing']}. Answer with one word only."}],
        max_tokens=16,
    )
    choice = reply.choices[0]
    return reward_of(choice.message.content or "") if choice.finish_reason == "stop" else 0.0


def reward_of(answer: str) -> float:
    """1.0 for one word, with or without a full stop behind it."""
    return float(bool(re.fullmatch(r"[A-Za-z]+\.?", answer.strip())))


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


ONE_WORD = Script(
    name="cocktail-one-word",
    tasks=make_tasks,
    rollout=rollout,
    defaults={"client_name": "one-word", "client_share": 4},
)

if __name__ == "__main__":
    run(ONE_WORD)
