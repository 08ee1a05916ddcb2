"""Trains a model to answer mathematical questions, if asked to with a python tool: a swarm client with the OpenAI SDK.

    python examples/math/train.py                                                    # sums of one-digit numbers
    python examples/math/train.py --set task.dataset=reasoning-gym --set task.gym=chain_sum
    python examples/math/train.py --set task.dataset=dapo-math --set task.tool=true  # from the hub
    python examples/math/train.py --set task.file=aime.jsonl                         # from a file

The reward is 1 for a right answer, else 0 (reasoning-gym's own score for its tasks).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import answers
import math_tasks
import openai
from pydantic import Field
from python_tool import run_python

from swarmtune.client import Episode
from swarmtune.script import Parameters, Script, run

PLAIN = "Answer with the number only."
WORKED = "Think step by step. End with a line 'Answer: ' and the final answer only."
TOOL_HINT = "You may call the tool `python`; it runs a program and gives you what that prints."
PYTHON_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"program": {"type": "string", "description": "The source text."}},
            "required": ["program"],
        },
    },
}


class Questions(Parameters):
    """Which questions are trained, and with what."""

    dataset: Literal["arithmetic", "reasoning-gym", "aime-2024", "aime-2025", "dapo-math"] = "arithmetic"
    file: Path | None = None
    """Questions and answers, a JSON object a line; wins over `dataset`."""
    gym: str = "chain_sum"
    """Name of a reasoning-gym data set."""
    count: int = Field(default=100, ge=1)
    """How many tasks are made (arithmetic, reasoning-gym)."""
    tool: bool = False
    """Give the agent a python tool."""
    max_turns: int = Field(default=4, ge=1)
    """Model calls of an episode at most; one that has not answered by then gets 0."""


def make_tasks(questions: Questions, seed: int) -> Sequence[dict[str, Any]]:
    if questions.file is not None:
        found = math_tasks.from_file(questions.file)
    elif questions.dataset == "arithmetic":
        found = math_tasks.sums(questions.count, seed)
    elif questions.dataset == "reasoning-gym":
        found = math_tasks.gym(questions.gym, questions.count, seed)
    else:
        found = math_tasks.from_hub(questions.dataset)
    for judge in {task["judge"] for task in found}:
        answers.check_judge(judge)
    return [task | {"tool": questions.tool, "max_turns": questions.max_turns} for task in found]


def rollout(task: Mapping[str, Any], episode: Episode) -> tuple[float, dict[str, float]]:
    """One question; calls of the tool are answered until the model answers or has had its turns."""
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    hints = [PLAIN if task["judge"] == "number" else WORKED, *([TOOL_HINT] if task["tool"] else [])]
    tools: dict[str, Any] = {"tools": [PYTHON_TOOL]} if task["tool"] else {}
    messages: list[Any] = [{"role": "user", "content": " ".join([task["question"], *hints])}]
    tool_calls = 0
    for turn in range(1, task["max_turns"] + 1):
        message = llm.chat.completions.create(model=episode.model, messages=messages, **tools).choices[0].message
        if not message.tool_calls:
            return answers.score(task, message.content or ""), {"turns": turn, "tool_calls": tool_calls}
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            tool_calls += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": use_tool(call)})
    return 0.0, {"turns": task["max_turns"], "tool_calls": tool_calls}


def use_tool(call: Any) -> str:
    """What the model is told; a call that cannot be understood is answered, not raised."""
    if call.function.name != "python":
        return f"There is no tool {call.function.name!r}; the only one is `python`."
    try:
        program = json.loads(call.function.arguments)["program"]
    except (ValueError, KeyError, TypeError):
        return 'Arguments must be {"program": "…"}.'
    return run_python(str(program)).text


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


MATH = Script(
    name="math",
    parameters=Questions,
    tasks=make_tasks,
    rollout=rollout,
    defaults={
        "model": "smollm2-135m",
        "steps": 8,
        "batch_tasks": 12,
        "repeats": 8,
        "parallel": 96,
        "sampling.temperature": 1.0,
        "sampling.max_tokens": 16,
        "engine.context_length": 128,
        "engine.max_batch": 96,
        "optim.lr": 2e-5,
        "checkpoint.every_steps": 0,
    },
)

if __name__ == "__main__":
    run(MATH)
