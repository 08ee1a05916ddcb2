"""The SDKs themselves, unmodified: openai (sync, async, streamed, Responses), anthropic, and plain HTTP.

Each plays one and the same task: ask for a sum with a tool offered, run the tool that the model calls, send the result
back with the answer exactly as the SDK hands it over, read the last answer. What is claimed: both turns are one row
whose trained tokens are those sampled, spelled as the model spelled them, and the last answer saw the tool's result.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anthropic
import openai
import pytest
from agent_runs import END, Stage, call, found, in_thread

from swarmtune.protocol import EpisodeGrant

QUESTION = "What is 17 + 25?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
RESPONSES_TOOLS = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}
]
ANTHROPIC_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
LINES = (
    call("add", '{ "b": 25,"a" : 17 }', before=" Ich zähle. "),
    found(r"sum is (\d+)", " It is {}.\n\n"),
)

Agent = Callable[[EpisodeGrant], Awaitable[str]]


def add(arguments: str | dict) -> str:
    numbers = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"the sum is {numbers['a'] + numbers['b']}"


# -- the agents


async def openai_sync(grant: EpisodeGrant) -> str:
    def work() -> str:
        with openai.OpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
            messages: list = [{"role": "user", "content": QUESTION}]
            answer = llm.chat.completions.create(model="gpt-x", messages=messages, tools=CHAT_TOOLS).choices[0].message
            messages.append(answer)
            for made in answer.tool_calls or []:
                result = add(made.function.arguments)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
            last = llm.chat.completions.create(model="gpt-x", messages=messages, tools=CHAT_TOOLS)
            return last.choices[0].message.content or ""

    return await in_thread(work)


async def openai_async(grant: EpisodeGrant) -> str:
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
        messages: list = [{"role": "user", "content": QUESTION}]
        answer = (await llm.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)).choices[0].message
        messages.append(answer.model_dump())  # with its nulls: audio, function_call, refusal, annotations
        for made in answer.tool_calls or []:
            result = add(made.function.arguments)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
        last = await llm.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
        return last.choices[0].message.content or ""


async def openai_stream_helper(grant: EpisodeGrant) -> str:
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
        messages: list = [{"role": "user", "content": QUESTION}]
        for _ in range(2):
            asked = {"model": "m", "messages": messages, "tools": CHAT_TOOLS}
            async with llm.chat.completions.stream(**asked) as stream:
                answer = (await stream.get_final_completion()).choices[0].message
            messages.append(answer)
            for made in answer.tool_calls or []:
                result = add(made.function.arguments)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
        return messages[-1].content or ""


async def openai_raw_stream(grant: EpisodeGrant) -> str:
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
        messages: list = [{"role": "user", "content": QUESTION}]
        content = ""
        for _ in range(2):
            asked = {"model": "m", "messages": messages, "tools": CHAT_TOOLS}
            stream = await llm.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            content, calls, usage = "", {}, None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or []:
                        made = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                        made["id"] += piece.id or ""
                        made["name"] += piece.function.name or ""
                        made["arguments"] += piece.function.arguments or ""
            assert usage is not None and usage.completion_tokens > 0
            wired = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls.values()
            ]
            messages.append({"role": "assistant", "content": content, **({"tool_calls": wired} if wired else {})})
            for made in calls.values():
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": add(made["arguments"])})
        return content


async def responses_stateless(grant: EpisodeGrant) -> str:
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
        items: list = [{"role": "user", "content": QUESTION}]
        answer = await llm.responses.create(model="m", input=items, tools=RESPONSES_TOOLS, store=False)
        for item in answer.output:
            items.append(item)
            if item.type == "function_call":
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": add(item.arguments)})
        last = await llm.responses.create(model="m", input=items, tools=RESPONSES_TOOLS, store=False)
        return last.output_text


async def responses_continued(grant: EpisodeGrant) -> str:
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
        answer = await llm.responses.create(model="m", input=QUESTION, tools=RESPONSES_TOOLS, previous_response_id=None)
        results: list = [
            {"type": "function_call_output", "call_id": item.call_id, "output": add(item.arguments)}
            for item in answer.output
            if item.type == "function_call"
        ]
        last = await llm.responses.create(
            model="m", input=results, tools=RESPONSES_TOOLS, previous_response_id=answer.id
        )
        return last.output_text


async def responses_streamed(grant: EpisodeGrant) -> str:
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as llm:
        items: list = [{"role": "user", "content": QUESTION}]
        text = ""
        for _ in range(2):
            async with llm.responses.stream(model="m", input=items, tools=RESPONSES_TOOLS) as stream:
                numbers = [event.sequence_number async for event in stream]
                answer = await stream.get_final_response()
            assert numbers == sorted(set(numbers))
            text = answer.output_text
            for item in answer.output:
                items.append(item)
                if item.type == "function_call":
                    items.append(
                        {"type": "function_call_output", "call_id": item.call_id, "output": add(item.arguments)}
                    )
        return text


async def anthropic_sync(grant: EpisodeGrant) -> str:
    def work() -> str:
        with anthropic.Anthropic(base_url=grant.anthropic_base_url, api_key=grant.api_key) as llm:
            messages: list = [{"role": "user", "content": QUESTION}]
            asked = {"model": "claude-x", "max_tokens": 64_000, "tools": ANTHROPIC_TOOLS}
            answer = llm.with_options(timeout=60).messages.create(messages=messages, **asked)
            messages += after_anthropic(answer)
            last = llm.with_options(timeout=60).messages.create(messages=messages, **asked)
            return "".join(block.text for block in last.content if block.type == "text")

    return await in_thread(work)


async def anthropic_bearer(grant: EpisodeGrant) -> str:
    asked = {"model": "m", "max_tokens": 1000, "tools": ANTHROPIC_TOOLS}
    url = grant.anthropic_base_url
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=grant.api_key, api_key=None) as llm:
        messages: list = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        messages += after_anthropic(await llm.messages.create(messages=messages, **asked))
        counted = await llm.messages.count_tokens(model="m", messages=messages, tools=ANTHROPIC_TOOLS)
        last = await llm.messages.create(messages=messages, **asked)
        assert last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0) == counted.input_tokens
        return "".join(block.text for block in last.content if block.type == "text")


async def anthropic_streamed(grant: EpisodeGrant) -> str:
    asked = {"model": "m", "max_tokens": 1000, "tools": ANTHROPIC_TOOLS}
    async with anthropic.AsyncAnthropic(base_url=grant.anthropic_base_url, api_key=grant.api_key) as llm:
        messages: list = [{"role": "user", "content": QUESTION}]
        text = ""
        for _ in range(2):
            async with llm.messages.stream(messages=messages, **asked) as stream:
                answer = await stream.get_final_message()
            messages += after_anthropic(answer)
            text = "".join(block.text for block in answer.content if block.type == "text")
        return text


def after_anthropic(answer: anthropic.types.Message) -> list:
    """The assistant's message as the SDK has it, and the results of its calls."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": add(block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages: list = [{"role": "assistant", "content": answer.content}]
    return [*messages, {"role": "user", "content": results}] if results else messages


