"""Chat Completions through the real openai client: streamed and not, choices, stops, logprobs, limits, ids, usage."""

from __future__ import annotations

import asyncio

import openai
import pytest

from swarmtune.testing import LocalServer


def says(text: str):
    return lambda messages, index: text


@pytest.fixture
async def local(model, tmp_path):
    """Answers with what `script` was set to."""
    script = {"answer": says("The sum of 3 and 4 is 7.")}
    async with LocalServer(tmp_path / "data", model, script=lambda m, i: script["answer"](m, i)) as local:
        local.script = script
        await local.boot()
        yield local


@pytest.fixture
async def client(local):
    grant = await local.claim()
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key, max_retries=0) as client:
        client.episode_id = grant.episode_id
        yield client


ASK = {"model": "any-name", "messages": [{"role": "user", "content": "what is 3 + 4?"}]}


async def test_a_whole_answer_has_text_finish_reason_usage_and_an_id_of_ours(client):
    answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "The sum of 3 and 4 is 7."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == len("The sum of 3 and 4 is 7.") + 1  # one token a byte, and the end token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_synchronous_client_works_too(model, tmp_path):
    async def serve_and_ask() -> str:
        async with LocalServer(tmp_path / "data", model) as local:
            await local.boot()
            grant = await local.claim()

            def ask() -> str:
                with openai.OpenAI(base_url=grant.base_url, api_key=grant.api_key) as client:
                    chunks = client.chat.completions.create(**ASK, stream=True)
                    return "".join(c.choices[0].delta.content or "" for c in chunks)

            return await asyncio.to_thread(ask)

    assert asyncio.run(serve_and_ask()) == "what is 3 + 4?"


@pytest.mark.parametrize("pace", [None, 5000.0])
async def test_streamed_and_whole_answers_are_the_same(local, pace):
    await local.server.stop()
    await local.boot(**{"engine.script_tokens_per_s": pace})
    grant = await local.claim()
    client = openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key, max_retries=0)
    for text in ("plain text", "  blanks around \n", "ünïcödé ✓ 日本", "half a <tag and <|marker|> and [TOOL", ""):
        local.script["answer"] = says(text)
        whole = await client.chat.completions.create(**ASK)
        streamed = ""
        async for chunk in await client.chat.completions.create(**ASK, stream=True):
            streamed += chunk.choices[0].delta.content or ""
        assert streamed == whole.choices[0].message.content, text
    await client.close()


async def test_a_stream_has_one_id_the_role_first_one_finish_reason_and_usage_only_if_asked(client):
    plain = [c async for c in await client.chat.completions.create(**ASK, stream=True)]
    assert len({c.id for c in plain}) == 1
    assert plain[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in plain if c.choices[0].finish_reason] == ["stop"]
    assert all(c.usage is None for c in plain)
    asked = [
        c
        async for c in await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    ]
    assert asked[-1].choices == [] and asked[-1].usage.completion_tokens == 25
    assert all(c.usage is None for c in asked[:-1])


async def test_tokens_are_streamed_as_they_come(client, local):
    await local.server.stop()
    await local.boot(**{"engine.script_tokens_per_s": 200.0})
    grant = await local.claim()
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as slow:
        chunks = [c async for c in await slow.chat.completions.create(**ASK, stream=True)]
    texts = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    assert len(texts) > 10 and "".join(texts) == "The sum of 3 and 4 is 7."


async def test_several_choices_are_several_answers_streamed_and_not(client, local):
    local.script["answer"] = lambda messages, index: f"answer {index}"
    whole = await client.chat.completions.create(**ASK, n=3)
    assert sorted(c.message.content for c in whole.choices) == ["answer 0", "answer 1", "answer 2"]
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 3 * len("answer 0.")
    texts = {0: "", 1: ""}
    async for chunk in await client.chat.completions.create(**ASK, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert sorted(texts.values()) == ["answer 3", "answer 4"]
    result = await local.end(client.episode_id, 1.0)
    assert result.sampled_tokens == 5 * len("answer 0.")


async def test_a_stop_string_ends_the_answer_before_it(client, local):
    local.script["answer"] = says("Thought: add\nObservation: 7\nmore")
    whole = await client.chat.completions.create(**ASK, stop="\nObservation:")
    assert whole.choices[0].message.content == "Thought: add"
    assert whole.choices[0].finish_reason == "stop"
    streamed = ""
    async for chunk in await client.chat.completions.create(**ASK, stop=["\nObservation:", "never"], stream=True):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == "Thought: add"


async def test_the_token_limit_ends_the_answer_with_length(client):
    for limit in ({"max_tokens": 7}, {"max_completion_tokens": 7}):
        answer = await client.chat.completions.create(**ASK, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "The sum"
        assert answer.usage.completion_tokens == 7


async def test_a_limit_above_the_episodes_is_clamped(client, local):
    local.script["answer"] = says("x" * 1000)
    answer = await client.chat.completions.create(**ASK, max_tokens=64000)
    assert answer.usage.completion_tokens == 256 and answer.choices[0].finish_reason == "length"


async def test_logprobs_come_one_per_token_streamed_and_not(client):
    whole = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(e.logprob < 0 and len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob == e.logprob for e in entries)
    assert "".join(e.token for e in entries[:-1]) == "The sum of 3 and 4 is 7."
    streamed = []
    async for chunk in await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in entries]


async def test_a_conversation_continues_from_its_sampled_tokens(client, local):
    first = await client.chat.completions.create(**ASK)
    history = [
        *ASK["messages"],
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "user", "content": "sure?"},
    ]
    second = await client.chat.completions.create(model="m", messages=history)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
    result = await local.end(client.episode_id, 1.0)
    assert (result.samples, result.sampled_tokens) == (1, 50)


