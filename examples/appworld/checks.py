"""What `a3r client check` plays besides its own stub policies; for the small world."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from small_world import SmallWorld, apis

Messages = Sequence[Mapping[str, str]]


def random_answer(task: Mapping[str, Any], messages: Messages, rng: random.Random) -> str:
    """Some API, called without knowing with what."""
    app, _, api = rng.choice(apis()).__name__.partition("_")
    return f"```python\nprint(apis.{app}.{api}())\n```"


def good_answer(task: Mapping[str, Any], messages: Messages) -> str:
    """Everything in one block."""
    lines = [call_of(*step) for step in SmallWorld(task["task_id"]).solution]
    return "\n".join(["```python", *lines, call_of("supervisor", "complete_task", {}), "```"])


def call_of(app: str, api: str, arguments: Mapping[str, Any]) -> str:
    return f"apis.{app}.{api}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
