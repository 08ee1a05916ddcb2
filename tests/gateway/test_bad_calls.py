"""Bad input on the model routes: each gets OpenAI's error form with our code, a sentence, and no retry."""

from __future__ import annotations

import asyncio

import openai
import pytest

from swarmtune.gateway.auth import Capability
from swarmtune.testing import CHATML, LocalServer, chatml_model

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STRICT = {"name": "n", "strict": True, "schema": {"type": "object"}}
LATER_SYSTEM = {"messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}]}


async def post(local: LocalServer, key: str | None, body, path: str = CHAT, **headers: str):
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    send = {"data": body} if isinstance(body, (bytes, str)) else {"json": body}
    async with local.http.post(path, headers=headers, **send) as response:
        return response.status, (await response.json()).get("error"), response.headers


@pytest.fixture
async def local(local: LocalServer):
    await local.boot(batch_tasks=8)
    return local


async def test_no_key_and_an_unknown_key_are_401_and_not_retried(local):
    for key in (None, "sk-wrong"):
        status, error, headers = await post(local, key, ASK)
        assert (status, error["code"], error["type"]) == (401, "unauthorized", "authentication_error")
        assert headers["x-should-retry"] == "false"


async def test_a_key_is_taken_from_x_api_key_too(local):
    grant = await local.claim()
    status, error, _ = await post(local, None, ASK, **{"x-api-key": grant.api_key})
    assert (status, error) == (200, None)


async def test_a_key_of_the_server_is_403(model, tmp_path):
    async with LocalServer(tmp_path, model, keys={"k" * 16: Capability}) as local:
        await local.boot()
        status, error, headers = await post(local, "k" * 16, ASK)
        assert (status, error["code"], headers["x-should-retry"]) == (403, "forbidden", "false")


async def test_the_key_of_an_episode_that_is_over_or_expired_is_410(local):
    ended, aborted, expired = [await local.claim(task) for task in "abc"]
    await local.chat(ended.api_key)
    await local.end(ended.episode_id)
    await local.server.abort(aborted.episode_id, "")
    local.server.live_run().book.expire(expired.episode_id, "idle")
    for grant, code in ((ended, "episode_over"), (aborted, "episode_over"), (expired, "episode_expired")):
        status, error, headers = await post(local, grant.api_key, ASK)
        assert (status, error["code"], headers["x-should-retry"]) == (410, code, "false")


async def test_an_episode_that_ends_during_a_call_gets_no_answer_from_it(local):
    await local.server.stop()
    await local.boot(**{"engine.script_tokens_per_s": 50.0})
    grant = await local.claim()
    call = asyncio.create_task(post(local, grant.api_key, ASK))
    await local.until(lambda: local.backend.in_flight > 0)
    await local.server.abort(grant.episode_id, "enough")
    status, error, _ = await call
    assert (status, error["code"]) == (410, "episode_over")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": "hi"}', b'{"messages": []}', b"{}"])
async def test_a_malformed_body_is_400(local, body):
    grant = await local.claim()
    status, error, _ = await post(local, grant.api_key, body)
    assert (status, error["code"], error["type"]) == (400, "bad_request", "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
async def test_a_wrong_field_is_400_and_named(local, fields, named):
    grant = await local.claim()
    status, error, _ = await post(local, grant.api_key, ASK | fields)
    assert (status, error["code"], error["param"]) == (400, "bad_request", named)
    assert named in error["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": STRICT}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_what_would_change_the_meaning_and_cannot_be_honoured_is_400_and_named(local, fields, named):
    grant = await local.claim()
    status, error, _ = await post(local, grant.api_key, ASK | fields)
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", named)


async def test_neutral_values_and_unknown_fields_are_taken(local):
    grant = await local.claim()
    fields = {"logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}}
    status, error, _ = await post(local, grant.api_key, ASK | fields | {"store": False, "betas": ["x"], "user": None})
    assert (status, error) == (200, None)


async def test_a_conversation_that_the_template_refuses_is_400_with_its_words(tmp_path):
    refusing = "{% if messages[1] %}{{ raise_exception('one message only') }}{% endif %}" + CHATML
    async with LocalServer(tmp_path / "data", str(chatml_model(tmp_path / "model", refusing))) as local:
        await local.boot()
        grant = await local.claim()
        status, error, _ = await post(local, grant.api_key, LATER_SYSTEM)
        assert (status, error["code"]) == (400, "template_refused")
        assert "one message only" in error["message"]


async def test_a_later_system_message_is_taken_where_the_template_refuses_one(local):
    grant = await local.claim()
    status, error, _ = await post(local, grant.api_key, LATER_SYSTEM)
    assert (status, error) == (200, None)


async def test_a_prompt_that_does_not_fit_is_the_apis_own_error(local):
    grant = await local.claim()
    async with openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x" * 5000}], stream=stream
                )
            assert raised.value.code == "context_length_exceeded"
            assert "maximum context length is 2048 tokens" in str(raised.value)


async def test_an_answer_is_clamped_to_what_fits_after_the_prompt(local):
    grant = await local.claim()
    answer = await local.chat(grant.api_key, "x" * 2000, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 2048 and answer["choices"][0]["finish_reason"] == "length"


async def test_probes_get_a_plain_404_and_never_a_fault(local):
    for method, path in (("HEAD", "/"), ("GET", "/nothing"), ("POST", "/v1/embeddings"), ("DELETE", "/v1/chat")):
        async with local.http.request(method, path) as response:
            assert response.status == 404, (method, path)


async def test_a_server_without_a_training_says_so(model, tmp_path):
    async with LocalServer(tmp_path, model) as local:
        status, error, _ = await post(local, "sk-any", ASK)
        assert (status, error["code"]) == (503, "not_started")


async def test_a_refused_call_leaves_the_episode_as_it_was(local):
    grant = await local.claim()
    await post(local, grant.api_key, ASK | {"temperature": 9})
    await post(local, grant.api_key, {"messages": []})
    await local.chat(grant.api_key)
    result = await local.end(grant.episode_id)
    assert (result.outcome, result.samples) == ("admitted", 1)
