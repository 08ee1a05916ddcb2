"""A swarm server inside a test: real sockets, the scripted engine, a small model folder with a real tokenizer.

    async with LocalServer(tmp_path, model=str(chatml_model(tmp_path / "model"))) as local:
        await local.boot(batch_tasks=1, repeats=2)
        grant = await local.claim("task")

Of the product only `rehearsal` imports it: a client's own tests.
"""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from aiohttp import ClientSession, web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from swarmtune.config import TrainConfig
from swarmtune.engines.scripted import Script, ScriptedBackend
from swarmtune.gateway.app import create_app
from swarmtune.gateway.auth import Capability, Keyring
from swarmtune.protocol import ClaimRequest, EndRequest, EndResult, EngineState, EpisodeGrant, ServerStatus
from swarmtune.server import SwarmServer

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template without tools or thinking that refuses a system message after the first message."""


def chatml_model(folder: Path, template: str = CHATML, context: int = 4096) -> Path:
    """A model folder without weights: a byte-level tokenizer (one token per byte), a chat template, a configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    end = tokenizer.token_to_id("<|im_end|>")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": end, "max_position_embeddings": context})
    )
    return folder


class LocalServer:
    """One server process's worth of swarm server, in this event loop."""

    def __init__(
        self,
        data_dir: Path,
        model: str,
        *,
        script: Script | None = None,
        keys: Mapping[str, Iterable[Capability]] | None = None,
        fresh: bool = False,
    ) -> None:
        """`script` answers instead of an echo."""
        self.model = model
        self.backends: list[ScriptedBackend] = []
        """Every backend the server made; the last one is live."""
        self._script = script
        self._keyring = Keyring(keys)
        self._runner: web.AppRunner | None = None
        self._session: ClientSession | None = None
        self.server = SwarmServer(data_dir, fresh=fresh, backends={"scripted": self._make_backend})
        self.url = ""

    def _make_backend(self) -> ScriptedBackend:
        self.backends.append(ScriptedBackend(self._script))
        return self.backends[-1]

    @property
    def backend(self) -> ScriptedBackend:
        return self.backends[-1]

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Answer requests; an earlier training in the data folder goes on."""
        app = create_app(self.server, self._keyring)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        self._runner = runner
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._session = ClientSession(self.url)
        await self.server.open()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self.server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- short forms of what tests do

    @property
    def http(self) -> ClientSession:
        assert self._session is not None
        return self._session

    def config(self, **overrides: Any) -> dict[str, Any]:
        """A small scripted training; `overrides` may have dotted keys."""
        base = {
            "model": self.model,
            "batch_tasks": 1,
            "repeats": 2,
            "engine.kind": "scripted",
            "sampling.max_tokens": 256,
            "checkpoint.every_steps": 1,
            "batching.drain_s": 0.0,
        }
        return TrainConfig.from_dict(base | overrides).model_dump(mode="json")

    async def until(self, predicate: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Wait for what no event tells.

        Raises:
            TimeoutError: not within `limit_s`.
        """
        async with asyncio.timeout(limit_s):
            while not predicate():  # noqa: ASYNC110 - a test's condition has no event of its own
                await asyncio.sleep(0.001)

    async def boot(self, **overrides: Any) -> ServerStatus:
        """Start with a configuration and wait until episodes can be claimed, or it failed."""
        await self.server.start(self.config(**overrides))
        return await self.server.status_when(leaves=EngineState.BOOTING, wait_s=30)

    async def claim(self, task_id: str = "task", **request: Any) -> EpisodeGrant:
        return await self.server.claim(ClaimRequest(task_id=task_id, wait_s=10, **request), origin=self.url)

    async def end(self, episode_id: str, reward: Any = 1.0, submission_id: str | None = None) -> EndResult:
        body = EndRequest(reward=reward, submission_id=submission_id or uuid.uuid4().hex)
        return await self.server.end(episode_id, body)

    async def chat(self, key: str, content: str = "hello", **fields: Any) -> dict[str, Any]:
        """One unstreamed chat call; the answer's body.

        Raises:
            AssertionError: not answered with 200.
        """
        body = {"model": "swarm", "messages": [{"role": "user", "content": content}]} | fields
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def run_episode(self, task_id: str = "task", reward: float = 1.0, **request: Any) -> EndResult:
        """Claim, call once, end."""
        grant = await self.claim(task_id, **request)
        await self.chat(grant.api_key, f"{task_id}?")
        return await self.end(grant.episode_id, reward)
