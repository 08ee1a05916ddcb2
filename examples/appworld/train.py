"""Trains an agent that writes code to use somebody's apps: AppWorld, or a small world of its kind that needs nothing.

    python examples/appworld/train.py                                            # the small world
    python examples/appworld/train.py --set task.world=appworld --set task.root=DIR    # the real one

The loop is AppWorld's: the agent writes code, hears what it printed, and goes on until it calls
`apis.supervisor.complete_task()`. The reward is the world's own check of the state it leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import openai
import real_appworld
import small_world
from environment import World
from pydantic import Field

from swarmtune.client import Episode
from swarmtune.script import Parameters, Script, run

RULES = """You do errands for somebody by writing Python. Write one block of code a turn:
```python
print(apis.{docs}())
```
You are told what it printed. Use apis.APP.API(name=value). When all is done, call apis.supervisor.complete_task().
"""
_STARTING = threading.Lock()
DOCS = {"small": "docs.show", "appworld": "api_docs.show_app_descriptions"}


class Errands(Parameters):
    """Which world, and how long an agent may work in it."""

    world: Literal["small", "appworld"] = "small"
    count: int = Field(default=48, ge=1)
    """Tasks of the small world."""
    root: Path = Path("appworld")
    """Folder that holds AppWorld's data/."""
    split: str = "train"
    """AppWorld's: train, dev, test_normal, test_challenge."""
    worlds: int = Field(default=8, ge=1)
    """AppWorld's server processes: episodes at work at once."""
    max_turns: int = Field(default=8, ge=1)


def make_tasks(errands: Errands, seed: int) -> Sequence[dict[str, Any]]:
    if errands.world == "appworld":
        real_appworld.check(errands.root)
        names = real_appworld.task_ids(errands.root, errands.split)
    else:
        names = small_world.task_ids(errands.count)
    return [{"task_id": name, **errands.model_dump(mode="json")} for name in names]


def rollout(task: Mapping[str, Any], episode: Episode) -> tuple[float, dict[str, float]]:
    """One errand. An environment that breaks raises, so that its episode is aborted instead of getting 0."""
    with world_of(task) as world:
        turns = work(world, task, episode)
        return world.score(), {"turns": turns, "completed": float(world.completed())}


def work(world: World, task: Mapping[str, Any], episode: Episode) -> int:
    """Let the agent do it; the number of turns it took."""
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    rules = RULES.replace("{docs}", DOCS[task["world"]])
    messages: list[Any] = [{"role": "system", "content": rules}, {"role": "user", "content": world.instruction}]
    for turn in range(1, task["max_turns"] + 1):
        said = llm.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content or ""
        printed = world.execute(code) if (code := code_of(said)) else "Nothing was run: write a block of Python code."
        if world.completed():
            return turn
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": printed or "(no output)"}]
    return task["max_turns"]


def code_of(said: str) -> str:
    """The first code block, which need not be closed; "" where there is none."""
    found = re.search(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", said, re.DOTALL)
    return found[1].strip() if found else ""


def world_of(task: Mapping[str, Any]) -> contextlib.AbstractContextManager[World]:
    if task["world"] == "small":
        return contextlib.closing(small_world.SmallWorld(task["task_id"]))
    with _STARTING:  # the first episodes ask all at once
        servers = _servers(task["root"], task["worlds"])
    return servers.world(task["task_id"])


@cache
def _servers(root: str, count: int) -> real_appworld.Servers:
    servers = real_appworld.Servers([real_appworld.AppWorldServer(Path(root)) for _ in range(count)])
    atexit.register(servers.stop)
    return servers


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


APPWORLD = Script(
    name="appworld",
    parameters=Errands,
    tasks=make_tasks,
    rollout=rollout,
    defaults={
        "model": "smollm2-135m",
        "steps": 8,
        "batch_tasks": 8,
        "repeats": 8,
        "parallel": 32,
        "sampling.max_tokens": 96,
        "engine.context_length": 2048,
        "optim.lr": 1e-5,
        "checkpoint.every_steps": 0,
    },
)

if __name__ == "__main__":
    run(APPWORLD)
