"""Who sits in the seats: a model behind any OpenAI-compatible endpoint, or a player who follows no plan."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import openai

RULES = (
    "You play werewolves. The village wins when all werewolves are gone; the werewolves win when they are as many as "
    "the others. Play for your side and never tell others more than helps it. When you are given options, answer with "
    "one of them and nothing else."
)


class OpponentFails(RuntimeError):
    """The endpoint of an opponent gives no answer: the game cannot go on, and nobody is rewarded."""


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    api_key: str
    model: str
    trained: bool
    """A failure of a trained one is the server's, and passes as it is."""


class ModelPlayer:
    """One conversation that only grows, so that the turns of a seat are one training row."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._messages: list[Any] = [{"role": "system", "content": RULES}]
        self._news: list[str] = []

    def tell(self, news: str) -> None:
        self._news.append(news)

    def answer(self, question: str) -> str:
        """Raises:
        OpponentFails: what an opponent's endpoint refused, with its address.
        """
        self._messages.append({"role": "user", "content": "\n".join([*self._news, question])})
        self._news.clear()
        end = self._endpoint
        llm = _sdk().with_options(base_url=end.base_url, api_key=end.api_key)
        try:
            reply = llm.chat.completions.create(model=end.model, messages=self._messages)
        except openai.APIError as error:
            if end.trained:
                raise
            raise OpponentFails(
                f"the opponent {end.model} at {end.base_url} does not answer ({error}); check task.opponent_url, "
                "task.opponent_model and OPPONENT_API_KEY, or leave task.opponent_url out to play against no plan"
            ) from error
        said = reply.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": said})
        return said


class AimlessPlayer:
    """Says nothing of use and picks any option; needs no model."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def tell(self, news: str) -> None:
        """It does not listen."""

    def answer(self, question: str) -> str:
        options = re.search(r"one of: (.*)\.$", question)
        return self._draw.choice(options[1].split(", ")) if options else "I am not sure yet."


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all players: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each seat has its own")
