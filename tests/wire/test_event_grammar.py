"""Every dialect's stream to the letter of its grammar, and equal to its unstreamed answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from swarmtune.backend import RequestRefused

CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 4, "a": 3}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ASK = {"messages": [{"role": "user", "content": "what is 3 + 4?"}], "model": "m"}
CHAT = ASK | {"tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]}
RESPONSES = {
    "input": "what is 3 + 4?",
    "model": "m",
    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
}
MESSAGES = ASK | {"max_tokens": 300, "tools": [{"name": "add", "input_schema": SCHEMA}]}
ANSWERS = [
    "plain text",
    "",
    "  blanks around \n",
    f"Let me see.\n{CALL}",
    CALL,
    f"{CALL}\n{CALL}",
    f"One {CALL} two {CALL} three",
    f"<think>\n3 and 4\nmake 7\n</think>\n\nLet me see. {CALL}",
    "<think>only thinking</think>",
    "<think>unfinished thinking",
    " <think> </think>\n\nseven",
    "stray </think> in the text",
    "a broken <tool_call>\n{not json}\n</tool_call> stays text",
    f"a broken <tool_call>{{}}</tool_call> and a good {CALL}",
    "an unfinished <tool_call>\n{",
    "half a <tag, <|marker|>, [TOOL and ünïcödé ✓ 日本",
]


def said_by_chat(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """A chat stream's message, gathered as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for _, chunk in events[:-1]:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        message["tool_calls"] += [
            (c["function"]["name"], c["function"]["arguments"]) for c in delta.get("tool_calls", ())
        ]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


