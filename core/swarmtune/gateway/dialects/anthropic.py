"""Anthropic Messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from swarmtune.gateway.dialect import (
    Answer,
    CallInfo,
    Delta,
    ModelCall,
    PromptTooLong,
    Refused,
    SamplingAsked,
    ToolChoice,
    malformed,
    unsupported,
)
from swarmtune.gateway.dialects.chat import turn_of_call
from swarmtune.gateway.fields import (
    boolean,
    integer,
    json_format,
    number,
    object_or_empty,
    retry_count,
    stop_strings,
    string,
)
from swarmtune.types import FinishReason, Message, ToolCall, ToolSpec

_UNDERSTOOD = frozenset(
    "model system messages tools tool_choice max_tokens temperature top_p top_k stop_sequences stream "
    "output_config output_format".split()
)
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_SIGNATURE = re.compile(r"turn_([0-9a-f]{32})\Z")
_UNTRAINED_BLOCKS = frozenset({"redacted_thinking", "server_tool_use", "web_search_tool_result", "fallback"})
"""Blocks only the provider can make or read; they are left out of the conversation."""


class AnthropicDialect:
    name = "anthropic"

    def decode(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelCall:
        raw = body.get("messages")
        if not isinstance(raw, list) or not raw:
            raise malformed("messages", "must be a list with at least one message")
        messages: list[Message] = []
        system = _text(body.get("system"), "system")
        if system:
            messages.append(Message("system", system))
        for at, item in enumerate(raw):
            messages.extend(_messages(item, f"messages[{at}]"))
        tools, left_out = _tools(body.get("tools"))
        wanted = object_or_empty(body.get("output_config")).get("format") or body.get("output_format")
        choice, tools = _tool_choice(body.get("tool_choice"), tools)
        return ModelCall(
            dialect=self.name,
            model=str(body.get("model") or ""),
            messages=tuple(messages),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=not object_or_empty(body.get("tool_choice")).get("disable_parallel_tool_use", False),
            format=json_format(wanted, wanted, "output_config.format"),
            sampling=SamplingAsked(
                temperature=number(body, "temperature", 0.0, 2.0),
                top_p=number(body, "top_p", 0.0, 1.0),
                top_k=integer(body, "top_k", -1),
                max_tokens=integer(body, "max_tokens", 1),
                stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
            ),
            stream=boolean(body, "stream"),
            include_usage=True,
            ignored=tuple(sorted(body.keys() - _UNDERSTOOD)) + tuple(f"tools:{kind}" for kind in left_out),
            retry_count=retry_count(headers),
            prefill=f"messages[{len(raw) - 1}]" if messages[-1].role == "assistant" else None,
        )

    def whole(self, call: ModelCall, info: CallInfo, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        return _envelope(info) | {
            "content": _content(answer),
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop_string,
            "usage": _usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens),
        }

    def stream(self, call: ModelCall, info: CallInfo) -> AnthropicStream:
        return AnthropicStream(self, info)

    def error(self, refusal: Refused) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        message = refusal.message
        if isinstance(refusal, PromptTooLong):
            message = f"prompt is too long: {refusal.prompt_tokens} tokens > {refusal.maximum} maximum"
        return {"type": "error", "error": {"type": kind, "message": message, "code": refusal.code.value}}


class AnthropicStream:
    """message_start, then blocks in order (thinking, text, tool calls), message_delta, message_stop."""

    def __init__(self, dialect: AnthropicDialect, info: CallInfo) -> None:
        self._dialect = dialect
        self._info = info
        self._index = -1
        self._open: str | None = None
        self._begun = False
        self._said_text = False

    def delta(self, choice: int, delta: Delta) -> bytes:
        events = self._begin()
        if delta.reasoning:
            events += self._switch("thinking") + self._block({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            events += self._switch("text") + self._block({"type": "text_delta", "text": delta.content})
        for call in delta.calls:
            events += self._switch("tool_use", {"id": call.id, "name": call.name, "input": {}})
            text = orjson.dumps(_input(call)).decode()
            events += self._block({"type": "input_json_delta", "partial_json": text})
        return events

    def finish(self, choice: int, answer: Answer) -> bytes:
        events = self._begin()
        if not answer.message.tool_calls and not self._said_text:
            events += self._switch("text")
        events += self._close_block()
        return events + _event(
            "message_delta",
            {
                "type": "message_delta",
                "delta": {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string},
                "usage": _usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens),
            },
        )

    def close(self, answers: Sequence[Answer]) -> bytes:
        return _event("message_stop", {"type": "message_stop"})

    def error(self, refusal: Refused) -> bytes:
        return _event("error", self._dialect.error(refusal))

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return _event("message_start", {"type": "message_start", "message": _envelope(self._info)})

    def _switch(self, kind: str, fields: dict[str, Any] | None = None) -> bytes:
        """Open a block of `kind`, closing another one; each call has a block of its own."""
        if self._open == kind and kind != "tool_use":
            return b""
        events = self._close_block()
        self._index += 1
        self._open = kind
        self._said_text |= kind == "text"
        empty = fields or ({"text": ""} if kind == "text" else {"thinking": "", "signature": ""})
        payload = {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **empty}}
        return events + _event("content_block_start", payload)

    def _block(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close_block(self) -> bytes:
        """Thinking gets its signature before it closes."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._block({"type": "signature_delta", "signature": _signature(self._info.response_id)})
        self._open = None
        return signed + _event("content_block_stop", {"type": "content_block_stop", "index": self._index})


