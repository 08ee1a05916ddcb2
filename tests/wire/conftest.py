"""A swarm server whose scripted model says what a test tells it to, a byte at a time; and raw HTTP with its events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from swarmtune.protocol import EpisodeGrant
from swarmtune.testing import CHATML, LocalServer, chatml_model

LIBERAL = CHATML.replace(
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{% endif %}",
    "",
).replace(
    "+ message['content'] +",
    "+ ('<think>' + message['reasoning_content'] + '</think>\n\n' if message['reasoning_content'] else '') "
    "+ message['content'] +",
)
THINKING = LIBERAL.replace("<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think>\n' }}{% endif %}")


class Wire:
    """One episode of a local server, spoken to as a client does."""

    def __init__(self, local: LocalServer) -> None:
        self.local = local
        self.answers: list[str] = ["All is well."]
        """Said in turn; the last one from then on."""
        self.grant: EpisodeGrant
        self.headers: dict[str, str] = {}

    def say(self, *answers: str) -> None:
        self.answers = list(answers)

    def script(self, messages: Any, index: int) -> str:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def claim(self, **request: Any) -> None:
        self.grant = await self.local.claim(**request)
        self.headers = {"Authorization": f"Bearer {self.grant.api_key}"}

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON body, headers."""
        async with self.local.http.post(path, json=body, headers=self.headers | headers) as response:
            return response.status, await response.json(), response.headers

    async def ask(self, path: str, body: Any, **headers: str) -> Any:
        status, answer, _ = await self.post(path, body, **headers)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: Any, **headers: str) -> list[tuple[str | None, Any]]:
        """(event name, data) of a stream; comments are named `:`."""
        async with self.local.http.post(path, json=body | {"stream": True}, headers=self.headers | headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return parse_events((await response.read()).decode())

    @property
    def report(self) -> dict[str, Any]:
        return self.local.server.merge_report(self.grant.episode_id)

    @property
    def prompts(self) -> list[str]:
        """The text of each prompt that the engine was given."""
        renderer = self.local.server.live_run().renderer
        return [renderer.decode(r.prompt_token_ids, special=True) for r in self.local.backend.requests]

    async def end(self) -> Any:
        return await self.local.end(self.grant.episode_id)


def parse_events(text: str) -> list[tuple[str | None, Any]]:
    found: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n"):
        if block.startswith(":"):
            found.append((":", block))
        elif block:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = lines["data"]
            found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


@pytest.fixture(scope="session")
def liberal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose template takes a system message anywhere and shows earlier thinking."""
    return str(chatml_model(tmp_path_factory.mktemp("liberal") / "chatml", LIBERAL, context=8192))


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose prompts open its thinking."""
    return str(chatml_model(tmp_path_factory.mktemp("thinker") / "chatml", THINKING, context=8192))


@pytest.fixture
async def make_wire(liberal: str, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """await make_wire(model=…, **configuration) → a Wire with an episode claimed."""
    opened: list[LocalServer] = []

    async def make(model: str = liberal, **config: Any) -> Wire:
        local = LocalServer(tmp_path / f"data{len(opened)}", model, script=lambda m, i: wire.script(m, i))
        wire = Wire(local)
        await local.open()
        opened.append(local)
        defaults = {"engine.script_tokens_per_s": 20000.0, "engine.context_length": 8192, "sampling.max_tokens": 512}
        await local.boot(**(defaults | config))
        await wire.claim()
        return wire

    yield make
    for local in opened:
        await local.close()


@pytest.fixture
async def wire(make_wire: Callable[..., Any]) -> Wire:
    return await make_wire()
