"""What a call's format, forced tool or strict tools mean as a grammar that an engine can enforce.

Lark as `llguidance` reads it. Tool calls are constrained only for models that write them as
`<tool_call>{"name": …, "arguments": …}</tool_call>`; thinking before the answer stays free.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from swarmtune.gateway.dialect import ModelCall
from swarmtune.types import ToolSpec

PROBE = '<tool_call>\n{"name": "probe", "arguments": {}}\n</tool_call>'
"""A call in the one form that is constrained."""

_LENIENT = {"x-guidance": {"lenient": True}}
"""Keywords of tool schemas that cannot be enforced are left to the model."""


def grammar_of(call: ModelCall, *, in_reasoning: bool, tagged_calls: bool) -> str | None:
    """The grammar of a call's answers; None where nothing is asked for, or cannot be put as one.

    Args:
        in_reasoning: the prompt opened the thinking.
        tagged_calls: the model writes its calls in the form of `PROBE`.
    """
    tools = call.tools if tagged_calls else ()
    forms: list[str] = []
    if tools and (call.tool_choice == "required" or call.format is not None):
        forms.append('call ("\\n" call)*' if call.parallel_tool_calls else "call")
    if call.format is not None and call.tool_choice != "required":
        forms.append("%json " + _json(call.format.schema))
    if forms:
        thinking = _FREE_THINKING if in_reasoning else ""
        opening = "thinking /\\n*/ " if in_reasoning else ""
        return f"start: {opening}answer\nanswer: {' | '.join(forms)}\n{thinking}{_call_rules(tools)}"
    if any(tool.strict for tool in tools):
        return f"start: (opened call_body)* TEXT\n{_FREE_TEXT}{_call_rules(tools)}"
    return None


def unconstrained(call: ModelCall, grammar: str | None) -> tuple[str, ...]:
    """Fields of the request that ask for a constraint that the grammar does not have: left to the model's good will."""
    noted = []
    if call.format is not None and (grammar is None or call.tool_choice == "required"):
        noted.append(call.format.param)
    if call.tool_choice == "required" and grammar is None:
        noted.append("tool_choice")
    if any(tool.strict for tool in call.tools) and grammar is None:
        noted.append("tools.strict")
    return tuple(f"{name}: not constrained" for name in noted)


_FREE_THINKING = 'thinking[suffix="</think>"]: /(.|\\n)*/\n'
_FREE_TEXT = 'TEXT: /(.|\\n)*/\nopened[lazy]: TEXT "<tool_call>"\n'


def _call_rules(tools: Sequence[ToolSpec]) -> str:
    if not tools:
        return ""
    named = " | ".join(f"call_{at}" for at in range(len(tools)))
    rules = f'call: "<tool_call>" call_body\ncall_body: "\\n" ({named}) "\\n</tool_call>"\n'
    for at, tool in enumerate(tools):
        head = _json(f'{{"name": {_json(tool.name)}, "arguments": ')
        schema = {"type": "object"} | tool.parameters | ({} if tool.strict else _LENIENT)
        rules += f'call_{at}: {head} %json {_json(schema)} "}}"\n'
    return rules


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
