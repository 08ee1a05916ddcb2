"""Model calls as hostile or careless clients send them: refused in form, or read for what they mean; never a fault."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from swarmtune import serve
from swarmtune.testing import LocalServer, chatml_model

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASK = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def local(tmp_path: Path, model: str) -> AsyncIterator[LocalServer]:
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**{"engine.script_tokens_per_s": 2000.0})
        yield local


async def post(local: LocalServer, path: str, data: Any, **headers: str) -> tuple[int, Any]:
    grant = await local.claim()
    headers = {"Authorization": f"Bearer {grant.api_key}"} | headers
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    async with local.http.post(path, data=body, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/start"])
async def test_a_body_that_is_not_what_its_encoding_says_is_refused(local: LocalServer, path: str, caplog):
    status, answer = await post(local, path, b"no gzip" * 9, **{"Content-Encoding": "gzip"})
    assert status == 400 and "Content-Encoding" in answer["error"]["message"]
    assert not [r for r in caplog.records if r.name.startswith("swarmtune")]


async def test_a_compressed_body_is_read(local: LocalServer):
    status, _ = await post(local, CHAT, gzip.compress(json.dumps(ASK).encode()), **{"Content-Encoding": "gzip"})
    assert status == 200


async def test_a_key_of_bytes_that_are_no_text_is_an_unknown_key(model: str, tmp_path: Path):
    async with LocalServer(tmp_path / "data", model, keys={"k" * 20: ("control",)}) as local:
        await local.boot()
        port = int(local.url.rpartition(":")[2])
        for request in (b"GET /v1/models", b"GET /v1/status", b"POST /v1/chat/completions"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request + b" HTTP/1.0\r\nAuthorization: Bearer sk-\xff\xfe\r\nContent-Length: 2\r\n\r\n{}")
            assert b" 401 " in await reader.readline()
            writer.close()


async def test_half_a_character_is_read_as_the_sign_for_one(local: LocalServer):
    """Clients in JavaScript that cut a long tool result cut emoji in two."""
    cut = rb'{"messages": [{"role": "user", "content": "a cut \ud83d and whole \ud83d\ude00"}]}'
    status, answer = await post(local, CHAT, cut)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "a cut � and whole \U0001f600")


@pytest.mark.parametrize("raw", [b'{"messages": NaN}', rb'{"messages": "\ud83d"', b"[" * 100_000, b'"\xff"'])
async def test_what_is_no_json_stays_refused(local: LocalServer, raw: bytes):
    status, answer = await post(local, CHAT, raw)
    assert (status, answer["error"]["code"]) == (400, "bad_request")


HUGE = "word " * 2_000_000
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": HUGE}}
TOO_LARGE = [
    (CHAT, {"messages": [{"role": "user", "content": "cat the log"}, {"role": "tool", "content": HUGE}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALLED]}]}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "description": HUGE}}]},
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 50_000}),
    (MESSAGES, {"system": HUGE}),
    (f"{MESSAGES}/count_tokens", {"system": HUGE}),
    ("/v1/responses", {"input": HUGE}),
    ("/v1/completions", {"prompt": ["short", HUGE]}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LARGE, ids=range(len(TOO_LARGE)))
async def test_a_prompt_that_cannot_fit_is_refused_without_encoding_it(
    local: LocalServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
):
    """Encoding 20 MB took a minute, in which no call and no heartbeat of any episode was answered."""
    renderer = local.server.live_run().renderer
    assert renderer is not None
    encoded: list[int] = []
    encode = renderer.encode
    monkeypatch.setattr(renderer, "encode", lambda text: encoded.append(len(text)) or encode(text))
    status, answer = await post(local, path, ASK | body)
    assert status == 400 and ("too long" in str(answer) or "maximum context length is" in str(answer))
    assert sum(encoded) < 500_000


async def test_a_large_body_with_a_prompt_that_fits_is_answered(local: LocalServer):
    padding = {"metadata": {"note": HUGE}, "messages": [{"role": "user", "content": "hi"}]}
    assert (await post(local, CHAT, padding))[0] == 200


LAST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (MESSAGES, {"messages": LAST}, "messages[1]"),
        (CHAT, {"messages": LAST, "continue_final_message": True, "add_generation_prompt": False}, "continue_final"),
        (CHAT, {"messages": LAST, "add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT, {"messages": [LAST[0], LAST[1] | {"prefix": True}]}, "messages[1].prefix"),
    ],
)
async def test_an_answer_begun_by_the_client_is_refused_rather_than_answered_anew(
    local: LocalServer, path: str, body: dict[str, Any], named: str
):
    status, answer = await post(local, path, ASK | body)
    assert status == 400 and named in answer["error"]["message"] and "prefill" in answer["error"]["message"]


async def test_a_conversation_that_ends_with_the_assistant_is_counted_and_in_chat_answered(local: LocalServer):
    assert (await post(local, f"{MESSAGES}/count_tokens", ASK | {"messages": LAST}))[0] == 200
    assert (await post(local, CHAT, ASK | {"messages": LAST, "add_generation_prompt": True}))[0] == 200


async def test_the_connection_closes_after_a_streams_error_event(local: LocalServer):
    grant = await local.claim()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(local.url.rpartition(":")[2]))
    long = ASK | {"max_tokens": 256, "stream": True, "messages": [{"role": "user", "content": "x" * 256}]}
    body = json.dumps(long).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {grant.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await local.until(lambda: local.backend.in_flight == 1)
    await local.server.abort(grant.episode_id, "enough")
    async with asyncio.timeout(30):
        rest = await reader.read()
    assert b'"code":"episode_over"' in rest and rest.endswith(b"0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/messages HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 30\r\n\r\n" + b"n" * 30,
    ],
)
async def test_what_is_no_http_costs_a_line_in_the_log_and_no_traceback(local: LocalServer, raw: bytes, caplog):
    server_log = logging.getLogger("aiohttp.server")
    server_log.addFilter(serve.malformed_in_one_line)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(local.url.rpartition(":")[2]))
        writer.write(raw)
        assert b" 40" in await reader.readline()
        writer.close()
        await local.until(lambda: bool(caplog.records))
    finally:
        server_log.removeFilter(serve.malformed_in_one_line)
    assert all(r.levelname == "WARNING" and r.exc_info is None and r.error for r in caplog.records)


async def test_an_episode_without_a_whole_answer_is_told_what_became_of_its_calls(local: LocalServer):
    grant = await local.claim()
    headers = {"Authorization": f"Bearer {grant.api_key}"}
    asked = asyncio.create_task(local.http.post(CHAT, json=ASK, headers=headers))
    await local.until(lambda: local.backend.in_flight == 1)
    asked.cancel()
    await local.until(lambda: local.backend.in_flight == 0)
    result = await local.end(grant.episode_id)
    assert (result.outcome, result.code) == ("rejected", "no_calls")
    assert result.message is not None and "not_delivered: 1" in result.message
