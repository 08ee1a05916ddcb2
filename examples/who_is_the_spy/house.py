"""The house player: knows the word list and plays by rule from what a player is told. No model.

It speaks a clue of its word that nobody has used, and votes for whoever's description fits its own word worst. It is
the static opponent on the CPU (static_endpoint.py), everyone in the mocked games of a warm-up (mock_games.py), and
the good answers of the checker.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from prompts import SECRET
from words import clues_of

Messages = Sequence[dict[str, str]]


def reply(messages: Messages) -> str:
    """The next move in a conversation of prompts.py; the same conversation gets the same one."""
    word = secret_of(messages)
    rng = random.Random("/".join(message["content"] for message in messages))
    names = names_asked_for(messages[-1]["content"])
    return _vote(names, word, messages, rng) if names else _describe(word, messages, rng)


def names_asked_for(question: str) -> list[str]:
    """The names a vote may choose from; none where a description is asked for."""
    found = re.search(r"names?: ([^.]*)\.$", question)
    return found[1].split(", ") if found else []


def secret_of(messages: Messages) -> str:
    """Raises:
    ValueError: no message says the word: this is no conversation of this game.
    """
    for message in messages:
        _, found, word = message["content"].partition(SECRET)
        if found:
            return word.split()[0].strip(".")
    raise ValueError(f"no message has the line {SECRET!r}")


def _describe(word: str, messages: Messages, rng: random.Random) -> str:
    said = " ".join(message["content"] for message in messages)
    unused = [clue for clue in clues_of(word) if clue not in said]
    return rng.choice(unused or [f"I think of it often, {rng.choice('in at on'.split())} many ways"])


def _vote(names: Sequence[str], word: str, messages: Messages, rng: random.Random) -> str:
    lines = {line for message in messages for line in message["content"].splitlines()}
    said = [line.partition(": ") for line in lines]

    def doubt(name: str) -> int:
        """Descriptions that are no clue of the own word."""
        return sum(speaker == name and text not in clues_of(word) for speaker, _, text in said)

    most = max(map(doubt, names))
    return rng.choice([name for name in names if doubt(name) == most])
