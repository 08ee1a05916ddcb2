"""What `a3r client check` plays besides its own stubs: civilians that say anything, and the house player for them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import house
from words import clues

Messages = Sequence[dict[str, str]]


def random_answer(task: Mapping[str, Any], messages: Messages, rng: random.Random) -> str:
    """A clue of any word, or the name of anybody who can be voted for."""
    names = house.names_asked_for(messages[-1]["content"])
    return rng.choice(names or [clue for words in clues().values() for own in words.values() for clue in own])


def good_answer(task: Mapping[str, Any], messages: Messages) -> str:
    return house.reply(messages)
