"""Tool calls and thinking: parsed, streamed and whole the same, ids that lead back, history that continues."""

from __future__ import annotations

import json

import openai
import pytest

from swarmtune.testing import CHATML, LocalServer, chatml_model

CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 4,  "a": 3}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}s two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    for name in ("add", "multiply")
]
ASK = {"model": "m", "messages": [{"role": "user", "content": "what is 3 + 4?"}], "tools": TOOLS}


@pytest.fixture
async def local(model, tmp_path):
    script = {"answer": f"Let me see.\n{CALL}"}
    async with LocalServer(tmp_path / "data", model, script=lambda m, i: script["answer"]) as local:
        local.script = script
        await local.boot(**{"engine.script_tokens_per_s": 5000.0})  # a byte at a time
        yield local


@pytest.fixture
async def client(local):
    grant = await local.claim()
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key, max_retries=0) as client:
        client.episode_id = grant.episode_id
        yield client


async def gather(stream) -> tuple[str, str, list, str]:
    """Content, reasoning, calls and finish reason of a stream."""
    content, reasoning, calls, finish = "", "", [], ""
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        calls += [(c.function.name, c.function.arguments) for c in delta.tool_calls or []]
        finish = chunk.choices[0].finish_reason or finish
    return content, reasoning, calls, finish


async def test_a_tool_call_is_parsed_with_its_arguments_as_the_model_wrote_them(client):
    answer = (await client.chat.completions.create(**ASK)).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me see."
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"b": 4,  "a": 3}')
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    "text",
    [
        f"Let me see.\n{CALL}",
        CALL,
        f"{CALL}\n{CALL}",
        "no call at all",
        "a broken <tool_call>\n{not json}\n</tool_call> stays text",
        f"<think>3 and 4\nmake 7</think>\n\nLet me see. {CALL}",
        "<think>only thinking</think>\n\nseven",
        "stray </think> in the text",
        "an unfinished <tool_call>\n{",
    ],
)
async def test_streamed_and_whole_answers_with_tools_are_the_same(client, local, text):
    local.script["answer"] = text
    whole = (await client.chat.completions.create(**ASK)).choices[0]
    content, reasoning, calls, finish = await gather(await client.chat.completions.create(**ASK, stream=True))
    message = whole.message
    assert content == (message.content or "")
    assert reasoning == ((message.model_extra or {}).get("reasoning_content") or "")
    assert calls == [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    assert finish == whole.finish_reason


async def test_a_conversation_with_calls_continues_from_its_sampled_tokens_whatever_the_client_does_to_arguments(
    client, local
):
    first = await client.chat.completions.create(**ASK)
    message = first.choices[0].message.model_dump(exclude_none=True)
    arguments = message["tool_calls"][0]["function"]["arguments"]
    message["tool_calls"][0]["function"]["arguments"] = json.dumps(json.loads(arguments), separators=(",", ":"))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    local.script["answer"] = "It is 7."
    second = await client.chat.completions.create(**(ASK | {"messages": [*ASK["messages"], message, result]}))
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
    assert (await local.end(client.episode_id)).samples == 1
    assert local.server.merge_report(client.episode_id)["recognised"] == {"none": 1, "ids": 1}


async def test_tool_choice_none_offers_no_tools_and_a_named_function_only_that_one(client, local):
    none = await client.chat.completions.create(**ASK, tool_choice="none")
    assert none.choices[0].message.tool_calls is None and none.choices[0].finish_reason == "stop"
    everything = await client.chat.completions.create(**ASK)
    one = await client.chat.completions.create(**ASK, tool_choice={"type": "function", "function": {"name": "add"}})
    assert none.usage.prompt_tokens < one.usage.prompt_tokens < everything.usage.prompt_tokens


async def test_one_call_at_a_time_delivers_the_first(client, local):
    local.script["answer"] = f"{CALL}\n{CALL}"
    answer = await client.chat.completions.create(**ASK, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_thinking_that_the_prompt_opens_is_never_given_out_as_content(tmp_path):
    template = CHATML.replace(
        "<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    model = str(chatml_model(tmp_path / "thinker", template))
    text = "3 and 4 make 7</think>\n\nseven"
    async with LocalServer(tmp_path / "data", model, script=lambda m, i: text) as local:
        await local.boot(**{"engine.script_tokens_per_s": 2000.0})
        grant = await local.claim()
        async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as client:
            whole = (await client.chat.completions.create(**ASK)).choices[0].message
            assert (whole.content, whole.model_extra["reasoning_content"]) == ("seven", "3 and 4 make 7")
            content, reasoning, _, _ = await gather(await client.chat.completions.create(**ASK, stream=True))
            assert (content, reasoning) == ("seven", "3 and 4 make 7")