async def raw_http(grant: EpisodeGrant) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {grant.api_key}"}
    async with httpx.AsyncClient(base_url=grant.base_url, headers=headers, timeout=60) as http:
        messages: list = [{"role": "user", "content": QUESTION}]
        content = ""
        for _ in range(2):
            reply = await http.post("/chat/completions", json={"messages": messages, "tools": CHAT_TOOLS})
            answer = reply.raise_for_status().json()["choices"][0]["message"]
            messages.append(answer)
            content = answer["content"] or ""
            for made in answer.get("tool_calls") or []:
                result = add(made["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})
        return content


AGENTS: tuple[Agent, ...] = (
    openai_sync,
    openai_async,
    openai_stream_helper,
    openai_raw_stream,
    responses_stateless,
    responses_continued,
    responses_streamed,
    anthropic_sync,
    anthropic_bearer,
    anthropic_streamed,
    raw_http,
)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_two_turns_with_a_tool_are_one_row_of_exactly_what_was_sampled(stage: Stage, agent: Agent):
    stage.model.play(*LINES)
    grant = await stage.claim()
    assert (await agent(grant)).strip() == "It is 42."
    trained = stage.trained(grant)
    assert trained.answers == [text + END for text in stage.model.said] and len(stage.model.said) == 2
    assert trained.report["rows"] == {"none": 2, "token": 1, "text": 1}
    assert trained.report["recognised"] == {"none": 1, "ids": 1}
    assert trained.report["left_out"] == {} and trained.report["breaks"] == []
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_a_key_that_is_over_ends_the_client_at_once(stage: Stage, agent: Agent):
    grant = await stage.claim()
    await stage.local.chat(grant.api_key)
    await stage.local.end(grant.episode_id)
    with pytest.raises(Exception, match=r"410|over|ended") as raised:
        await agent(grant)
    assert "Timeout" not in type(raised.value).__name__ and stage.model.said == []