async def test_parallel_calls_of_one_episode_run_in_parallel(client, local):
    await local.server.stop()
    await local.boot(**{"engine.script_tokens_per_s": 100.0})
    grant = await local.claim()
    calls = [asyncio.create_task(local.chat(grant.api_key, f"question {n}")) for n in range(8)]
    while local.backend.in_flight < 8:
        await asyncio.sleep(0.001)
        assert not any(call.done() for call in calls)
    assert len({(await call)["id"] for call in calls}) == 8


async def test_every_content_form_is_read_as_one(client, local):
    local.script["answer"] = lambda messages, index: messages[-1]["content"]
    forms = [
        "hello",
        [{"type": "text", "text": "hello"}],
        [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
    ]
    answers = []
    for content in forms:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        answers.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert len(set(answers)) == 1


async def test_what_was_asked_and_what_was_used_is_recorded(client, local):
    await client.chat.completions.create(
        **ASK, temperature=0.3, max_tokens=9999, extra_body={"cache_hint": 1}, user="me"
    )
    report = local.server.merge_report(client.episode_id)
    turn = report["turns"][0]
    assert turn["asked"] == {"temperature": 0.3, "max_tokens": 9999}
    assert turn["used"]["temperature"] == 0.3 and turn["used"]["max_tokens"] == 256
    assert turn["ignored"] == ("cache_hint", "user")


async def test_pinned_sampling_is_used_whatever_a_request_asks(local):
    grant = await local.claim(sampling={"temperature": 0.7, "pinned": True})
    await local.chat(grant.api_key, temperature=0.0, stop="sum", seed=5)
    turn = local.server.merge_report(grant.episode_id)["turns"][0]
    assert turn["used"]["temperature"] == 0.7 and turn["used"]["stop"] == () and turn["used"]["seed"] is None
    assert turn["asked"]["temperature"] == 0.0


async def test_a_claims_seed_gives_each_call_its_own_seed_again_and_again(local):
    seeds = []
    for _ in range(2):
        grant = await local.claim(seed=11)
        for question in "ab":
            await local.chat(grant.api_key, question)
        seeds.append([t["used"]["seed"] for t in local.server.merge_report(grant.episode_id)["turns"]])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1] and None not in seeds[0]


async def test_a_requests_seed_is_used_and_its_further_answers_get_their_own(local):
    grant = await local.claim()
    await local.chat(grant.api_key, n=2, seed=5)
    assert local.server.merge_report(grant.episode_id)["turns"][0]["used"]["seed"] == 5
    seeds = {request.sampling.seed for request in local.backend.requests}
    assert len(seeds) == 2 and 5 in seeds


async def test_a_marked_retry_gets_the_answer_it_missed_and_a_repeat_without_mark_a_new_one(client, local):
    local.script["answer"] = lambda messages, index: f"answer {index}"
    first = await client.chat.completions.create(**ASK)
    again = await client.chat.completions.create(**ASK, extra_headers={"x-stainless-retry-count": "1"})
    assert (again.id, again.choices[0].message.content) == (first.id, "answer 0")
    fresh = await client.chat.completions.create(**ASK)
    assert fresh.id != first.id and fresh.choices[0].message.content == "answer 1"
    assert (await local.end(client.episode_id)).sampled_tokens == 2 * len("answer 0.")


async def test_models_lists_the_served_one_and_takes_any_name(client):
    listed = await client.models.list()
    assert [m.id for m in listed.data] == ["chatml"]
    assert (await client.models.retrieve("gpt-whatever")).id == "gpt-whatever"


async def test_raw_completions_take_text_token_ids_and_lists(client, local):
    local.script["answer"] = lambda messages, index: messages[-1]["content"].upper()
    one = await client.completions.create(model="m", prompt="abc")
    assert (one.choices[0].text, one.choices[0].finish_reason, one.usage.prompt_tokens) == ("ABC", "stop", 3)
    ids = await client.completions.create(model="m", prompt=[1, 2, 3], max_tokens=2)
    assert ids.usage.prompt_tokens == 3 and ids.choices[0].finish_reason == "length"
    both = await client.completions.create(model="m", prompt=["ab", "cd"], n=2)
    assert [c.text for c in both.choices] == ["AB", "AB", "CD", "CD"] and both.usage.prompt_tokens == 4
    streamed = ""
    async for chunk in await client.completions.create(model="m", prompt="abc", stream=True):
        streamed += chunk.choices[0].text
    assert streamed == "ABC"