@pytest.mark.parametrize("model", ["liberal", "thinker"])
async def test_a_chat_stream_says_what_the_whole_answer_says(make_wire, model, request):
    wire = await make_wire(request.getfixturevalue(model))
    for text in ANSWERS:
        wire.say(text)
        choice = (await wire.ask("/v1/chat/completions", CHAT))["choices"][0]
        events = await wire.events("/v1/chat/completions", CHAT)
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        assert said_by_chat(events) == {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content") or "",
            "tool_calls": calls,
            "finish_reason": choice["finish_reason"],
        }, text
        assert events[-1] == (None, "[DONE]")
        chunks = [chunk for _, chunk in events[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len({c["id"] for c in chunks}) == 1 and not any("usage" in c for c in chunks)
        indexes = [c["index"] for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert indexes == list(range(len(calls)))


@pytest.mark.parametrize("model", ["liberal", "thinker"])
async def test_a_messages_stream_says_what_the_whole_answer_says(make_wire, model, request):
    wire = await make_wire(request.getfixturevalue(model))
    for text in ANSWERS:
        wire.say(text)
        whole = await wire.ask("/v1/messages", MESSAGES)
        streamed = gather_messages(await wire.events("/v1/messages", MESSAGES))
        for blocks in (whole["content"], streamed["content"]):
            for block in blocks:
                block.pop("id", None), block.pop("signature", None)
        for name in ("content", "stop_reason", "stop_sequence", "role", "type", "model"):
            assert streamed[name] == whole[name], text
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def gather_messages(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """An accumulated message; each event must be allowed where it stands."""
    assert all(name == data["type"] for name, data in events)
    assert events[0][0] == "message_start" and [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    message, open_block = events[0][1]["message"], None
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] >= 0
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert open_block is None and data["index"] == len(message["content"])
            open_block = {"partial": ""} | data["content_block"]
            message["content"].append(open_block)
        elif name == "content_block_delta":
            assert open_block is message["content"][data["index"]]
            delta = data["delta"]
            match delta["type"]:
                case "text_delta":
                    open_block["text"] += delta["text"]
                case "thinking_delta":
                    open_block["thinking"] += delta["thinking"]
                case "signature_delta":
                    open_block["signature"] = delta["signature"]
                case "input_json_delta":
                    open_block["partial"] += delta["partial_json"]
        else:
            assert name == "content_block_stop" and open_block is not None
            partial = open_block.pop("partial")
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(partial)
            open_block = None
    assert open_block is None
    end = events[-2][1]
    return message | end["delta"] | {"usage": message["usage"] | end["usage"]}


@pytest.mark.parametrize("model", ["liberal", "thinker"])
async def test_a_responses_stream_says_what_the_whole_answer_says(make_wire, model, request):
    wire = await make_wire(request.getfixturevalue(model))
    for text in ANSWERS:
        wire.say(text)
        whole = await wire.ask("/v1/responses", RESPONSES)
        events = await wire.events("/v1/responses", RESPONSES)
        final = events[-1][1]["response"]
        assert events[-1][0] == "response.completed"
        assert [without_ids(i) for i in final["output"]] == [without_ids(i) for i in whole["output"]], text
        assert gather_items(events) == final["output"], text
        assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
        assert all(name == data["type"] for name, data in events)


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k not in ("id", "call_id", "encrypted_content")}


def gather_items(events: list[tuple[str | None, Any]]) -> list[Any]:
    """Items as their `done` events have them; deltas and `done` texts must agree."""
    items: list[Any] = []
    texts: dict[tuple[int, str], str] = {}
    for name, data in events:
        at = data.get("output_index")
        if name == "response.output_item.added":
            assert at == len(items)
            items.append(None)
        elif name.endswith(".delta"):
            key = (at, name.removesuffix(".delta"))
            texts[key] = texts.get(key, "") + data["delta"]
        elif name.endswith(("text.done", "arguments.done", "input.done")):
            said = data.get("text", data.get("arguments", data.get("input")))
            assert texts.get((at, name.removesuffix(".done")), "") == said
        elif name == "response.output_item.done":
            items[at] = data["item"]
    return items


async def test_a_completions_stream_says_what_the_whole_answer_says(wire):
    for text in (*ANSWERS, "up to END of it"):
        wire.say(text)
        body = {"model": "m", "prompt": "3 + 4 =", "max_tokens": 300, "stop": ["END"]}
        whole = (await wire.ask("/v1/completions", body))["choices"][0]
        events = await wire.events("/v1/completions", body)
        assert events[-1] == (None, "[DONE]")
        chunks = [chunk["choices"][0] for _, chunk in events[:-1]]
        assert "".join(c["text"] for c in chunks) == whole["text"], text
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [whole["finish_reason"]]


async def test_thinking_is_streamed_before_it_ends(make_wire, thinker):
    wire = await make_wire(thinker)
    wire.say("3 and 4 make 7</think>\n\nseven")
    kinds = [d["delta"]["type"] for n, d in await wire.events("/v1/messages", MESSAGES) if n == "content_block_delta"]
    assert kinds.count("thinking_delta") > 3 and kinds.count("signature_delta") == 1 and kinds[-1] == "text_delta"


async def test_a_call_is_streamed_before_the_answer_ends(wire):
    wire.say(f"{CALL}{CALL} and a long, long farewell")
    await wire.local.server.stop()
    await wire.local.boot(**{"engine.script_tokens_per_s": 300.0})
    await wire.claim()
    sampled_when_told = []
    async with wire.local.http.post(
        "/v1/chat/completions", json=CHAT | {"stream": True}, headers=wire.headers
    ) as response:
        async for line in response.content:
            if b'"tool_calls":[' in line:
                sampled_when_told.append(wire.local.backend.in_flight)
    assert sampled_when_told == [1, 1]


async def test_several_choices_with_logprobs_are_streamed_as_they_are_whole(wire):
    wire.say("one two")
    body = ASK | {"n": 3, "logprobs": True, "top_logprobs": 2, "seed": 1}
    whole = await wire.ask("/v1/chat/completions", body)
    events = await wire.events("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-2][1]["choices"] == []
    assert events[-2][1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 3 * 8
    for at, choice in enumerate(whole["choices"]):
        chunks = [c["choices"][0] for _, c in events[:-2] if c["choices"][0]["index"] == at]
        entries = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"] and len(entries) == 8
        assert "".join(c["delta"].get("content") or "" for c in chunks) == choice["message"]["content"] == "one two"


async def test_responses_logprobs_are_streamed_as_they_are_whole(wire):
    wire.say("<think>hm</think>one two")
    body = RESPONSES | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = (await wire.ask("/v1/responses", body))["output"][-1]["content"][0]
    events = await wire.events("/v1/responses", body)
    assert gather_items(events)[-1]["content"][0]["logprobs"] == whole["logprobs"] and whole["logprobs"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/v1/completions", {"prompt": "p", "model": "m"}),
    ],
)
async def test_silence_is_filled_with_comments_before_the_first_event(make_wire, monkeypatch, path, body):
    monkeypatch.setattr("swarmtune.gateway.sse.KEEP_ALIVE_S", 0.02)
    wire = await make_wire(**{"engine.script_tokens_per_s": 5.0})
    wire.say("a")
    events = await wire.events(path, body)
    assert [name for name, _ in events[:3]] == [":", ":", ":"]


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", CHAT, None),
        ("/v1/completions", {"prompt": "p", "model": "m"}, None),
        ("/v1/responses", RESPONSES, "response.failed"),
        ("/v1/messages", MESSAGES, "error"),
    ],
)
async def test_a_stream_that_fails_ends_with_the_dialects_error_event(make_wire, path, body, last):
    wire = await make_wire(**{"engine.script_tokens_per_s": 100.0})
    wire.say("a long answer that is never heard to its end")
    asked = asyncio.create_task(wire.events(path, body | {"max_tokens": 500}))
    await wire.local.until(lambda: wire.local.backend.in_flight == 1)
    await asyncio.sleep(0.05)
    wire.local.backend.lose()
    events = await asked
    name, data = events[-1]
    assert name == last and (None, "[DONE]") not in events
    if path == "/v1/responses":
        assert data["response"]["status"] == "failed" and data["response"]["error"]["code"] == "engine_lost"
        assert [d["sequence_number"] for _, d in events] == list(range(len(events)))
        assert events[-2][0] == "error" and events[-2][1]["error"]["code"] == "engine_lost"
    elif path == "/v1/messages":
        assert data["type"] == "error" and data["error"]["type"] == "overloaded_error"
    else:
        assert data["error"]["code"] == "engine_lost"
    assert wire.report["calls"] == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_what_is_refused_before_anything_was_told_is_a_status_not_an_event(wire, monkeypatch, path):
    """The SDKs raise for a status what they raise without a stream; an error event they cannot tell apart."""

    def refuse(request: Any) -> Any:
        raise RequestRefused("the schema cannot be enforced: unknown type 'strnig'")

    monkeypatch.setattr(wire.local.backend, "generate", refuse)
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}], "input": "q"}
    body |= {"prompt": "q"} if path == "/v1/completions" else {}
    status, answer, headers = await wire.post(path, body | {"stream": True})
    assert (status, answer["error"]["code"], headers["x-should-retry"]) == (400, "bad_request", "false")
    assert "strnig" in answer["error"]["message"]
    monkeypatch.undo()
    assert (await wire.events(path, body))[-1][0] != "error"
