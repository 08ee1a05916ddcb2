"""OpenAI Responses.

Item ids carry the turn's id (`msg_`, `rs_`, `fc_`, and `call_` for calls), so that items that come back are recognised.
`encrypted_content` of a reasoning item holds the thinking itself for clients that keep nothing else.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from swarmtune.gateway.dialect import (
    Answer,
    CallInfo,
    Delta,
    ModelCall,
    Quote,
    Refused,
    TokenLogprob,
    ToolChoice,
    item_not_found,
    malformed,
    unsupported,
)
from swarmtune.gateway.dialects.chat import turn_of_call
from swarmtune.gateway.fields import (
    arguments_text,
    boolean,
    integer,
    json_format,
    object_or_empty,
    retry_count,
    sampling_asked,
    string,
    text_content,
    text_or_none,
)
from swarmtune.gateway.openai_form import error_body
from swarmtune.types import FinishReason, Message, Role, ToolCall, ToolSpec

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNDERSTOOD = frozenset(
    "model input instructions tools tool_choice parallel_tool_calls temperature top_p top_k max_output_tokens stop "
    "stop_token_ids seed ignore_eos top_logprobs include stream previous_response_id store metadata text".split()
)
_KEPT_ELSEWHERE = ("background", "conversation", "prompt")
"""Fields that stand for state of the provider, without which the call means something else."""
_ITEM_ID = re.compile(r"(msg|rs|fc|ctc|resp)_([0-9a-f]{32})(?:_(\d{1,4}))?\Z")
_THOUGHT = re.compile(r"\s*<think>\s*(.*?)\s*</think>\s*", re.DOTALL)
"""Reasoning that a client sends back as a message of its own."""
_LOGPROBS = "message.output_text.logprobs"
_FREE_TEXT = "input"
"""The one argument of a custom (free text) tool, as the model sees it."""


class ResponsesDialect:
    name = "responses"

    def decode(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelCall:
        for name in _KEPT_ELSEWHERE:
            if body.get(name):
                raise unsupported(name, "nothing is kept here between calls but answers: previous_response_id")
        tools, custom, left_out = _tools(body.get("tools"))
        choice, tools = _tool_choice(body.get("tool_choice"), tools)
        conversation, unread = _items(body.get("input"))
        items = tuple(conversation.messages)
        instructions = body.get("instructions")
        leading = (Message("system", text_content(instructions, "instructions")),) if instructions else ()
        previous = body.get("previous_response_id")
        if not leading and not items and not previous:
            raise malformed("input", "must be a string or a list with at least one item")
        top_logprobs = integer(body, "top_logprobs", 0, 20) or 0
        include = body.get("include")
        wanted = object_or_empty(body.get("text")).get("format")
        return ModelCall(
            dialect=self.name,
            model=str(body.get("model") or ""),
            messages=leading + items,
            instructions=len(leading),
            continues=turn_of_response(string(previous, "previous_response_id")) if previous else None,
            quotes={len(leading) + at: quote for at, quote in conversation.quotes.items()},
            keep=boolean(body, "store", True),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=boolean(body, "parallel_tool_calls", True),
            format=json_format(wanted, wanted, "text.format"),
            sampling=sampling_asked(body, ("max_output_tokens",)),
            logprobs=top_logprobs > 0 or (isinstance(include, list) and _LOGPROBS in include),
            top_logprobs=top_logprobs,
            stream=boolean(body, "stream"),
            include_usage=True,
            ignored=tuple(sorted(body.keys() - _UNDERSTOOD)) + left_out + unread,
            retry_count=retry_count(headers),
            echo={
                "instructions": instructions,
                "max_output_tokens": body.get("max_output_tokens"),
                "metadata": body.get("metadata") or {},
                "parallel_tool_calls": boolean(body, "parallel_tool_calls", True),
                "previous_response_id": previous,
                "store": boolean(body, "store", True),
                "temperature": body.get("temperature"),
                "text": body.get("text") or {"format": {"type": "text"}},
                "tool_choice": body.get("tool_choice") or "auto",
                "tools": body.get("tools") or [],
                "top_p": body.get("top_p"),
                "custom_tools": custom,
            },
        )

    def whole(self, call: ModelCall, info: CallInfo, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        cut = answer.finish_reason is FinishReason.LENGTH
        return _envelope(call, info) | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(call, answer),
            "usage": _usage(answer),
        }

    def stream(self, call: ModelCall, info: CallInfo) -> ResponsesStream:
        return ResponsesStream(self, call, info)

    def error(self, refusal: Refused) -> dict[str, Any]:
        return error_body(refusal)


class ResponsesStream:
    """created, in_progress, then each item added, filled and done, then completed (or incomplete) with everything."""

    def __init__(self, dialect: ResponsesDialect, call: ModelCall, info: CallInfo) -> None:
        self._dialect = dialect
        self._call = call
        self._info = info
        self._sequence = -1
        self._items = 0
        self._calls = 0
        self._open: str | None = None
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._said_message = False

    def delta(self, choice: int, delta: Delta) -> bytes:
        events = self._begin()
        if delta.reasoning:
            events += self._enter("reasoning")
            self._text += delta.reasoning
            events += self._part("response.reasoning_text.delta", {"delta": delta.reasoning})
        if delta.content:
            events += self._enter("message")
            self._text += delta.content
            said = {"delta": delta.content, "logprobs": _logprobs(delta.logprobs) if self._call.logprobs else []}
            events += self._part("response.output_text.delta", said)
        self._logprobs.extend(delta.logprobs)
        for called in delta.calls:
            events += self._leave()
            events += self._call_events(_call_item(self._call, self._info.response_id, self._calls, called))
            self._calls += 1
        return events

    def finish(self, choice: int, answer: Answer) -> bytes:
        events = self._begin()
        if not self._said_message and not answer.message.tool_calls:
            events += self._enter("message")
        events += self._leave()
        return events

    def close(self, answers: Sequence[Answer]) -> bytes:
        response = self._dialect.whole(self._call, self._info, answers)
        return self._event(f"response.{response['status']}", {"response": response})

    def error(self, refusal: Refused) -> bytes:
        """Told twice: `error` is what the SDKs raise, with the fields where either of its known forms has them;
        `response.failed` is what Codex ends by."""
        said = {"code": refusal.code.value, "message": refusal.message}
        body = self._dialect.error(refusal)
        failed = _envelope(self._call, self._info) | {"status": "failed", "error": said}
        events = self._begin()
        events += self._event("error", said | {"param": refusal.param} | body)
        return events + self._event("response.failed", {"response": failed})

    def _begin(self) -> bytes:
        if self._sequence >= 0:
            return b""
        response = _envelope(self._call, self._info) | {"status": "in_progress"}
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def _enter(self, kind: str) -> bytes:
        """Open an item of `kind` with its one content part."""
        if self._open == kind:
            return b""
        events = self._leave()
        self._open = kind
        self._said_message |= kind == "message"
        part = _text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        events += self._event(
            "response.output_item.added", {"output_index": self._items, "item": self._item(kind, [], "in_progress")}
        )
        return events + self._part("response.content_part.added", {"part": part})

    def _leave(self) -> bytes:
        kind, text = self._open, self._text
        if kind is None:
            return b""
        if kind == "message":
            logprobs = _logprobs(self._logprobs) if self._call.logprobs else []
            part = _text_part(text, logprobs)
            events = self._part("response.output_text.done", {"text": text, "logprobs": logprobs})
        else:
            part = {"type": "reasoning_text", "text": text}
            events = self._part("response.reasoning_text.done", {"text": text})
        events += self._part("response.content_part.done", {"part": part})
        events += self._event(
            "response.output_item.done", {"output_index": self._items, "item": self._item(kind, [part], "completed")}
        )
        self._items += 1
        self._open, self._text = None, ""
        return events

    def _item(self, kind: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        turn_id = self._info.response_id
        if kind == "message":
            return _message_item(turn_id, content, status)
        return _reasoning_item(turn_id, content, status)

    def _call_events(self, item: dict[str, Any]) -> bytes:
        custom = item["type"] == "custom_tool_call"
        field, stem = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        where = {"item_id": item["id"], "output_index": self._items}
        started = item | {field: "", "status": "in_progress"}
        events = self._event("response.output_item.added", {"output_index": self._items, "item": started})
        events += self._event(f"response.{stem}.delta", where | {"delta": item[field]})
        done = {field: item[field]} | ({} if custom else {"name": item["name"]})
        events += self._event(f"response.{stem}.done", where | done)
        events += self._event("response.output_item.done", {"output_index": self._items, "item": item})
        self._items += 1
        return events

    def _part(self, name: str, payload: dict[str, Any]) -> bytes:
        kind = "msg" if self._open == "message" else "rs"
        where = {"item_id": f"{kind}_{self._info.response_id}", "output_index": self._items, "content_index": 0}
        return self._event(name, where | payload)

    def _event(self, name: str, payload: dict[str, Any]) -> bytes:
        self._sequence += 1
        return _line(name, {"type": name, "sequence_number": self._sequence, **payload})


def _line(name: str, payload: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def _envelope(call: ModelCall, info: CallInfo) -> dict[str, Any]:
    echo = {k: v for k, v in call.echo.items() if k != "custom_tools"}
    return echo | {
        "id": f"resp_{info.response_id}",
        "object": "response",
        "created_at": info.created,
        "model": info.model,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _output(call: ModelCall, answer: Answer) -> list[dict[str, Any]]:
    message, items = answer.message, []
    if message.reasoning is not None:
        items.append(
            _reasoning_item(answer.turn_id, [{"type": "reasoning_text", "text": message.reasoning}], "completed")
        )
    if message.content or not message.tool_calls:
        logprobs = _logprobs(answer.logprobs or ()) if call.logprobs else []
        items.append(_message_item(answer.turn_id, [_text_part(message.content, logprobs)], "completed"))
    items.extend(_call_item(call, answer.turn_id, at, called) for at, called in enumerate(message.tool_calls))
    return items


def _message_item(turn_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _reasoning_item(turn_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": f"rs_{turn_id}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }
    if status == "completed":
        item["encrypted_content"] = _seal(turn_id, "".join(part["text"] for part in content))
    return item


def _call_item(call: ModelCall, turn_id: str, at: int, called: ToolCall) -> dict[str, Any]:
    common = {"status": "completed", "call_id": called.id, "name": called.name}
    if called.name in call.echo.get("custom_tools", ()):
        return {
            "id": f"ctc_{turn_id}_{at}",
            "type": "custom_tool_call",
            "input": _free_text(called.arguments),
            **common,
        }
    return {"id": f"fc_{turn_id}_{at}", "type": "function_call", "arguments": called.arguments, **common}


def _free_text(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value[_FREE_TEXT] if isinstance(value, dict) and isinstance(value.get(_FREE_TEXT), str) else arguments


def _text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    def one(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [one(e.text, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]} for e in entries]


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def turn_of_response(identifier: str) -> str:
    """The turn that a response id stands for; an id of another server stands for none."""
    found = _ITEM_ID.match(identifier)
    return found[2] if found else identifier


def _seal(turn_id: str, reasoning: str) -> str:
    return base64.urlsafe_b64encode(orjson.dumps({"turn": turn_id, "reasoning": reasoning})).decode()


def _unseal(blob: Any) -> tuple[str | None, str | None]:
    """(turn id, reasoning) of a blob given out here; (None, None) for anything else."""
    try:
        value = orjson.loads(base64.urlsafe_b64decode(blob))
        return str(value["turn"]), str(value["reasoning"])
    except (binascii.Error, orjson.JSONDecodeError, TypeError, ValueError, KeyError):
        return None, None


class _Conversation:
    """Items in, messages out: what one turn said (reasoning, text, calls) becomes one assistant message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.quotes: dict[int, Quote] = {}
        """Position in `messages` → what belongs there besides."""
        self._turn: str | None = None
        self._reasoning: str | None = None
        self._text: str | None = None
        self._calls: list[ToolCall] = []
        self._quote: Quote | None = None

    def _belongs(self, turn: str | None) -> None:
        """Start a new assistant message when an item is known to be of another turn than the one being gathered."""
        if turn and self._turn and turn != self._turn:
            self.flush()
        self._turn = self._turn or turn

    def reasoning(self, turn: str | None, text: str | None) -> None:
        if self._text is not None or self._calls:
            self.flush()
        self._belongs(turn)
        if text is not None:
            self._reasoning = (self._reasoning or "") + text

    def text(self, turn: str | None, text: str) -> None:
        if self._calls or ((self._text is not None or self._quote is not None) and not turn):
            self.flush()
        self._belongs(turn)
        self._text = (self._text or "") + text

    def call(self, turn: str | None, call: ToolCall) -> None:
        self._belongs(turn)
        self._calls.append(call)

    def refer(self, identifier: str, name: str) -> None:
        """An item that is named by its id alone.

        Raises:
            Refused: not an id that was given out here.
        """
        found = _ITEM_ID.match(identifier)
        if found is None or found[1] == "resp":
            raise item_not_found(identifier, name)
        kind, turn, at = found.groups()
        if turn != self._turn:
            self.flush()
        self._turn = turn
        quote = self._quote or Quote(turn, identifier, name)
        self._quote = replace(
            quote,
            reasoning=quote.reasoning or kind == "rs",
            content=quote.content or kind == "msg",
            calls=quote.calls | {int(at or 0)} if kind in ("fc", "ctc") else quote.calls,
        )

    def add(self, message: Message) -> None:
        self.flush()
        self.messages.append(message)

    def flush(self) -> None:
        if self._quote is not None:
            self.quotes[len(self.messages)] = self._quote
        if self._text is not None or self._calls or self._reasoning is not None or self._quote is not None:
            calls = tuple(self._calls)
            self.messages.append(
                Message("assistant", self._text or "", tool_calls=calls, reasoning=self._reasoning, turn_id=self._turn)
            )
        self._turn, self._reasoning, self._text, self._calls, self._quote = None, None, None, [], None


