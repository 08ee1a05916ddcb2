"""HTTP to one vLLM server: token ids in, token ids and logprobs out, and what a weight sync needs.

Knows vLLM's routes and wire forms (those of 0.32, with --enable-scale-out and VLLM_SERVER_DEV_MODE=1) and nothing else:
no processes, no routing, no weights. A call either returns, or raises Unreachable (the server is gone, hangs or failed:
ask again, here or elsewhere) or RequestRefused (it answered that it will not).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from swarmtune.backend import GenerateFailed, RequestRefused

GENERATE = "/inference/v1/generate"
NOT_FINITE = -9999.0
"""What vLLM writes for a logprob that is no number."""
_MAX_LINE_BYTES = 1 << 24
"""Of one event; a chunk of many tokens with alternatives is far smaller."""


class Unreachable(Exception):
    """No whole answer came; nothing says that another try would fail."""


class Interrupted(Exception):
    """`interrupt` ended this generation."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream says."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    """Per token {token id: logprob}, most likely first, when asked for."""
    finish_reason: str | None = None
    """vLLM's word: stop, length, abort, error."""
    weight_labels: frozenset[str] = frozenset()
    """Labels of the weights that sampled the whole answer; on the last piece alone."""


class VllmClient:
    """One server's address and connections. `close` it."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._responses: set[aiohttp.ClientResponse] = set()
        self._interruptions = 0

    # Generation.

    async def generate(self, body: Mapping[str, Any], *, top: int = 0) -> AsyncGenerator[Piece, None]:
        """Stream one generation; closing the iterator aborts it on the server.

        Args:
            body: of vLLM's GenerateRequest; `stream` is set here.
            top: how many alternatives per token to keep.

        Raises:
            Unreachable, RequestRefused
            Interrupted: by `interrupt`.
            GenerateFailed: a logprob is no number.
        """
        interruptions = self._interruptions
        try:
            async with self._http().post(self.url + GENERATE, json={**body, "stream": True}) as response:
                self._responses.add(response)
                try:
                    if self._interruptions != interruptions:
                        raise Interrupted
                    await _raise_for_status(response)
                    async for event in _events(response):
                        for piece in read_event(event, top):
                            yield piece
                            if piece.finish_reason is not None:
                                return
                finally:
                    self._responses.discard(response)
                    response.close()  # a connection that still carries a generation must not be used again
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if self._interruptions != interruptions:
                raise Interrupted from error
            raise Unreachable(f"{self.url}: {_line(error)}") from error
        raise Unreachable(f"{self.url}: the stream ended before the answer did")

    def interrupt(self) -> None:
        """End every generation that runs; what it has delivered stands."""
        self._interruptions += 1
        for response in list(self._responses):
            response.close()

    # Everything else.

    async def healthy(self, *, timeout_s: float) -> bool:
        with contextlib.suppress(Unreachable, RequestRefused):
            await self._call("GET", "/health", timeout_s=timeout_s)
            return True
        return False

    async def pause(self) -> None:
        """Abort what runs, begin nothing new; returns when no step is under way."""
        await self._call("POST", "/pause", params={"mode": "abort"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def reload_weights(self, folder: str) -> None:
        """Read safetensors with Hugging Face names into the running model."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._call("POST", "/collective_rpc", json=body)

    async def reset_prefix_cache(self) -> None:
        """Forget all keys and values.

        Raises:
            Unreachable: something still holds them.
        """
        answer = await self._call("POST", "/reset_prefix_cache")
        if not answer.get("success", True):
            raise Unreachable(f"{self.url}: the prefix cache is still in use")

    async def label_weights(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", json={"new_version": label})

    async def weight_label(self) -> str:
        return str((await self._call("GET", "/weight_info")).get("weight_version"))

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._call("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Any other POST."""
        return await self._call("POST", path, json=body)

    async def served_model(self) -> str:
        """Name of the base model."""
        models = (await self._call("GET", "/v1/models")).get("data") or [{}]
        return str(next((m["id"] for m in models if m.get("id") and not m.get("parent")), ""))

    async def close(self) -> None:
        self.interrupt()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                read_bufsize=_MAX_LINE_BYTES,
            )
        return self._session

    async def _call(self, method: str, path: str, *, timeout_s: float = 600.0, **fields: Any) -> Any:
        """One request, one answer: its JSON, {} where there is none.

        Raises:
            Unreachable, RequestRefused
        """
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http().request(method, self.url + path, timeout=limit, **fields) as response:
                await _raise_for_status(response)
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{self.url}{path}: {_line(error)}") from error
        try:
            return json.loads(text) if text else {}
        except ValueError:
            return {}


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    """4xx is a refusal, 5xx a failure of the server."""
    if response.status < 400:
        return
    told = f"{response.url}: {response.status} {_message(await response.text())}"
    if response.status < 500:
        raise RequestRefused(f"vLLM refused: {told}")
    raise Unreachable(told)


def _message(text: str) -> str:
    """The sentence in an error body of vLLM, or the body's beginning."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text[:200]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line until [DONE].

    Raises:
        ValueError: a line that is no JSON object.
    """
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event that is no object: {data[:80]!r}")
        yield event


def read_event(event: Mapping[str, Any], top: int) -> list[Piece]:
    """The pieces of one event; none for one without choices (usage).

    Raises:
        RequestRefused, Unreachable: the event reports an error: of the request, or of the server.
        GenerateFailed: a logprob is no number.
        ValueError: not vLLM's form.
    """
    if (error := event.get("error")) is not None:
        told = _message(json.dumps(event))
        if isinstance(error, dict) and error.get("code") in range(400, 500):
            raise RequestRefused(f"vLLM refused: {told}")
        raise Unreachable(f"vLLM failed: {told}")
    return [_read_choice(choice, top) for choice in event.get("choices") or ()]


def _read_choice(choice: Mapping[str, Any], top: int) -> Piece:
    try:
        tokens = [int(token) for token in choice.get("token_ids") or ()]
        content = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        alternatives = [_most_likely(entry, top) for entry in content] if top else None
        spans = choice.get("weight_versions") or ()
        labels = frozenset(str(span["version"]) for span in spans)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a choice of vLLM: {_line(error)}") from error
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
    if any(value <= NOT_FINITE for value in logprobs):
        raise GenerateFailed("the model's logits are not finite; a smaller learning rate may keep them so")
    return Piece(tokens, logprobs, alternatives, choice.get("finish_reason"), labels)


def _most_likely(entry: Mapping[str, Any], top: int) -> dict[int, float]:
    """vLLM puts the sampled token first, whatever its rank."""
    ranked = sorted((c["rank"], c["token_id"], c["logprob"]) for c in entry["top_logprobs"] if c["rank"])
    return {int(token): float(logprob) for rank, token, logprob in ranked if rank <= top}


def _line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if not isinstance(error, asyncio.TimeoutError) else "no answer in time"
