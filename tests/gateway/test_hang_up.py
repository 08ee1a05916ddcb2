"""A client that hangs up while its answer is being written: nothing is reported as a fault of the server."""

from __future__ import annotations

import logging

import aiohttp
import pytest
from aiohttp import web

from swarmtune.testing import LocalServer

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_client_that_is_gone_when_its_whole_answer_is_written_is_no_fault(
    local: LocalServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    await local.boot(batch_tasks=8)
    episode = await local.claim()

    async def lose(response: web.Response, data: bytes = b"") -> None:
        assert response._req is not None and response._req.transport is not None
        response._req.transport.abort()
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.Response, "write_eof", lose)
    with pytest.raises(aiohttp.ClientError):
        await local.http.post("/v1/chat/completions", json=ASK, headers={"Authorization": f"Bearer {episode.api_key}"})
    monkeypatch.undo()
    assert (await local.chat(episode.api_key))["choices"]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