def _items(value: Any) -> tuple[_Conversation, tuple[str, ...]]:
    """The conversation of an input, and the item types that were left out."""
    conversation = _Conversation()
    if isinstance(value, str):
        conversation.add(Message("user", value))
    elif value is not None and not isinstance(value, list):
        raise malformed("input", f"must be a string or a list of items, not {type(value).__name__}")
    left_out: list[str] = []
    for at, item in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(item, dict):
            raise malformed(f"input[{at}]", "must be an object")
        if not _read_item(conversation, item, f"input[{at}]"):
            left_out.append(f"input:{item.get('type')}")
    conversation.flush()
    return conversation, tuple(sorted(set(left_out)))


def _read_item(conversation: _Conversation, item: dict[str, Any], name: str) -> bool:
    """Add one item; False when its type means nothing to this model."""
    kind = item.get("type") or "message"
    found = _ITEM_ID.match(str(item.get("id") or ""))
    turn = found[2] if found else None
    if kind == "item_reference" or (kind == "message" and item.keys() == {"id"}):
        conversation.refer(str(item.get("id") or ""), name)
    elif kind == "message":
        _read_message(conversation, item, turn, name)
    elif kind in ("function_call", "custom_tool_call"):
        identifier = str(item.get("call_id") or "")
        arguments = arguments_text(item.get("arguments"))
        if kind == "custom_tool_call":
            arguments = orjson.dumps({_FREE_TEXT: str(item.get("input") or "")}).decode()
        called = ToolCall(identifier, string(item.get("name"), f"{name}.name"), arguments)
        conversation.call(turn_of_call(identifier) or turn, called)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = text_content(item.get("output"), f"{name}.output")
        conversation.add(Message("tool", output, tool_call_id=str(item.get("call_id") or "")))
    elif kind == "reasoning":
        sealed_turn, sealed = _unseal(item.get("encrypted_content"))
        content = item.get("content")
        parts = [p | {"type": "text"} for p in content if isinstance(p, dict)] if isinstance(content, list) else []
        shown = text_content(parts, f"{name}.content")
        conversation.reasoning(turn or sealed_turn, shown or sealed)
    else:
        return False
    return True


