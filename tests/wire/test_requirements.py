"""What a gateway must do for real clients: one test or more per requirement, named by its number.

 1. Both auth headers everywhere, /v1/messages from both kinds of base URL, ?beta=true, plain 404 for probes.
 2. Unknown fields, betas, headers, tool types and model names are taken.
 3. Every form of content is read as one.
 4. Own turns are recognised by the ids that were given out, not by the text of arguments.
 5. Without an id, by loose comparison of text, and the report says so.
 6. Only sampled tokens are trained.
 7. A turn with and one without its reasoning are the same turn.
 8. Conversations beside the task are trees of their own, marked, and kept out of training.
 9. A retry gets the answer that was not delivered; a repeat after a whole delivery is a new sample.
10. What was delivered is recorded; a stream is never broken off in silence.
11. While weights change requests are held and kept alive; 503 says when to come back.
12. An episode that is over is 403 or 410 without retry; late calls are counted.
13. Streams to the letter (in full in test_event_grammar.py).
14. Limits are clamped; too long a prompt is refused in each API's words.
15. Sampling belongs to the episode; stop, tool choice, formats, previous_response_id and opaque blobs are honoured.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

USER = {"role": "user", "content": "what is 3 + 4?"}
ASK = {"model": "m", "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 4,  "a": 3}}\n</tool_call>'
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": ASK,
    "responses": {"model": "m", "input": "hi"},
    "messages": ASK | {"max_tokens": 50},
    "completions": {"model": "m", "prompt": "hi"},
}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"
BRIEF = {"role": "system", "content": "be brief"}


def claude_code(*later: Any, task: str = "Fix the bug.") -> dict[str, Any]:
    """A request as Claude Code sends it, with messages after the first ones."""
    cached = {"cache_control": {"type": "ephemeral"}}
    first = {"type": "text", "text": task} | ({} if later else cached)
    return {
        "model": "claude-opus-4-5-20251101",
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={len(task)};"},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI."} | cached,
            {"type": "text", "text": "You are an agent for software engineering."} | cached,
        ],
        "messages": [
            {"role": "user", "content": [first]},
            {"role": "system", "content": "<system-reminder>Skills: none.</system-reminder>"},
            *later,
        ],
        "tools": [
            {"name": "add", "description": "adds", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
    }


def codex(*later: Any) -> dict[str, Any]:
    """A request as Codex sends it."""

    def said(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    return {
        "model": "gpt-5-codex",
        "instructions": "",
        "input": [
            said("developer", "<permissions>ask</permissions>"),
            said("developer", "# AGENTS.md"),
            said("user", "Fix the bug."),
            *later,
        ],
        "tools": [
            {"type": "function", "name": "add", "description": "adds", "strict": False, "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "x"}},
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "client_metadata": {"x": "y"},
    }


def recognised(wire: Any) -> dict[str, int]:
    return wire.report["recognised"]


# 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_01_both_auth_headers_on_every_endpoint(wire, path, header):
    key = wire.grant.api_key
    wire.headers = {"Authorization": f"Bearer {key}"} if header == "authorization" else {"x-api-key": key}
    await wire.ask(f"/v1/{path}", BODIES[path])


@pytest.mark.parametrize("base", ["/v1", "/v1/v1", ""])
async def test_01_every_endpoint_from_both_kinds_of_base_url_and_with_beta(wire, base):
    for path, body in BODIES.items():
        await wire.ask(f"{base}/{path}?beta=true", body)
    counted = await wire.ask(f"{base}/messages/count_tokens?beta=true", ASK)
    assert counted == {"input_tokens": len("user\nwhat is 3 + 4?\nassistant\n") + 3}  # a token a byte, and three marks
    async with wire.local.http.get(f"{base}/models", headers=wire.headers) as response:
        assert response.status == 200


async def test_01_probes_get_a_plain_404(wire):
    for method, path in (("HEAD", "/"), ("GET", "/v1/messages"), ("POST", "/v1/nothing"), ("HEAD", "/v1/messages")):
        async with wire.local.http.request(method, path, headers=wire.headers) as response:
            assert response.status == 404 and response.content_type == "text/plain", (method, path)


# 2


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_02_what_is_not_known_is_ignored_and_noted(wire, path):
    unknown = {"service_tier": "auto", "brand_new": {"x": [1]}, "user": "me"}
    tools = [{"type": "computer_20991231", "name": "c"}, {"type": "mcp", "server_url": "x"}]
    body = BODIES[path] | unknown | {"tools": tools, "model": "no-such-model-of-ours"}
    await wire.ask(f"/v1/{path}", body, **{"anthropic-beta": "from-the-future", "x-odd": "1", "openai-beta": "y"})
    noted = {"service_tier", "brand_new", "user", "tools:computer_20991231", "tools:mcp"}
    assert noted <= set(wire.report["turns"][0]["ignored"])


async def test_02_claude_code_and_codex_bodies_are_taken_whole(wire):
    answer = await wire.ask("/v1/messages?beta=true", claude_code(), **{"anthropic-beta": BETAS})
    assert answer["model"] == "claude-opus-4-5-20251101" and answer["content"][0]["text"] == "All is well."
    assert "context_management" in wire.report["turns"][0]["ignored"]
    answer = await wire.ask("/v1/responses", codex(), **{"x-client-request-id": "thread", "session_id": "s"})
    assert answer["output"][0]["content"][0]["text"] == "All is well."
    assert {"tools:namespace", "tools:web_search"} <= set(wire.report["turns"][1]["ignored"])


@pytest.mark.parametrize("field", [{"background": True}, {"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}])
async def test_02_what_changes_the_meaning_is_refused_and_named(wire, field):
    status, answer, _ = await wire.post("/v1/responses", BODIES["responses"] | field)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", *field)
    await wire.ask("/v1/responses", BODIES["responses"] | dict.fromkeys(field))


@pytest.mark.parametrize("count", ["9" * 5000, "-1", "x", "²", ""])
async def test_02_odd_headers_do_no_harm(wire, count):
    await wire.ask("/v1/chat/completions", ASK, **{"x-stainless-retry-count": count.encode().decode("latin-1")})


# 3


async def test_03_every_form_of_content_is_read_as_one(wire):
    def part(text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    for empty in (None, "", [], "absent"):
        for form in (str, part):
            assistant = {"role": "assistant", "content": empty, "tool_calls": [call]}
            if empty == "absent":
                del assistant["content"]
            messages = [
                {"role": "developer", "content": form("s")},
                {"role": "user", "content": form("u"), "name": "me"},
                {"role": "user", "content": form("second in a row")},
                {"role": "system", "content": form("in between")},
                assistant,
                {"role": "tool", "tool_call_id": "c1", "content": form("7")},
            ]
            await wire.ask("/v1/chat/completions", {"model": "m", "messages": messages})
    assert len(set(wire.prompts)) == 1 and "in between" in wire.prompts[0]


async def test_03_every_form_of_content_in_messages_and_responses(wire):
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
    for result in ("7", [{"type": "text", "text": "7"}]):
        for error in ({}, {"is_error": False}):
            back = {"type": "tool_result", "tool_use_id": "toolu_1", "content": result} | error
            messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}]
            await wire.ask("/v1/messages", {"model": "m", "max_tokens": 9, "messages": messages, "system": "s"})
    for content in ("u", [{"type": "input_text", "text": "u"}], [{"type": "text", "text": "u"}]):
        for kind in ({}, {"type": "message"}):
            items = [{"role": "developer", "content": "s"}, {"role": "user", "content": content} | kind]
            await wire.ask("/v1/responses", {"input": items})
    assert len(set(wire.prompts[:4])) == 1 and len(set(wire.prompts[4:])) == 1


# 4


@pytest.mark.parametrize("thinking", ["<think>I add.</think>\n\n", ""])
async def test_04_claude_code_comes_back_with_reordered_arguments_and_is_recognised_by_ids(wire, thinking):
    wire.say(f"{thinking}Let me see. {CALL}", "It is 7.")
    first = await wire.ask("/v1/messages?beta=true", claude_code())
    *said, use = first["content"]
    assert [block["type"] for block in said] == ["thinking", "text"][not thinking :]
    echoed = [*said, use | {"input": dict(sorted(use["input"].items()))}]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "7", "is_error": False}
    later = [{"role": "assistant", "content": echoed}, {"role": "user", "content": [result]}]
    second = await wire.ask("/v1/messages?beta=true", claude_code(*later))
    assert second["content"][0]["text"] == "It is 7."
    assert recognised(wire) == {"none": 1, "ids": 1} and not wire.report["breaks"]
    assert (await wire.end()).samples == 1


async def test_04_codex_items_come_back_and_are_recognised_by_ids(wire):
    wire.say(f"<think>I add.</think>Let me see. {CALL}", "It is 7.")
    first = (await wire.ask("/v1/responses", codex()))["output"]
    reasoning, message, call = first
    reasoning = {k: v for k, v in reasoning.items() if k not in ("content", "status", "id")}
    message = {k: v for k, v in message.items() if k not in ("id", "status")}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    await wire.ask("/v1/responses", codex(reasoning, message, {k: v for k, v in call.items() if k != "id"}, output))
    assert recognised(wire) == {"none": 1, "ids": 1}
    assert (await wire.end()).samples == 1


@pytest.mark.parametrize("spelling", [{"separators": (",", ":")}, {}, {"sort_keys": True, "indent": 1}])
async def test_04_chat_clients_may_spell_arguments_anew(wire, spelling):
    wire.say(CALL, "It is 7.")
    first = (await wire.ask("/v1/chat/completions", ASK | {"tools": CHAT_TOOLS}))["choices"][0]["message"]
    function = first["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), **spelling)
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "7"}
    await wire.ask("/v1/chat/completions", {"messages": [USER, first, result], "tools": CHAT_TOOLS})
    assert recognised(wire) == {"none": 1, "ids": 1}


async def test_04_a_custom_tools_free_text_comes_back(wire):
    wire.say('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>', "Done.")
    call = (await wire.ask("/v1/responses", codex()))["output"][0]
    assert (call["type"], call["input"]) == ("custom_tool_call", "*** Begin")
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    await wire.ask("/v1/responses", codex(call, output))
    assert recognised(wire) == {"none": 1, "ids": 1} and (await wire.end()).samples == 1


# 5


@pytest.mark.parametrize(("back", "how"), [("  It is 7.\n", "text"), ("It is 7.", "loose")])
async def test_05_without_an_id_texts_are_compared_loosely(wire, back, how):
    wire.say("  It is 7.\n")
    await wire.ask("/v1/chat/completions", ASK)
    history = [USER, {"role": "assistant", "content": back}, {"role": "user", "content": "sure?"}]
    await wire.ask("/v1/chat/completions", {"messages": history})
    assert recognised(wire) == {"none": 1, how: 1}
    assert (await wire.end()).samples == 1


# 6


async def test_06_an_assistant_message_no_model_wrote_is_context(wire):
    """Qwen Code opens its conversations with one."""
    wire.say("Yes.")
    made_up = {"role": "assistant", "content": "Got it. Thanks for the context!"}
    await wire.ask("/v1/chat/completions", {"messages": [USER, made_up, {"role": "user", "content": "go"}]})
    result = await wire.end()
    assert result.sampled_tokens == len("Yes.") + 1 and recognised(wire) == {"none": 1}


async def test_06_crewais_appended_observation_is_context(wire):
    wire.say("Thought: add\nAction: add\nObservation: made up", "Final Answer: 7")
    body = {"messages": [USER], "stop": ["\nObservation:"]}
    first = (await wire.ask("/v1/chat/completions", body))["choices"][0]["message"]["content"]
    assert first == "Thought: add\nAction: add"
    appended = {"role": "assistant", "content": f"{first}\nObservation: 7"}
    await wire.ask("/v1/chat/completions", body | {"messages": [USER, appended]})
    assert recognised(wire) == {"none": 2} and (await wire.end()).samples == 2


async def test_06_smolagents_rewritten_calls_are_context(wire):
    wire.say(CALL, "It is 7.")
    first = (await wire.ask("/v1/chat/completions", ASK | {"tools": CHAT_TOOLS}))["choices"][0]["message"]
    rewritten = [
        {"role": "assistant", "content": f"Calling tools:\n{first['tool_calls']}"},
        {"role": "user", "content": "Observation:\n7"},
    ]
    await wire.ask("/v1/chat/completions", {"messages": [USER, *rewritten], "tools": CHAT_TOOLS})
    assert (await wire.end()).samples == 2 and recognised(wire) == {"none": 2}


# 7


@pytest.mark.parametrize("shown", [True, False])
async def test_07_a_turn_with_and_without_its_reasoning_is_the_same_turn(wire, shown):
    wire.say("<think>I add.</think>\n\nIt is 7.", "Yes.")
    message = (await wire.ask("/v1/chat/completions", ASK))["choices"][0]["message"]
    assert message["reasoning_content"] == "I add."
    back = message if shown else {"role": "assistant", "content": message["content"]}
    await wire.ask("/v1/chat/completions", {"messages": [USER, back, {"role": "user", "content": "sure?"}]})
    assert recognised(wire) == {"none": 1, "text" if shown else "loose": 1}
    assert (await wire.end()).sampled_tokens == len("<think>I add.</think>\n\nIt is 7.") + len("Yes.") + 2


async def test_07_reasoning_that_comes_back_as_an_assistants_text_is_reasoning(wire):
    """Pydantic AI, on /responses."""
    wire.say(f"<think>I add.</think>{CALL}", "It is 7.")
    reasoning, call = (await wire.ask("/v1/responses", codex()))["output"]
    text = f"<think>\n{reasoning['content'][0]['text']}\n</think>"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    await wire.ask("/v1/responses", codex({"role": "assistant", "content": text}, call, output))
    assert recognised(wire) == {"none": 1, "ids": 1} and (await wire.end()).samples == 1


# 8


async def test_08_claude_codes_title_request_beside_the_task_is_a_side_call(make_wire):
    wire = await make_wire(**{"engine.script_tokens_per_s": 200.0})
    wire.say("Working on the bug.")
    title = {
        "model": "claude-haiku",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "Write a short title."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "<session>Fix the bug.</session>"}]}],
        "output_config": {
            "format": {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}
        },
    }
    main = asyncio.create_task(wire.ask("/v1/messages?beta=true", claude_code()))
    await asyncio.gather(main, wire.ask("/v1/messages?beta=true", title))
    result = await wire.end()
    assert result.sampled_tokens == len("Working on the bug.") + 1
    assert wire.report["left_out"] == {"side": 1}


async def test_08_qwens_memory_agent_after_the_task_is_a_side_call(wire):
    history = [{"role": "system", "content": "You are Qwen Code."}, USER]
    await wire.ask("/v1/chat/completions", {"messages": history, "tools": CHAT_TOOLS})
    other = [{"role": "system", "content": "You extract memories."}, USER, {"role": "user", "content": "extract"}]
    tool = {"type": "function", "function": {"name": "save", "parameters": {}}}
    await wire.ask("/v1/chat/completions", {"messages": other, "tools": [tool]})
    assert (await wire.end()).samples == 1 and wire.report["left_out"] == {"side": 1}


# 9


async def test_09_claude_code_asks_again_without_stream_after_a_drop_and_the_dropped_answer_never_trains(make_wire):
    wire = await make_wire(**{"engine.script_tokens_per_s": 100.0})
    wire.say("The first answer.", "Second.")
    body = claude_code()
    async with aiohttp.ClientSession(wire.local.url) as session:
        stream = await session.post("/v1/messages", json=body | {"stream": True}, headers=wire.headers)
        await stream.content.readuntil(b"text_delta")
        stream.close()
    await wire.local.until(lambda: wire.local.backend.cancelled == 1)
    again = await wire.ask("/v1/messages", body | {"metadata": {}}, **{"x-stainless-retry-count": "0"})
    assert again["content"][0]["text"] == "Second."
    result = await wire.end()
    assert (result.samples, result.sampled_tokens) == (1, len("Second.") + 1)


async def test_09_an_answer_that_was_made_but_not_delivered_is_delivered_to_the_retry(wire, monkeypatch):
    wire.say("one", "two")
    real = aiohttp.web.Response.write_eof

    async def lost(response: Any, *args: Any) -> None:
        raise ConnectionResetError("the client is gone")

    monkeypatch.setattr(aiohttp.web.Response, "write_eof", lost)
    with pytest.raises(aiohttp.ClientError):
        await wire.ask("/v1/chat/completions", ASK)
    monkeypatch.setattr(aiohttp.web.Response, "write_eof", real)
    for body in (ASK | {"stream_options": {"include_usage": True}, "metadata": {"try": "2"}, "user": "x"},):
        chunks = [c for _, c in (await wire.events("/v1/chat/completions", body))[:-2]]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "one"
    answer = await wire.ask("/v1/chat/completions", ASK)
    assert answer["choices"][0]["message"]["content"] == "two"
    assert (await wire.end()).sampled_tokens == len("one") + len("two") + 2


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_09_a_marked_retry_gets_the_earlier_answer_with_its_ids(wire, path):
    wire.say("one", "two")
    first = await wire.ask(f"/v1/{path}", BODIES[path])
    again = await wire.ask(f"/v1/{path}", BODIES[path], **{"x-stainless-retry-count": "1"})
    assert again["id"] == first["id"] and (await wire.end()).sampled_tokens == len("one") + 1


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_09_the_same_conversation_after_a_whole_delivery_is_a_new_sample(wire, path):
    """Best of n; Qwen's second try with more tokens. Codex has the same request id on all of its requests."""
    wire.say("one", "two")
    first, second = [await wire.ask(f"/v1/{path}", BODIES[path], **{"x-client-request-id": "same"}) for _ in range(2)]
    assert first["id"] != second["id"]
    assert (await wire.end()).sampled_tokens == len("one") + len("two") + 2