def _event(name: str, payload: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def _envelope(info: CallInfo) -> dict[str, Any]:
    return {
        "id": f"msg_{info.response_id}",
        "type": "message",
        "role": "assistant",
        "model": info.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(info.prompt_tokens, info.cached_tokens, 0),
    }


def _content(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        signature = _signature(answer.turn_id)
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)})
    return blocks


def _input(call: ToolCall) -> dict[str, Any]:
    """The arguments as the object this API knows; what is no object is kept under `arguments`."""
    try:
        value = orjson.loads(call.arguments or "{}")
    except orjson.JSONDecodeError:
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _signature(turn_id: str) -> str:
    """Thinking comes back with its signature unchanged: it carries the turn's id."""
    return f"turn_{turn_id}"


def _stop_reason(answer: Answer) -> str:
    if answer.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if answer.message.tool_calls:
        return "tool_use"
    return "stop_sequence" if answer.stop_string else "end_turn"


def _usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """`input_tokens` are those that no cache had."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _text(value: Any, name: str) -> str:
    """A string, null, or a list of text blocks, one paragraph each."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise malformed(name, f"must be a string or a list of blocks, not {type(value).__name__}")
    return "\n".join(_block_text(block, f"{name}[{at}]") for at, block in enumerate(value))


def _block_text(block: Any, name: str) -> str:
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        raise malformed(name, "must be an object with a type")
    kind = block.get("type", "text")
    if kind == "text":
        return string(block.get("text", ""), f"{name}.text")
    if kind in ("tool_reference", "search_result"):
        return orjson.dumps(block).decode()
    raise unsupported(name, f"blocks of type {kind!r} cannot be shown to this model, which reads text only")


def _messages(item: Any, name: str) -> list[Message]:
    if not isinstance(item, dict):
        raise malformed(name, "must be an object with role and content")
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        return [_assistant(content, f"{name}.content")]
    if role in ("system", "developer"):
        return [Message("system", _text(content, f"{name}.content"))]
    if role == "user":
        return _user(content, f"{name}.content")
    raise malformed(f"{name}.role", f"{role!r} is not one of user, assistant, system")


def _user(content: Any, name: str) -> list[Message]:
    """Tool results become tool messages; the text around them becomes user messages, in the order given."""
    if not isinstance(content, list):
        return [Message("user", _text(content, name))]
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append(Message("user", "\n".join(texts)))
            texts.clear()

    for at, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            flush()
            result = _text(block.get("content"), f"{name}[{at}].content")
            messages.append(Message("tool", result, tool_call_id=str(block.get("tool_use_id") or "")))
        else:
            texts.append(_block_text(block, f"{name}[{at}]"))
    flush()
    return messages or [Message("user", "")]


def _assistant(content: Any, name: str) -> Message:
    if not isinstance(content, list):
        return Message("assistant", _text(content, name))
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    turn_id: str | None = None
    for at, block in enumerate(content):
        kind = str(block.get("type", "text")) if isinstance(block, dict) else "text"
        if kind == "thinking":
            reasoning.append(string(block.get("thinking", ""), f"{name}[{at}].thinking"))
            signed = _SIGNATURE.match(str(block.get("signature") or ""))
            turn_id = turn_id or (signed[1] if signed else None)
        elif kind == "tool_use":
            identifier = str(block.get("id") or "")
            arguments = orjson.dumps(block.get("input") or {}).decode()
            calls.append(ToolCall(identifier, string(block.get("name"), f"{name}[{at}].name"), arguments))
            turn_id = turn_id or turn_of_call(identifier)
        elif kind not in _UNTRAINED_BLOCKS:
            texts.append(_block_text(block, f"{name}[{at}]"))
    return Message(
        "assistant",
        "\n".join(texts),
        tool_calls=tuple(calls),
        reasoning="\n".join(reasoning) if reasoning else None,
        turn_id=turn_id,
    )


def _tools(value: Any) -> tuple[tuple[ToolSpec, ...], list[str]]:
    """Client tools, and the types of the provider's own, which are left out."""
    if not value:
        return (), []
    if not isinstance(value, list):
        raise malformed("tools", "must be a list")
    specs: list[ToolSpec] = []
    left_out: list[str] = []
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise malformed(f"tools[{at}]", "must be an object")
        schema = item.get("input_schema")
        if not isinstance(schema, dict):
            left_out.append(str(item.get("type") or "unknown"))
            continue
        name = string(item.get("name"), f"tools[{at}].name")
        specs.append(ToolSpec(name, str(item.get("description") or ""), schema, bool(item.get("strict"))))
    return tuple(specs), left_out


def _tool_choice(value: Any, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    kind = object_or_empty(value).get("type", value)
    if kind is None or kind == "auto":
        return "auto", tools
    if kind == "none":
        return "none", ()
    if kind == "any":
        if not tools:
            raise malformed("tool_choice", "'any' needs tools")
        return "required", tools
    if kind == "tool":
        name = object_or_empty(value).get("name")
        chosen = tuple(t for t in tools if t.name == name)
        if not chosen:
            raise malformed("tool_choice", f"names {name!r}, which is not among the tools")
        return "required", chosen
    raise malformed("tool_choice", "must be {type: auto | any | none} or {type: tool, name}")