def _read_message(conversation: _Conversation, item: dict[str, Any], turn: str | None, name: str) -> None:
    role = _ROLES.get(text_or_none(item.get("role")) or "")
    if role is None:
        raise malformed(f"{name}.role", f"{item.get('role')!r} is not one of {', '.join(_ROLES)}")
    text = text_content(item.get("content"), f"{name}.content")
    if role == "assistant" and (thought := _THOUGHT.fullmatch(text)):
        conversation.reasoning(turn, thought[1])
    elif role == "assistant":
        conversation.text(turn, text)
    else:
        conversation.add(Message(role, text))


def _tools(value: Any) -> tuple[tuple[ToolSpec, ...], tuple[str, ...], tuple[str, ...]]:
    """Function and custom tools, the names of the custom ones, and the types that were left out."""
    if not value:
        return (), (), ()
    if not isinstance(value, list):
        raise malformed("tools", "must be a list")
    specs: list[ToolSpec] = []
    custom: list[str] = []
    left_out: list[str] = []
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise malformed(f"tools[{at}]", "must be an object")
        kind = item.get("type", "function")
        if kind not in ("function", "custom"):
            left_out.append(f"tools:{kind}")
            continue
        name = string(item.get("name"), f"tools[{at}].name")
        parameters = item.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise malformed(f"tools[{at}].parameters", "must be a JSON schema object")
        if kind == "custom":
            custom.append(name)
            parameters = {"type": "object", "properties": {_FREE_TEXT: {"type": "string"}}, "required": [_FREE_TEXT]}
        specs.append(ToolSpec(name, str(item.get("description") or ""), parameters, bool(item.get("strict"))))
    return tuple(specs), tuple(custom), tuple(sorted(set(left_out)))


def _tool_choice(value: Any, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    if value is None or value == "auto":
        return "auto", tools
    if value == "none":
        return "none", ()
    if value == "required":
        if not tools:
            raise malformed("tool_choice", "'required' needs tools")
        return "required", tools
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        listed = value.get("tools")
        names = [t.get("name") for t in listed if isinstance(t, dict)] if isinstance(listed, list) else []
        chosen = tuple(t for t in tools if t.name in names)
        return ("required" if value.get("mode") == "required" else "auto"), chosen
    if isinstance(value, dict) and value.get("type") in ("function", "custom"):
        chosen = tuple(t for t in tools if t.name == value.get("name"))
        if not chosen:
            raise malformed("tool_choice", f"names {value.get('name')!r}, which is not among the tools")
        return "required", chosen
    raise malformed("tool_choice", "must be none, auto, required or {type: function, name}")
