"""What an answer's text means: thinking in `<think>…</think>`, calls in `<tool_call>{json}</tool_call>`, content."""

from __future__ import annotations

import json
import re

from swarmtune.types import Message, ToolCall

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def parse_answer(text: str, *, in_reasoning: bool = False, tools: bool = False) -> Message:
    """Split an answer's text.

    Args:
        in_reasoning: the prompt already opened the thinking.
        tools: look for tool calls. One that is not valid JSON with a name stays in the content, as the model wrote it.
    """
    reasoning, content = _split_reasoning(text, in_reasoning)
    calls: tuple[ToolCall, ...] = ()
    if tools:
        content, calls = _split_calls(content)
    return Message("assistant", content, tool_calls=calls, reasoning=reasoning)


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str | None, str]:
    opened = text.lstrip().startswith("<think>")
    closed = "</think>" in text.partition("<tool_call>")[0]  # the mark alone; after a call it is text
    if not (opened or in_reasoning or closed):
        return None, text
    thought, _, answer = (text.lstrip().removeprefix("<think>") if opened else text).partition("</think>")
    return thought.strip() or None, answer.lstrip("\n")


def _split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls. Content is what stands before the first call: what a model says after it goes unheard."""
    found = [(match.start(), call) for match in _CALL.finditer(text) if (call := parse_call(match.group(1)))]
    if not found:
        return text, ()
    return text[: found[0][0]].strip(), tuple(call for _, call in found)


def parse_call(text: str) -> ToolCall | None:
    """A call from its JSON, arguments spelled as they stand; None when it is not one."""
    fields = _raw_fields(text)
    name = fields.get("name", "")
    arguments = fields.get("arguments", fields.get("parameters", "{}"))
    try:
        name_value, argument_value = json.loads(name), json.loads(arguments)
    except ValueError:
        return None
    if not isinstance(name_value, str) or not name_value:
        return None
    return ToolCall("", name_value, argument_value if isinstance(argument_value, str) else arguments)


def _raw_fields(text: str) -> dict[str, str]:
    """Top-level fields of a JSON object, each value spelled as it stands in `text`; {} for anything else."""
    if not text.startswith("{"):
        return {}
    fields: dict[str, str] = {}
    at = _skip(text, 1)
    try:
        while text[at] != "}":
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at] != ":" or not isinstance(key, str):
                return {}
            start = _skip(text, at + 1)
            _, end = _DECODER.raw_decode(text, start)
            fields[key] = text[start:end]
            at = _skip(text, end)
            if text[at] == ",":
                at = _skip(text, at + 1)
    except (ValueError, IndexError):
        return {}
    return fields


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
