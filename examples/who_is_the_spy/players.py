"""A player that is a model behind an OpenAI-style endpoint: one conversation over the whole game."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import openai
import prompts
from game import Seat

NO_KEY = "none"


class Endpoint(Protocol):
    """Where a model is asked; an episode is one."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StaticModel:
    """An endpoint that is not trained."""

    base_url: str
    model: str = "house"
    api_key: str = NO_KEY


@dataclass(slots=True)
class ChatPlayer:
    """Plays one seat. Calling it asks the model and returns its answer as text."""

    endpoint: Endpoint
    seat: Seat
    max_tokens: int
    use_tools: bool = False
    """Votes are asked for as a call of the tool `vote`; an answer in words is taken too."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, question: str, choices: Sequence[str]) -> str:
        """Raises:
        openai.APIError: the endpoint failed, after the SDK's own retries. It ends the episode: it is no move.
        """
        if not self.messages:
            self.messages.append({"role": "system", "content": prompts.rules(self.seat)})
        self.messages.append({"role": "user", "content": question})
        llm = _sdk().with_options(base_url=self.endpoint.base_url, api_key=self.endpoint.api_key)
        tools: Any = {"tools": [VOTE_TOOL]} if self.use_tools else {}
        messages: Any = self.messages
        reply = await llm.chat.completions.create(
            model=self.endpoint.model, messages=messages, max_tokens=self.max_tokens, **tools
        )
        message = reply.choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        self.messages.append(
            {"role": "assistant", "content": message.content or ""}
            | ({"tool_calls": [call.model_dump() for call in calls]} if calls else {})
        )
        self.messages += [{"role": "tool", "tool_call_id": call.id, "content": "noted"} for call in calls]
        return _voted(calls[0].function.arguments) if calls and choices else message.content or ""


VOTE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "vote",
        "description": "Vote a player out, when you are asked who the spy is.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
"""The same in every call of a game, so that a player's prompts go on where the last one ended."""


def _voted(arguments: str) -> str:
    """The name in a tool call; nothing where there is none, which the referee takes as no vote."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return ""
    return str(found.get("name", "")) if isinstance(found, dict) else ""


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = weakref.WeakKeyDictionary()


def _sdk() -> openai.AsyncOpenAI:
    """One SDK client per event loop: its connections belong to the loop; addresses and keys are each player's."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loop:
        _of_loop[loop] = openai.AsyncOpenAI(api_key=NO_KEY, timeout=300.0)
    return _of_loop[loop]