# 10


async def test_10_what_was_cut_off_before_delivery_is_recorded_as_delivered(wire):
    wire.say("Thought\nObservation: never shown")
    message = (await wire.ask("/v1/chat/completions", ASK | {"stop": "\nObservation:"}))["choices"][0]["message"]
    history = [USER, message, {"role": "user", "content": "go on"}]
    await wire.ask("/v1/chat/completions", {"messages": history})
    assert message["content"] == "Thought" and recognised(wire) == {"none": 1, "text": 1}


async def test_10_an_episode_that_ends_during_a_stream_ends_it_with_an_error_event(make_wire):
    wire = await make_wire(**{"engine.script_tokens_per_s": 50.0})
    stream = asyncio.create_task(wire.events("/v1/chat/completions", ASK))
    await wire.local.until(lambda: wire.local.backend.in_flight == 1)
    await wire.local.server.abort(wire.grant.episode_id, "enough")
    _, data = (await stream)[-1]
    assert data["error"]["code"] == "episode_over"


# 11


@pytest.mark.parametrize("stream", [True, False])
async def test_11_calls_wait_while_weights_change_and_streams_are_kept_alive(make_wire, monkeypatch, stream):
    monkeypatch.setattr("swarmtune.gateway.sse.KEEP_ALIVE_S", 0.02)
    wire = await make_wire(**{"engine.script_update_s": 0.5, "evaluation.hold_sync_s": 0.0})
    other = await wire.local.claim("other", kind="evaluate")
    await wire.ask("/v1/chat/completions", ASK)
    await wire.end()
    await wire.local.run_episode(reward=0.0)
    await wire.local.until(lambda: wire.local.server.state == "weight_syncing")
    wire.headers = {"Authorization": f"Bearer {other.api_key}"}
    if stream:
        events = await wire.events("/v1/chat/completions", ASK)
        assert events[0][0] == ":" and events[-1] == (None, "[DONE]")
    else:
        await wire.ask("/v1/chat/completions", ASK)


