"""One and the same task through four kinds of client: the OpenAI SDK, LangChain, AgentScope, plain HTTP.

    python examples/four_frameworks/train.py --set task.via=langchain      # one of them
    python examples/four_frameworks/compare.py                             # all four, one plot

The agent asks for a sum of one-digit numbers and reads the answer, as in examples/arithmetic. What differs is only who
sends the question; the server gets the same tokens from each.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from itertools import product
from typing import Any, Literal

from pydantic import Field

from swarmtune.client import AsyncEpisode
from swarmtune.script import Parameters, Script, run

Via = Literal["openai", "langchain", "agentscope", "http"]
Ask = Callable[[str, AsyncEpisode], Awaitable[str]]
"""Asks the model one question as a new user and returns its answer."""


class Task(Parameters):
    """Which sums are trained, and through which client."""

    largest: int = Field(default=9, ge=1)
    """Both numbers run from 0 to this."""
    via: Via = "openai"


async def ask_openai(question: str, episode: AsyncEpisode) -> str:
    llm = _openai_sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    messages: Any = [{"role": "user", "content": question}]
    reply = await llm.chat.completions.create(model=episode.model, messages=messages)
    return reply.choices[0].message.content or ""


async def ask_langchain(question: str, episode: AsyncEpisode) -> str:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model=episode.model, base_url=episode.base_url, api_key=lambda: episode.api_key)
    return str((await llm.ainvoke(question)).content)


async def ask_agentscope(question: str, episode: AsyncEpisode) -> str:
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel

    credential = OpenAICredential(api_key=episode.api_key, base_url=episode.base_url)  # type: ignore[arg-type]
    reply = await OpenAIChatModel(credential, episode.model, stream=False)([UserMsg(name="user", content=question)])
    return "".join(block.text for block in reply.content if block.type == "text")  # type: ignore[union-attr]


async def ask_http(question: str, episode: AsyncEpisode) -> str:
    reply = await _http().post(
        f"{episode.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.api_key}"},
        json={"messages": [{"role": "user", "content": question}]},
    )
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]


ASK: dict[Via, Ask] = {
    "openai": ask_openai,
    "langchain": ask_langchain,
    "agentscope": ask_agentscope,
    "http": ask_http,
}


@cache
def _openai_sdk() -> Any:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    import openai

    return openai.AsyncOpenAI(api_key="each episode has its own")


@cache
def _http() -> Any:
    import httpx

    return httpx.AsyncClient(timeout=600)


def make_tasks(task: Task, seed: int) -> list[dict[str, Any]]:
    """Every sum once; the training shuffles them by its seed."""
    numbers = range(task.largest + 1)
    return [{"task_id": f"add-{a}-{b}", "a": a, "b": b, "via": task.via} for a, b in product(numbers, numbers)]


async def rollout(task: Mapping[str, Any], episode: AsyncEpisode) -> float:
    """One question, one answer."""
    question = f"What is {task['a']} + {task['b']}? Answer with the number only."
    answer = await ASK[task["via"]](question, episode)
    return reward_of(answer, task["a"] + task["b"])


def reward_of(answer: str, expected: int) -> float:
    """1.0 when the last number in the answer is the expected one."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == expected)


FOUR_FRAMEWORKS = Script(
    name="four_frameworks",
    parameters=Task,
    tasks=make_tasks,
    rollout=rollout,
    defaults={
        "model": "smollm2-135m",
        "steps": 8,
        "batch_tasks": 8,
        "repeats": 8,
        "parallel": 64,
        "sampling.temperature": 1.0,
        "sampling.max_tokens": 16,
        "engine.context_length": 128,
        "optim.lr": 2e-5,
        "checkpoint.every_steps": 0,
    },
)

if __name__ == "__main__":
    run(FOUR_FRAMEWORKS)
