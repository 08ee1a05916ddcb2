"""The servers that `gateway.py` measures, each in a process of its own: ours, the yardstick, the yardstick's upstream.

Ours is the server as `swarmtune serve` runs it, with the scripted engine: tracker, merger and journal at work, answers
at once, so all of its latency counts as added. The yardstick is the plain shape of a capturing proxy: FastAPI, httpx
and json; it asks the upstream for token ids and logprobs (in vLLM's form), keeps request and answer in memory, and
answers without them. It renders nothing, keeps no tree and no journal.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pydoc_data.topics
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 3.85
"""Of the text below under SmolLM2's tokenizer."""
TEXT = "\n".join(pydoc_data.topics.topics.values())
"""Real text: Python's own documentation, 450,000 characters."""
ANSWERS = 64
PATHS = {"": (100, 0.0), "/slow": (100, 1.0), "/long": (1000, 0.0)}
"""Path of the upstream → tokens of its answer, seconds that it takes."""


def text_of(tokens: int, number: int) -> str:
    """About `tokens` tokens of text, another excerpt for each number."""
    length = round(tokens * CHARACTERS_PER_TOKEN)
    start = number * 104_729 % (len(TEXT) - length)
    return TEXT[start : start + length]


def short_answer(messages: Sequence[dict[str, str]], index: int) -> str:
    return text_of(100, index % ANSWERS)


def long_answer(messages: Sequence[dict[str, str]], index: int) -> str:
    return text_of(1000, index % ANSWERS)


def slow_answer(messages: Sequence[dict[str, str]], index: int) -> str:
    """A word and its end: two tokens at two a second take one second."""
    return "."


# -- processes


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def claim(self, count: int) -> list[tuple[str, str]]:
        """(episode id, key) of fresh episodes."""
        grants = [self.post("/v1/episodes", {"task_id": f"task {n}", "wait_s": 30}) for n in range(count)]
        return [(grant["episode_id"], grant["api_key"]) for grant in grants]


@contextmanager
def process(serve: Callable[..., None], *arguments: Any) -> Iterator[Running]:
    """A server from its first answer to its end."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, *arguments))
    child.start()
    try:
        if not ours.poll(60):
            raise SystemExit(f"{serve.__name__} did not start")
        assert child.pid is not None
        yield Running(ours.recv(), child.pid)
    finally:
        child.terminate()
        child.join(20)


@contextmanager
def ours(folder: Path, script: Callable[..., str], **config: Any) -> Iterator[Running]:
    """Our server with a training that is open for episodes."""
    with tempfile.TemporaryDirectory() as data, process(serve_ours, data) as server:
        base = {
            "model": str(folder),
            "batch_tasks": 4096,
            "repeats": 4096,
            "engine.kind": "scripted",
            "engine.script": f"{script.__module__}:{script.__name__}",
            "engine.context_length": 131_072,
            "sampling.max_tokens": 2048,
            "batching.max_open_episodes": 8192,
        }
        server.post("/v1/start", {"config": base | config})
        with urllib.request.urlopen(f"{server.url}/v1/status?while=booting&wait_s=60", timeout=90) as answer:
            status = json.loads(answer.read())
        if status["state"] != "rolling":
            raise SystemExit(f"the server did not start: {status['reason']}")
        yield server


def model_folder(model: Path, into: Path) -> Path:
    """The model's tokenizer and template, said to have a long context: the scripted engine has no weights."""
    into.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, into / name)
    config = json.loads((model / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    return into


def serve_ours(pipe: Connection, data_dir: str) -> None:
    from swarmtune.serve import ServeSettings, run

    run(ServeSettings(Path(data_dir), port=0), pipe.send)


def serve_upstream(pipe: Connection) -> None:
    """Canned chat completions in vLLM's form, with token ids and logprobs, as fast as aiohttp gives them."""
    from aiohttp import web

    def cut(text: str) -> list[str]:
        """As many pieces as it has tokens, about."""
        return [text[at : at + 4] for at in range(0, len(text), 4)]

    def answer(path: str) -> Callable[[web.Request], Any]:
        tokens, seconds = PATHS[path]
        words = text_of(tokens, 0)
        message = {"role": "assistant", "content": words}
        told = [{"token": w, "logprob": -0.123456, "bytes": list(w.encode()), "top_logprobs": []} for w in cut(words)]
        body = json.dumps(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "logprobs": {"content": told},
                        "finish_reason": "stop",
                        "token_ids": list(range(30_000, 30_000 + tokens)),
                    }
                ],
                "usage": {"prompt_tokens": 500, "completion_tokens": tokens, "total_tokens": 500 + tokens},
                "prompt_token_ids": list(range(20_000, 20_000 + 500)),
            }
        ).encode()

        async def handle(request: web.Request) -> web.Response:
            await request.read()
            if seconds:
                await asyncio.sleep(seconds)
            return web.Response(body=body, content_type="application/json")

        return handle

    async def main() -> None:
        app = web.Application(client_max_size=2**24)
        for path in PATHS:
            app.router.add_post(f"{path}/v1/chat/completions", answer(path))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(main())


def serve_yardstick(pipe: Connection, upstream: str) -> None:
    import httpx
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI()
    captured: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=600)
    client = httpx.AsyncClient(base_url=upstream, timeout=60, limits=limits)

    def forwarding(path: str) -> Callable[..., Any]:
        async def chat(request: Any) -> JSONResponse:
            body = await request.json()
            body |= {"logprobs": True, "return_token_ids": True}
            answer = (await client.post(f"{path}/v1/chat/completions", json=body)).json()
            captured.append({"request": body, "answer": answer})
            choice = {k: v for k, v in answer["choices"][0].items() if k not in ("token_ids", "logprobs")}
            visible = {k: v for k, v in answer.items() if k != "prompt_token_ids"}
            return JSONResponse(visible | {"choices": [choice]})

        chat.__annotations__["request"] = Request  # imported here, so FastAPI cannot look the name up
        return chat

    for path in PATHS:
        app.post(f"{path}/v1/chat/completions")(forwarding(path))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))

    async def main() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells it by a flag only
            await asyncio.sleep(0.01)
        pipe.send(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        await serving

    asyncio.run(main())
