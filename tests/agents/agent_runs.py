"""Real clients against a gateway: the model that answers them, how they are run, and what of it trains."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmtune.protocol import EpisodeGrant
from swarmtune.testing import LocalServer
from swarmtune.types import Sample

Conversation = Sequence[Mapping[str, str]]
Line = str | Callable[[Conversation], str]
"""What the model says, or how it finds what to say in the conversation."""

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 250.0
"""No agent takes so long, on a busy machine either."""
END = "<|im_end|>"


def call(name: str, arguments: str, before: str = "") -> str:
    """An answer that calls a tool, spaced as a model may space it."""
    return f'{before}<tool_call>\n{{"name": "{name}",  "arguments": {arguments}}}\n</tool_call>'


def found(pattern: str, sentence: str) -> Callable[[Conversation], str]:
    """Says `sentence`, with what the pattern's group last matched in the conversation in place of `{}`."""

    def line(messages: Conversation) -> str:
        hits = re.findall(pattern, "\n".join(message["content"] for message in messages))
        return sentence.replace("{}", hits[-1] if hits else "nothing")

    return line


class ScriptedModel:
    """Says its lines in turn, the next one for each answer that the conversation already has."""

    def __init__(self) -> None:
        self.play()

    def play(self, *lines: Line, beside: str = "A side note", made_up: int = 0, tools: bool = True) -> None:
        """New lines, and nothing said so far.

        Args:
            beside: what it says in a conversation without tools, where the agent has some.
            made_up: assistant messages in the conversation that no model wrote.
            tools: whether the agent tells the model about tools.
        """
        self.lines = lines
        self.beside = beside
        self.made_up = made_up
        self.tools = tools
        self.said: list[str] = []
        """In the main conversation."""
        self.said_beside: list[str] = []
        self.heard: list[Conversation] = []
        """The conversations of `said`."""

    def __call__(self, messages: Conversation, index: int) -> str:
        messages = list(messages)
        if self.tools and "<tools>" not in messages[0]["content"]:
            self.said_beside.append(self.beside)
            return self.beside
        turn = sum(message["role"] == "assistant" for message in messages) - self.made_up
        line = self.lines[min(max(turn, 0), len(self.lines) - 1)]
        text = line if isinstance(line, str) else line(messages)
        self.said.append(text)
        self.heard.append(messages)
        return text


@dataclass(slots=True)
class Outcome:
    """An agent that ended by itself."""

    status: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """Everything it printed, for a failed assertion."""
        return f"status {self.status}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@dataclass(slots=True)
class Trained:
    """What an episode's calls became."""

    report: dict[str, Any]
    samples: list[Sample]
    answers: list[str]
    """Texts of the runs of tokens with loss mask 1, end mark included, in the rows' order."""


@dataclass(slots=True)
class Stage:
    """One gateway with its scripted model."""

    local: LocalServer
    model: ScriptedModel
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    async def claim(self, task: str = "task", **request: Any) -> EpisodeGrant:
        return await self.local.claim(task, **request)

    def trained(self, grant: EpisodeGrant) -> Trained:
        """The episode's training rows as they would be trained now; the tokens add up."""
        run = self.local.server.live_run()
        episode = run.book.by_key(grant.api_key)
        merged = run.merge(episode)
        assert merged.problem is None, merged.problem
        assert run.renderer is not None
        answers = []
        for sample in merged.samples:
            answers += [run.renderer.decode(ids, special=True) for ids in masked_runs(sample)]
        return Trained(run.merge_report(episode), merged.samples, answers)

    async def program(self, name: str, grant: EpisodeGrant, *arguments: str, python: str = sys.executable) -> Outcome:
        """Run tests/agents/programs/<name>.py with the episode's addresses in its environment."""
        environment = {
            "BASE_URL": grant.base_url,
            "ANTHROPIC_BASE_URL": grant.anthropic_base_url,
            "API_KEY": grant.api_key,
        }
        return await run_agent([python, str(PROGRAMS / f"{name}.py"), *arguments], self.folder, environment)


def masked_runs(sample: Sample) -> list[list[int]]:
    """Token ids of each unbroken run of loss mask 1."""
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return runs


async def run_agent(argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a program in `folder` with nothing of this process's environment but PATH, and a home of its own.

    Raises:
        AssertionError: it did not end within LIMIT_S; it was killed with its children.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    talk = asyncio.ensure_future(process.communicate())
    try:
        stdout, stderr = await asyncio.wait_for(asyncio.shield(talk), LIMIT_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = await talk
        out = Outcome(-9, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        raise AssertionError(f"{argv[0]} did not end within {LIMIT_S:g} s: {out.words}") from None
    return Outcome(process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """A blocking client, beside the server's event loop."""
    waiting: Awaitable[Any] = asyncio.to_thread(work, *args)
    return await asyncio.wait_for(waiting, LIMIT_S)
