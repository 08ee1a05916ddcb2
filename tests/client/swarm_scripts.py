"""Scripts for the scripted engine: what the model says in these tests."""

from __future__ import annotations

import re
from collections.abc import Sequence


def sums(messages: Sequence[dict[str, str]], index: int) -> str:
    """Every third answer is wrong."""
    a, b = map(int, re.findall(r"(\d+) \+ (\d+)", messages[-1]["content"])[-1])
    return f"{a} + {b} = {a + b + (index % 3 == 2)}"


def broken(messages: Sequence[dict[str, str]], index: int) -> str:
    raise RuntimeError("the script is broken")
