"""The same random and good civilians as in the game with the honest reward."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import random
from collections.abc import Mapping, Sequence
from typing import Any

import house
from words import clues

Messages = Sequence[dict[str, str]]


def random_answer(task: Mapping[str, Any], messages: Messages, rng: random.Random) -> str:
    names = house.names_asked_for(messages[-1]["content"])
    return rng.choice(names or [clue for words in clues().values() for own in words.values() for clue in own])


def good_answer(task: Mapping[str, Any], messages: Messages) -> str:
    return house.reply(messages)
