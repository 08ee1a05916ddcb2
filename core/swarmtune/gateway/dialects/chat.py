"""OpenAI Chat Completions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swarmtune.gateway.dialect import (
    Answer,
    CallInfo,
    Delta,
    ModelCall,
    Refused,
    TokenLogprob,
    ToolChoice,
    malformed,
    unsupported,
)
from swarmtune.gateway.fields import (
    NEUTRAL,
    arguments_text,
    boolean,
    integer,
    json_format,
    object_or_empty,
    refuse_unhonoured,
    retry_count,
    sampling_asked,
    string,
    text_content,
    text_or_none,
)
from swarmtune.gateway.openai_form import DONE, error_body, event, usage
from swarmtune.types import FinishReason, Message, Role, ToolCall, ToolSpec

MAX_CHOICES = 128

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NEUTRAL = NEUTRAL | {"modalities": (["text"],)}
_UNDERSTOOD = frozenset(
    "model messages tools tool_choice parallel_tool_calls temperature top_p top_k max_tokens max_completion_tokens "
    "stop stop_token_ids seed ignore_eos n logprobs top_logprobs stream stream_options response_format "
    "continue_final_message add_generation_prompt".split()
) | frozenset(_NEUTRAL)
_CALL_ID = re.compile(r"call_([0-9a-f]{32})_\d+\Z")


def call_id(turn_id: str, index: int) -> str:
    """The id given out for a turn's tool call; it carries the turn's id back to us."""
    return f"call_{turn_id}_{index}"


def turn_of_call(identifier: str) -> str | None:
    found = _CALL_ID.match(identifier)
    return found[1] if found else None


class ChatDialect:
    name = "chat"

    def decode(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelCall:
        raw = body.get("messages")
        if not isinstance(raw, list) or not raw:
            raise malformed("messages", "must be a list with at least one message")
        refuse_unhonoured(body, _NEUTRAL)
        wanted = body.get("response_format")
        if body.get("functions"):
            raise unsupported("functions", "this older form is not served; send the functions as `tools`")
        tools, left_out = _tools(body.get("tools"))
        choice, tools = _tool_choice(body.get("tool_choice"), tools)
        top_logprobs = integer(body, "top_logprobs", 0, 20) or 0
        stream = boolean(body, "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise malformed("stream_options", "must be an object")
        return ModelCall(
            dialect=self.name,
            model=str(body.get("model") or ""),
            messages=tuple(_message(item, f"messages[{at}]") for at, item in enumerate(raw)),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=boolean(body, "parallel_tool_calls", True),
            format=json_format(wanted, object_or_empty(wanted).get("json_schema"), "response_format"),
            sampling=sampling_asked(body, ("max_completion_tokens", "max_tokens")),
            n=integer(body, "n", 1, MAX_CHOICES) or 1,
            logprobs=boolean(body, "logprobs") or top_logprobs > 0,
            top_logprobs=top_logprobs,
            stream=stream,
            include_usage=boolean(options, "include_usage"),
            ignored=tuple(sorted(body.keys() - _UNDERSTOOD)) + left_out,
            retry_count=retry_count(headers),
            prefill=_prefill(body, raw),
        )

    def whole(self, call: ModelCall, info: CallInfo, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{info.response_id}",
            "object": "chat.completion",
            "created": info.created,
            "model": info.model,
            "choices": [
                {
                    "index": index,
                    "message": _assistant(answer.message),
                    "logprobs": _logprobs(answer.logprobs) if call.logprobs else None,
                    "finish_reason": _finish(answer),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage(answers, call.n),
        }

    def stream(self, call: ModelCall, info: CallInfo) -> ChatStream:
        return ChatStream(call, info)

    def error(self, refusal: Refused) -> dict[str, Any]:
        return error_body(refusal)


class ChatStream:
    """Chunks: the role first, thinking and text, each tool call whole, the finish reason; usage if asked; [DONE]."""

    def __init__(self, call: ModelCall, info: CallInfo) -> None:
        self._call = call
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{info.response_id}",
            "object": "chat.completion.chunk",
            "created": info.created,
            "model": info.model,
        }
        self._opened: set[int] = set()
        self._calls: Counter[int] = Counter()
        """Tool calls told, by choice."""

    def delta(self, choice: int, delta: Delta) -> bytes:
        said: dict[str, Any] = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        events = b""
        if said or delta.logprobs:
            events = self._chunk(choice, said, logprobs=list(delta.logprobs))
        for call in delta.calls:
            events += self._chunk(choice, {"tool_calls": [{"index": self._calls[choice]} | _called(call)]})
            self._calls[choice] += 1
        return events

    def finish(self, choice: int, answer: Answer) -> bytes:
        return self._chunk(choice, {}, finish=_finish(answer))

    def close(self, answers: Sequence[Answer]) -> bytes:
        if not self._call.include_usage:
            return DONE
        return event(self._head | {"choices": [], "usage": usage(answers, self._call.n)}) + DONE

    def error(self, refusal: Refused) -> bytes:
        return event(error_body(refusal))

    def _chunk(
        self,
        choice: int,
        said: dict[str, Any],
        *,
        finish: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> bytes:
        opening = b""
        if choice not in self._opened:
            self._opened.add(choice)
            opening = self._chunk(choice, {"role": "assistant", "content": ""})
        payload: dict[str, Any] = self._head | {
            "choices": [
                {
                    "index": choice,
                    "delta": said,
                    "logprobs": _logprobs(logprobs) if self._call.logprobs and logprobs else None,
                    "finish_reason": finish,
                }
            ]
        }
        if self._call.include_usage:
            payload["usage"] = None
        return opening + event(payload)


def _prefill(body: Mapping[str, Any], messages: list[Any]) -> str | None:
    """The field that asks to go on with the last message, in the words of the servers that can."""
    if body.get("continue_final_message"):
        return "continue_final_message"
    if body.get("add_generation_prompt") is False:
        return "add_generation_prompt"
    return f"messages[{len(messages) - 1}].prefix" if object_or_empty(messages[-1]).get("prefix") is True else None


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, dict):
        raise malformed(name, "must be an object with role and content")
    role = _ROLES.get(text_or_none(item.get("role")) or "")
    if role is None:
        raise malformed(f"{name}.role", f"{item.get('role')!r} is not one of {', '.join(_ROLES)}")
    content = text_content(item.get("content"), f"{name}.content")
    if role != "assistant":
        identifier = text_or_none(item.get("tool_call_id")) if role == "tool" else None
        return Message(role, content, tool_call_id=identifier, name=text_or_none(item.get("name")))
    calls = _calls(item.get("tool_calls"), f"{name}.tool_calls")
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    return Message(
        role,
        content or text_content(item.get("refusal"), f"{name}.refusal"),
        tool_calls=calls,
        reasoning=text_or_none(reasoning),
        name=text_or_none(item.get("name")),
        turn_id=next((turn for c in calls if (turn := turn_of_call(c.id))), None),
    )


def _calls(value: Any, name: str) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if not isinstance(value, list):
        raise malformed(name, "must be a list")
    calls = []
    for at, item in enumerate(value):
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise malformed(f"{name}[{at}]", "must be {id, type: function, function: {name, arguments}}")
        calls.append(ToolCall(str(item.get("id") or ""), function["name"], arguments_text(function.get("arguments"))))
    return tuple(calls)


def _tools(value: Any) -> tuple[tuple[ToolSpec, ...], tuple[str, ...]]:
    """Function tools, and the types that were left out: the provider's own."""
    if not value:
        return (), ()
    if not isinstance(value, list):
        raise malformed("tools", "must be a list")
    specs: list[ToolSpec] = []
    left_out: set[str] = set()
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise malformed(f"tools[{at}]", "must be an object")
        kind = item.get("type", "function")
        if kind != "function":
            left_out.add(f"tools:{kind}")
            continue
        function = item.get("function")
        if not isinstance(function, dict):
            raise malformed(f"tools[{at}].function", "must be an object with a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise malformed(f"tools[{at}].function.parameters", "must be a JSON schema object")
        specs.append(
            ToolSpec(
                string(function.get("name"), f"tools[{at}].function.name"),
                str(function.get("description") or ""),
                parameters,
                bool(function.get("strict")),
            )
        )
    return tuple(specs), tuple(sorted(left_out))


def _tool_choice(value: Any, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    """The choice and the tools that are shown: none shows none, a named function shows that one."""
    if value is None or value == "auto":
        return "auto", tools
    if value == "none":
        return "none", ()
    if value in ("required", "any"):
        if not tools:
            raise malformed("tool_choice", "'required' needs tools")
        return "required", tools
    if isinstance(value, dict) and value.get("type") == "function":
        wanted = object_or_empty(value.get("function")).get("name")
        chosen = tuple(t for t in tools if t.name == wanted)
        if not chosen:
            raise malformed("tool_choice", f"names {wanted!r}, which is not among the tools")
        return "required", chosen
    raise malformed("tool_choice", "must be none, auto, required or {type: function, function: {name}}")


def _finish(answer: Answer) -> str:
    if answer.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def _assistant(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning is not None:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [_called(call) for call in message.tool_calls]
    return said


def _called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(entries: list[TokenLogprob] | None) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": entry.text,
                "logprob": entry.logprob,
                "bytes": list(entry.text.encode()),
                "top_logprobs": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode())} for text, logprob in entry.top
                ],
            }
            for entry in entries or ()
        ],
        "refusal": None,
    }