async def test_11_a_503_says_when_to_come_back(make_wire):
    wire = await make_wire()
    await wire.local.server.stop()
    for path, body in BODIES.items():
        status, _, headers = await wire.post(f"/v1/{path}", body)
        assert status == 503 and int(headers["Retry-After"]) >= 1, path


# 12


@pytest.mark.parametrize("path", BODIES)
async def test_12_an_episode_that_is_over_is_410_without_retry_and_late_calls_are_counted(wire, path):
    await wire.ask(f"/v1/{path}", BODIES[path])
    await wire.end()
    for stream in (False, True):
        status, answer, headers = await wire.post(f"/v1/{path}", BODIES[path] | {"stream": stream})
        assert status == 410 and headers["x-should-retry"] == "false" and answer["error"]["code"] == "episode_over"
    assert wire.local.server.episode_view(wire.grant.episode_id).late_calls == 2


# 13


@pytest.mark.parametrize("asked", [True, False])
async def test_13_a_stream_has_usage_exactly_if_asked(wire, asked):
    body = ASK | ({"stream_options": {"include_usage": True}} if asked else {})
    events = await wire.events("/v1/chat/completions", body)
    used = [chunk for _, chunk in events[:-1] if chunk.get("usage")]
    assert len(used) == asked and (not used or used[0]["choices"] == [])


