"""Scripts for the scripted engine: what the model says in the tests of the examples."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Messages = Sequence[dict[str, str]]


def sums(messages: Messages, index: int) -> str:
    """Every third answer is wrong."""
    a, b = map(int, re.findall(r"(\d+) \+ (\d+)", messages[-1]["content"])[-1])
    return str(a + b + (index % 3 == 2))


def computes(messages: Messages, index: int) -> str:
    """Uses the python tool for a product, then says what it printed; every third time it trusts its own head."""
    question = next(m["content"] for m in messages if m["role"] == "user" and " times " in m["content"])
    a, b = re.findall(r"(\d+) times (\d+)", question)[-1]
    if messages[-1]["content"] == question or question in messages[-1]["content"]:
        if index % 3 == 2:
            return "Answer: 1"
        call = {"name": "python", "arguments": {"program": f"print({a} * {b})"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    printed = re.findall(r"-?\d+", messages[-1]["content"])
    return f"That gives it.\nAnswer: ${printed[-1]}$"


def polite_by_halves(messages: Messages, index: int) -> str:
    """Polite in every second answer."""
    return "We are sorry about this and send another one." if index % 2 else "No."
