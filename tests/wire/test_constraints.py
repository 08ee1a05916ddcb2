"""JSON formats, forced tools and strict tools: the grammar they become, and what is said where none can be enforced."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarmtune.backend import BackendInfo
from swarmtune.gateway.dialect import JsonFormat, ModelCall
from swarmtune.gateway.grammar import grammar_of
from swarmtune.types import ToolSpec

SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
ADD, MULTIPLY = ToolSpec("add", "", SCHEMA), ToolSpec("multiply", "", {})
STRICT = ToolSpec("add", "", SCHEMA, strict=True)
JSON = JsonFormat(SCHEMA, strict=True, param="response_format")


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, WRONG = called("add", '{"a": 3}'), called("add", '{"b": 3}')
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CASES: list[tuple[str, dict[str, Any], bool, list[str], list[str]]] = [
    ("a schema", {"format": JSON}, False, ['{"a": 3}', '{\n "a":3 }'], ['{"b": 3}', "{}", "so", 'so {"a": 3}']),
    ("thinking before it", {"format": JSON}, True, ['I think\nso</think>\n\n{"a": 3}'], ["I think</think> so"]),
    ("JSON mode", {"format": JsonFormat({"type": "object"}, False, "f")}, False, ['{"x": [1, {}]}'], ["[]", "x"]),
    (
        "a forced tool",
        {"tools": (ADD, MULTIPLY), "tool_choice": "required"},
        False,
        [GOOD, f"{GOOD}\n{called('multiply', '{}')}"],
        [WRONG, "so", f"so {GOOD}", called("divide", "{}")],
    ),
    (
        "one forced call",
        {"tools": (ADD,), "tool_choice": "required", "parallel_tool_calls": False},
        False,
        [GOOD],
        [f"{GOOD}\n{GOOD}"],
    ),
    ("strict tools", {"tools": (STRICT,)}, False, ["so", f"so {GOOD}", f"{GOOD}\n{GOOD} so"], [f"so {WRONG}"]),
    ("strict tools after thinking", {"tools": (STRICT,)}, True, [f"so</think>\n{GOOD}"], [f"so</think>{WRONG}"]),
    ("a schema or tools", {"format": JSON, "tools": (ADD,)}, False, ['{"a": 3}', GOOD], [WRONG, "so"]),
]


@pytest.mark.parametrize(("asked", "in_reasoning", "good", "bad"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_grammar_takes_what_is_asked_for_and_nothing_else(liberal: str, asked, in_reasoning, good, bad):
    llguidance = pytest.importorskip("llguidance")
    from tokenizers import Tokenizer

    file = str(Path(liberal) / "tokenizer.json")
    tokens = llguidance.LLTokenizer(file, eos_token=[257])
    grammar = grammar_of(ModelCall("chat", "m", **asked), in_reasoning=in_reasoning, tagged_calls=True)

    def takes(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokens, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = Tokenizer.from_file(file).encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert [text for text in good if not takes(text)] == []
    assert [text for text in bad if takes(text)] == []


def test_nothing_is_constrained_unless_asked_for():
    for call in (ModelCall("chat", "m"), ModelCall("chat", "m", tools=(ADD,))):
        assert grammar_of(call, in_reasoning=False, tagged_calls=True) is None
    forced = ModelCall("chat", "m", tools=(STRICT,), tool_choice="required")
    assert grammar_of(forced, in_reasoning=False, tagged_calls=False) is None


FORMATS = {
    "/v1/chat/completions": ASK
    | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
    "/v1/responses": {
        "model": "m",
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}},
    },
    "/v1/messages": ASK | {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("path", FORMATS)
async def test_an_engine_that_can_gets_the_grammar(make_wire, monkeypatch, path):
    monkeypatch.setattr("swarmtune.engines.scripted.BackendInfo", partial(BackendInfo, constrains=True))
    wire = await make_wire()
    await wire.ask(path, FORMATS[path])
    assert "%json" in wire.local.backend.requests[-1].sampling.grammar
    assert wire.report["turns"][0]["ignored"] == ()


@pytest.mark.parametrize("path", FORMATS)
async def test_where_none_can_be_enforced_strict_is_refused_and_the_rest_is_left_to_the_model_and_noted(wire, path):
    status, answer, _ = await wire.post(path, FORMATS[path])
    if path == "/v1/messages":  # has no strict: Claude Code asks for its title so
        assert status == 200 and "output_config.format: not constrained" in wire.report["turns"][0]["ignored"]
    else:
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert "format" in answer["error"]["param"]


async def test_forced_and_strict_tools_are_answered_and_noted_where_they_cannot_be_enforced(wire):
    function = {"name": "add", "parameters": SCHEMA, "strict": True}
    body = ASK | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    await wire.ask("/v1/chat/completions", body)
    assert wire.report["turns"][0]["ignored"] == ("tool_choice: not constrained", "tools.strict: not constrained")