async def test_13_finish_reasons_and_stop_reasons_are_each_apis_own(wire):
    tools = ASK | {"tools": CHAT_TOOLS}
    named = [{"name": "add", "input_schema": SCHEMA}]
    for answer, more, chat, messages in (
        ("Yes.", {}, "stop", "end_turn"),
        (CALL, {}, "tool_calls", "tool_use"),
        ("a long one", {"max_tokens": 3}, "length", "max_tokens"),
        ("up to END", {"stop": ["END"], "stop_sequences": ["END"]}, "stop", "stop_sequence"),
    ):
        wire.say(answer)
        choice = (await wire.ask("/v1/chat/completions", tools | more))["choices"][0]
        assert choice["finish_reason"] == chat
        message = await wire.ask("/v1/messages", ASK | {"max_tokens": 90, "tools": named} | more)
        assert message["stop_reason"] == messages
        assert message["stop_sequence"] == ("END" if "stop" in more else None)


# 14


@pytest.mark.parametrize("limit", [32000, 64000])
async def test_14_limits_and_thinking_budgets_are_clamped(wire, limit):
    wire.say("x" * 2000)
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 32000}}
    message = await wire.ask("/v1/messages", ASK | thinking | {"max_tokens": limit})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 512)
    response = await wire.ask("/v1/responses", {"input": "hi", "max_output_tokens": limit})
    assert response["status"] == "incomplete"
    assert wire.report["turns"][0]["asked"]["max_tokens"] == limit


