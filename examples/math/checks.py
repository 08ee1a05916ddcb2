"""What `a3r client check` plays besides its own stub policies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, str]]


def random_answer(task: Mapping[str, Any], messages: Messages, rng: random.Random) -> str:
    """A number, as somebody answers who knows that one is asked for."""
    return str(rng.randint(0, 18))


def good_answer(task: Mapping[str, Any], messages: Messages) -> str:
    return f"Answer: {task['answer']}"
