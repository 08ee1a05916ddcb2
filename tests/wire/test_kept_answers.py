"""What a client of Responses may name by id alone: items (Vercel's AI SDK does, in every loop with tools), answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from swarmtune.gateway import conversations

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("look", "count")]
CALLS = (
    "<think>\nI had better look.\n</think>\n\nLet me see."
    '\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
    '\n<tool_call>\n{"name": "count", "arguments": {"y": 2}}\n</tool_call>'
)
USER = {"role": "user", "content": "how many?"}


@pytest.fixture
async def oai(wire) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=wire.grant.base_url, api_key=wire.grant.api_key, max_retries=0) as client:
        yield client


def referred(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": c["call_id"], "output": f"{c['name']}: 3"} for c in calls]


async def test_items_named_by_id_go_on_from_the_tokens_that_were_sampled(wire):
    wire.say(CALLS, "Three.")
    first = await wire.ask(RESPONSES, {"input": [USER], "tools": TOOLS})
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call", "function_call"]
    again = [USER, *referred(first["output"]), *results(first)]
    second = await wire.ask(RESPONSES, {"input": again, "tools": TOOLS, "instructions": None})
    assert second["output"][0]["content"][0]["text"] == "Three."
    assert CALLS in wire.prompts[1] and wire.prompts[1].index("look: 3") > wire.prompts[1].index(CALLS)
    await wire.end()
    report = wire.report
    assert report["rows"]["token"] == 1 and report["recognised"]["ids"] == 1


async def test_named_and_written_items_of_one_turn_are_one_message(wire):
    wire.say(CALLS, "Three.")
    first = await wire.ask(RESPONSES, {"input": [USER], "tools": TOOLS})
    reasoning, text, *calls = first["output"]
    mixed = [
        {"role": "system", "content": "Count."},
        USER,
        *referred([reasoning]),
        text,
        calls[0],
        *referred([calls[1]]),
    ]
    await wire.ask(RESPONSES, {"input": mixed + results(first), "tools": TOOLS})
    shown = wire.prompts[1].split("how many?")[1].split("look: 3")[0]
    assert shown.count("<|im_start|>assistant") == 1
    said = ["I had better look.", "Let me see.", '"name": "look"', '"name": "count"']
    assert sorted(said, key=shown.index) == said


async def test_a_part_alone_is_shown_alone(wire):
    wire.say(CALLS, "Three.")
    first = await wire.ask(RESPONSES, {"input": [USER], "tools": TOOLS})
    _, _, _, second = first["output"]
    await wire.ask(RESPONSES, {"input": [USER, *referred([second])], "tools": TOOLS})
    assert "count" in wire.prompts[1].rsplit("how many?")[1]
    assert "I had better look" not in wire.prompts[1] and '{"x": 1}' not in wire.prompts[1]


@pytest.mark.parametrize("identifier", ["msg_68aef0", f"msg_{'0' * 32}", f"resp_{'0' * 32}", "", None])
async def test_an_unknown_item_is_the_apis_own_error(wire, identifier):
    item = {"type": "item_reference", "id": identifier}
    status, body, _ = await wire.post(RESPONSES, {"input": [USER, item]})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "not_found", "input[1]")
    assert "send the item itself" in body["error"]["message"]


async def test_an_item_of_an_answer_that_was_not_stored_or_that_does_not_exist_is_not_found(wire):
    wire.say(CALLS)
    unstored = await wire.ask(RESPONSES, {"input": [USER], "tools": TOOLS, "store": False})
    stored = await wire.ask(RESPONSES, {"input": [USER], "tools": TOOLS})
    beyond = stored["output"][-1]["id"].replace("_1", "_7")
    for identifier in (unstored["output"][0]["id"], beyond):
        item = {"type": "item_reference", "id": identifier}
        status, body, _ = await wire.post(RESPONSES, {"input": [USER, item], "tools": TOOLS})
        assert (status, body["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_read_again_as_it_was_given_out(wire, oai, stream):
    wire.say(CALLS)
    if stream:
        events = await wire.events(RESPONSES, {"input": [USER], "tools": TOOLS})
        answer = events[-1][1]["response"]
    else:
        answer = await wire.ask(RESPONSES, {"input": [USER], "tools": TOOLS})
    assert (await oai.responses.retrieve(answer["id"])).to_dict(mode="json")["output"] == answer["output"]
    async with wire.local.http.get(f"{RESPONSES}/{answer['id']}", headers=wire.headers) as response:
        assert await response.json() == answer


async def test_a_deleted_answer_is_gone_for_every_use_but_training(wire, oai):
    answer = await oai.responses.create(model="m", input="hi")
    await oai.responses.delete(answer.id)
    for use in (
        lambda: oai.responses.retrieve(answer.id),
        lambda: oai.responses.delete(answer.id),
        lambda: oai.responses.create(model="m", input="and?", previous_response_id=answer.id),
    ):
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
            await use()
    await wire.end()
    assert wire.report["calls"] == 1 and wire.report["sampled_tokens"] > 0
    with pytest.raises(openai.APIStatusError, match="is ended"):
        await oai.responses.retrieve(answer.id)


async def test_an_answer_that_was_not_stored_is_not_found_and_says_why(oai):
    answer = await oai.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError, match="store: false"):
        await oai.responses.retrieve(answer.id)


async def test_another_episodes_answers_are_not_found(wire, oai):
    answer = await oai.responses.create(model="m", input="hi")
    await wire.claim()
    async with wire.local.http.get(f"{RESPONSES}/{answer.id}", headers=wire.headers) as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"


async def test_kept_answers_take_bounded_memory(wire, oai, monkeypatch):
    monkeypatch.setattr(conversations, "KEPT_BYTES", 4000)
    ids = [(await oai.responses.create(model="m", input=f"hi {n}", instructions="x" * 900)).id for n in range(8)]
    await oai.responses.retrieve(ids[-1])
    with pytest.raises(openai.NotFoundError, match="the last ones"):
        await oai.responses.retrieve(ids[0])
    await oai.responses.create(model="m", input="go on", previous_response_id=ids[0])