async def test_14_too_long_a_prompt_is_refused_in_each_apis_words_streamed_or_not(wire):
    long = "x" * 9000
    for stream in (True, False):
        status, answer, headers = await wire.post(
            "/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": long}], "stream": stream}
        )
        assert status == 400 and answer["type"] == "error" and headers["x-should-retry"] == "false"
        assert "prompt is too long: 90" in answer["error"]["message"] and "> 8192 maximum" in answer["error"]["message"]
        for path, body in (("responses", {"input": long}), ("completions", {"prompt": long})):
            status, answer, _ = await wire.post(f"/v1/{path}", body | {"stream": stream})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# 15


async def test_15_metagpts_temperature_0_is_used_unless_the_episode_pins_its_own(wire):
    await wire.ask("/v1/chat/completions", ASK | {"temperature": 0.0})
    assert wire.local.backend.requests[-1].sampling.temperature == 0.0
    await wire.claim(sampling={"temperature": 0.8, "pinned": True})
    await wire.ask("/v1/chat/completions", ASK | {"temperature": 0.0, "top_p": 0.1})
    assert wire.local.backend.requests[-1].sampling.temperature == 0.8
    assert wire.report["turns"][0]["asked"] == {"temperature": 0.0, "top_p": 0.1}


async def test_15_tool_choice_and_parallel_calls_are_honoured_in_every_dialect(wire):
    wire.say(f"{CALL}\n{CALL}")
    tools = [{"name": "add", "input_schema": SCHEMA}, {"name": "multiply", "input_schema": SCHEMA}]
    ask = ASK | {"max_tokens": 300, "tools": tools}
    one = await wire.ask("/v1/messages", ask | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert [block["type"] for block in one["content"]] == ["tool_use"]
    await wire.ask("/v1/messages", ask | {"tool_choice": {"type": "tool", "name": "multiply"}})
    assert '"multiply"' in wire.prompts[-1] and '"add"' not in wire.prompts[-1]
    await wire.ask("/v1/messages", ask | {"tool_choice": {"type": "none"}})
    assert '"multiply"' not in wire.prompts[-1]
    functions = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    two = await wire.ask("/v1/responses", {"input": "hi", "tools": functions, "tool_choice": "required"})
    assert [item["type"] for item in two["output"]] == ["function_call"] * 2
    one = await wire.ask("/v1/responses", {"input": "hi", "tools": functions, "parallel_tool_calls": False})
    assert len(one["output"]) == 1


async def test_15_opaque_blobs_of_others_are_taken(wire):
    """History of another server or model: its signatures and sealed reasoning mean nothing here, and do no harm."""
    foreign = [
        {"type": "redacted_thinking", "data": "EmwKAhgB"},
        {"type": "thinking", "thinking": "hm", "signature": "EqQBCgIYAhIM"},
        {"type": "text", "text": "Yes."},
    ]
    messages = [USER, {"role": "assistant", "content": foreign}, {"role": "user", "content": "go on"}]
    await wire.ask("/v1/messages", {"max_tokens": 9, "messages": messages})
    reasoning = {"type": "reasoning", "id": "rs_68", "summary": [], "encrypted_content": "gAAAAABo"}
    said = {
        "type": "message",
        "id": "msg_68",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Yes."}],
    }
    await wire.ask("/v1/responses", {"input": [USER, reasoning, said, {"role": "user", "content": "go on"}]})
    assert recognised(wire) == {"none": 2}
