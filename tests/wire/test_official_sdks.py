"""The official `openai` and `anthropic` clients, unmodified: sync, async, streamed, with tools and thinking."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 4,  "a": 3}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
QUESTION = {"role": "user", "content": "what is 3 + 4?"}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
MESSAGES_TOOL = {"name": "add", "input_schema": SCHEMA}


@pytest.fixture
def oai(wire):
    return openai.AsyncOpenAI(base_url=wire.grant.base_url, api_key=wire.grant.api_key, max_retries=0)


@pytest.fixture(params=["x-api-key", "bearer", "with /v1"])
def ant(wire, request):
    key = "auth_token" if request.param == "bearer" else "api_key"
    url = wire.grant.base_url if request.param == "with /v1" else wire.local.url
    return anthropic.AsyncAnthropic(base_url=url, max_retries=0, **{key: wire.grant.api_key})


def one_timeline(wire: Any, recognised: dict[str, int]) -> None:
    assert wire.report["recognised"] == recognised
    assert wire.report["breaks"] in ([], ()), wire.report["breaks"]


# openai: chat


async def test_chat_with_tools_streams_through_the_sdks_accumulator_and_goes_on(wire, oai):
    wire.say(f"<think>add them</think>Let me see. {CALL}", "It is 7.")
    async with oai.chat.completions.stream(model="m", messages=[QUESTION], tools=[CHAT_TOOL]) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content == "Let me see." and message.tool_calls[0].function.arguments == '{"b": 4,  "a": 3}'
    assert message.model_extra["reasoning_content"] == "add them"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    history = [QUESTION, message.model_dump(), result]
    answer = await oai.chat.completions.create(model="m", messages=history, tools=[CHAT_TOOL])
    assert answer.choices[0].message.content == "It is 7."
    one_timeline(wire, {"none": 1, "ids": 1})


def test_the_synchronous_clients(liberal, tmp_path):
    from swarmtune.testing import LocalServer

    def use(url: str, key: str) -> list[str]:
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key) as oai,
            anthropic.Anthropic(base_url=url, api_key=key) as ant,
        ):
            chat = oai.chat.completions.create(model="m", messages=[QUESTION], stream=True)
            said = ["".join(c.choices[0].delta.content or "" for c in chat)]
            said.append(oai.responses.create(model="m", input="hi").output_text)
            with oai.responses.stream(model="m", input="hi") as responses:
                said.append(responses.get_final_response().output_text)
            said.append(ant.messages.create(model="m", max_tokens=50, messages=[QUESTION]).content[0].text)
            with ant.messages.stream(model="m", max_tokens=50, messages=[QUESTION]) as messages:
                said.append(messages.get_final_text())
            return said

    async def serve() -> list[str]:
        async with LocalServer(tmp_path, liberal, script=lambda m, i: f"answer {i}") as local:
            await local.boot()
            grant = await local.claim()
            return await asyncio.to_thread(use, local.url, grant.api_key)

    assert asyncio.run(serve()) == [f"answer {n}" for n in range(5)]


# openai: responses


async def test_previous_response_id_goes_on_with_the_conversation_but_not_with_its_instructions(wire, oai):
    wire.say("one", "two", "three")
    first = await oai.responses.create(model="m", input="a", instructions="be brief", previous_response_id=None)
    second = await oai.responses.create(model="m", input="b", previous_response_id=first.id)
    third = await oai.responses.create(model="m", input="c", instructions="be long", previous_response_id=second.id)
    assert (third.output_text, third.previous_response_id) == ("three", second.id)
    assert "be brief" in wire.prompts[0] and "be brief" not in wire.prompts[1]
    said = [text for text in ("be long", "a", "one", "b", "two", "c") if text in wire.prompts[2]]
    assert said == ["be long", "a", "one", "b", "two", "c"] and "be brief" not in wire.prompts[2]


async def test_previous_response_id_continues_from_the_sampled_tokens_with_tools(wire, oai):
    wire.say(f"<think>add</think>{CALL}", "It is 7.", "Yes.")
    first = await oai.responses.create(model="m", input="3 + 4?", tools=[RESPONSES_TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    second = await oai.responses.create(
        model="m", input=[output], tools=[RESPONSES_TOOL], previous_response_id=first.id
    )
    await oai.responses.create(model="m", input="sure?", tools=[RESPONSES_TOOL], previous_response_id=second.id)
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    one_timeline(wire, {"none": 1, "ids": 2})


async def test_a_response_may_be_continued_twice(wire, oai):
    first = await oai.responses.create(model="m", input="a")
    for question in ("b", "c"):
        await oai.responses.create(model="m", input=question, previous_response_id=first.id)
    assert wire.prompts[1].replace("b<|", "c<|") == wire.prompts[2]


@pytest.mark.parametrize("unknown", ["resp_made_up", "resp_" + "0" * 32])
async def test_an_unknown_previous_response_is_the_apis_own_error(oai, unknown):
    with pytest.raises(openai.BadRequestError) as raised:
        await oai.responses.create(model="m", input="a", previous_response_id=unknown)
    assert raised.value.code == "previous_response_not_found"


async def test_a_response_that_is_not_stored_cannot_be_continued(oai):
    first = await oai.responses.create(model="m", input="a", store=False)
    with pytest.raises(openai.BadRequestError):
        await oai.responses.create(model="m", input="b", previous_response_id=first.id)


async def test_responses_without_a_store_are_recognised_by_their_items(wire, oai):
    wire.say(f"<think>add</think>Let me see.{CALL}", "It is 7.")
    ask: dict[str, Any] = {"model": "m", "tools": [RESPONSES_TOOL], "store": False}
    first = await oai.responses.create(**ask, input=[QUESTION], include=["reasoning.encrypted_content"])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    echoed = [item.model_dump(exclude_none=True) for item in first.output]
    for item in echoed:
        item.pop("content", None) if item["type"] == "reasoning" else None  # kept in encrypted_content alone
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "7"}
    second = await oai.responses.create(**ask, input=[QUESTION, *echoed, output])
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    one_timeline(wire, {"none": 1, "ids": 1})


async def test_the_sdks_responses_stream_has_every_event_and_the_final_response(wire, oai):
    wire.say(f"Let me see. {CALL}")
    async with oai.responses.stream(model="m", input="3 + 4?", tools=[RESPONSES_TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert final.output[-1].arguments == '{"b": 4,  "a": 3}'


async def test_a_response_that_is_cut_is_incomplete(wire, oai):
    wire.say("a very long answer")
    answer = await oai.responses.create(model="m", input="a", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


# anthropic


async def test_messages_with_tools_stream_through_the_sdks_accumulator_and_go_on(wire, ant):
    wire.say(f"<think>add them</think>Let me see. {CALL}", "It is 7.")
    ask: dict[str, Any] = {"model": "m", "max_tokens": 200, "tools": [MESSAGES_TOOL]}
    async with ant.messages.stream(**ask, messages=[QUESTION]) as stream:
        first = await stream.get_final_message()
    thinking, text, use = first.content
    assert (thinking.thinking, text.text, use.input) == ("add them", "Let me see.", {"b": 4, "a": 3})
    assert first.stop_reason == "tool_use" and thinking.signature
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "7"}]}
    history = [QUESTION, {"role": "assistant", "content": [b.model_dump() for b in first.content]}, result]
    second = await ant.messages.create(**ask, messages=history)
    assert second.content[0].text == "It is 7." and second.stop_reason == "end_turn"
    used = first.usage
    assert second.usage.cache_read_input_tokens == used.input_tokens + used.output_tokens
    one_timeline(wire, {"none": 1, "ids": 1})


async def test_beta_messages_reach_the_same_place(wire, ant):
    message = await ant.beta.messages.create(model="m", max_tokens=20, messages=[QUESTION], betas=["context-1m"])
    assert message.content[0].text == "All is well."


async def test_count_tokens_counts_the_prompt_and_records_nothing(wire, ant):
    ask: dict[str, Any] = {"model": "m", "system": "be brief", "messages": [QUESTION], "tools": [MESSAGES_TOOL]}
    counted = await ant.messages.count_tokens(**ask)
    message = await ant.messages.create(**ask, max_tokens=20)
    assert counted.input_tokens == message.usage.input_tokens
    assert wire.report["calls"] == 1


async def test_models_are_listed_in_both_styles(oai, ant):
    assert [model.id async for model in await ant.models.list()] == ["chatml"]
    model = await ant.models.retrieve("claude-opus")
    assert (model.id, model.type, model.display_name) == ("claude-opus", "model", "claude-opus")
    assert [model.id async for model in oai.models.list()] == ["chatml"]


async def test_too_long_a_prompt_is_each_apis_own_error(oai, ant):
    long = [{"role": "user", "content": "x" * 9000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 maximum") as raised:
        await ant.messages.create(model="m", max_tokens=20, messages=long)
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    for asked in (
        oai.chat.completions.create(model="m", messages=long),
        oai.responses.create(model="m", input="x" * 9000),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await asked
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("raises", ["chat", "responses", "messages"])
async def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_sdk(make_wire, raises):
    wire = await make_wire(**{"engine.script_tokens_per_s": 100.0})
    wire.say("an answer that is never heard to its end")
    key = wire.grant.api_key
    oai = openai.AsyncOpenAI(base_url=wire.grant.base_url, api_key=key, max_retries=0)
    ant = anthropic.AsyncAnthropic(base_url=wire.local.url, api_key=key, max_retries=0)
    stream = await {
        "chat": lambda: oai.chat.completions.create(model="m", messages=[QUESTION], stream=True),
        "responses": lambda: oai.responses.create(model="m", input="a", stream=True),
        "messages": lambda: ant.messages.create(model="m", max_tokens=90, messages=[QUESTION], stream=True),
    }[raises]()
    with pytest.raises((openai.APIError, anthropic.APIError), match="engine was lost"):
        async for number, _ in enumerated(stream):
            if number == 3:
                wire.local.backend.lose()


async def enumerated(stream: Any):
    number = 0
    async for event in stream:
        yield number, event
        number += 1


async def test_arguments_that_are_no_object_still_reach_messages_clients(wire, ant):
    wire.say('<tool_call>\n{"name": "add", "arguments": [3, 4]}\n</tool_call>')
    message = await ant.messages.create(model="m", max_tokens=99, messages=[QUESTION], tools=[MESSAGES_TOOL])
    assert json.loads(json.dumps(message.content[0].input)) == {"arguments": [3, 4]}
