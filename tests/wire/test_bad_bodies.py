"""Random JSON at any place of a body: answered or refused in the dialect's form, never a fault of the server."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmtune.testing import LocalServer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "adds", "parameters": PARAMETERS}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SCHEMA = {"name": "n", "strict": False, "schema": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u", "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "refusal": None},
            {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": TOOL | {"strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "stop": ["x"],
        "n": 1,
        "logit_bias": {},
        "stop_token_ids": [5],
        "top_logprobs": 1,
        "metadata": {"a": "b"},
    },
    "responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "t"}]},
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "t"}], "encrypted_content": "e"},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "1"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "free", "input": "text"},
        ],
        "tools": [TOOL | {"type": "function"}, {"type": "custom", "name": "free"}, {"type": "namespace", "tools": []}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        "text": {"format": {"type": "json_schema"} | SCHEMA},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
        "previous_response_id": None,
        "max_output_tokens": 5,
        "store": False,
        "metadata": {},
    },
    "messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "1", "is_error": False}],
            },
        ],
        "tools": [{"name": "add", "input_schema": PARAMETERS}, {"type": "web_search_20260101", "name": "w"}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "{}"},
    },
    "completions": {"model": "m", "prompt": ["a"], "max_tokens": 5, "logprobs": 1, "stop": "x", "n": 1, "best_of": 1},
}
BODIES["messages/count_tokens"] = BODIES["messages"]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["system", "tool", "text", "function", "auto", "json_schema", "{", "image_url"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, Any]:
    """A path and a body with one or two places replaced, removed, or the whole body."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body: Any = copy.deepcopy(BODIES[path])
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.sampled_from(list(places(body))))
        holder = body
        for key in at[:-1]:
            holder = holder[key]
        if isinstance(holder, dict) and draw(st.booleans()) and draw(st.booleans()):
            del holder[at[-1]]
        else:
            holder[at[-1]] = draw(VALUES)
        if not isinstance(body, dict) or not body:
            break
    if isinstance(body, dict):
        body["stream"] = draw(st.booleans())
    return path, body


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, liberal: str) -> Iterator[httpx.Client]:
    """A client with an episode's key; the server runs in a thread of its own."""
    ready, done = threading.Event(), threading.Event()
    found: dict[str, str] = {}

    async def serve() -> None:
        async with LocalServer(tmp_path_factory.mktemp("data"), liberal, script=lambda m, i: "answer") as local:
            await local.boot(batch_tasks=9)
            grant = await local.claim()
            found.update(url=local.url, key=grant.api_key)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    with httpx.Client(base_url=found["url"], headers={"x-api-key": found["key"]}, timeout=20) as client:
        yield client
    done.set()
    thread.join()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=spoiled())
def test_random_json_anywhere_is_answered_or_refused_in_form(served: httpx.Client, case: tuple[str, Any]):
    path, body = case
    response = served.post(f"/v1/{path}", json=body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
        assert response.headers["x-should-retry"] == "false"
    elif "text/event-stream" in response.headers["Content-Type"]:
        assert response.text.endswith("\n\n") and '"error":{' not in response.text
    else:
        assert response.json()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(BODIES)), raw=st.binary(max_size=60))
def test_bytes_that_are_no_json_are_refused_in_form(served: httpx.Client, path: str, raw: bytes):
    response = served.post(f"/v1/{path}", content=raw)
    assert response.status_code == 400 and response.json()["error"]["code"]


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_body_nested_too_deeply_is_refused_in_form(served: httpx.Client, path: str):
    deep = b'{"a":' * 400 + b"1" + b"}" * 400
    for field in (b"tools", b"metadata", b"messages", b"input"):
        response = served.post(f"/v1/{path}", content=b'{"model":"m","' + field + b'":' + deep + b"}")
        assert response.status_code == 400 and "nested" in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""]])
def test_an_empty_prompt_is_refused_in_form(served: httpx.Client, prompt: Any):
    response = served.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_unspoiled_bodies_are_answered(served: httpx.Client):
    for path, body in BODIES.items():
        response = served.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, (path, response.text)
