"""The mocked word list: words by kind, each with clues, and the pairs a game is played with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

WORDS_FILE = Path(__file__).with_name("words.txt")

FIRST_NAMES = (
    "Ada Amir Anika Aron Bea Boris Carla Chen Dana Diego Ebba Elias Farah Finn Greta Hana Hugo Ines Ivan Jana Jonas "
    "Kaito Karin Lars Leila Lena Luca Maja Malik Marta Milan Mina Nadia Nils Nora Olga Omar Paula Petra Quinn Ravi "
    "Rosa Samir Selma Sofia Sven Tara Theo Tuva Uma Vera Viktor Wanda Yara Yusuf Zoe"
).split()
LAST_NAMES = (
    "Abbott Adler Baker Becker Berg Blake Bondar Carter Castro Cole Dahl Davis Drake Ellis Engel Falk Fischer Foster "
    "Garcia Graham Hansen Hayes Holm Ibsen Ivanov Jensen Kaur Keller Kim Klein Lane Larsen Lopez Marsh Meyer Mills "
    "Mori Nagy Novak Olsen Ortiz Park Pereira Quist Reed Rossi Sato Silva Stone Tanaka Turner Ueda Vega Wagner Walsh "
    "West Wolf Young Zhang"
).split()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two words that are alike."""

    kind: str
    words: tuple[str, str]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.words[0]}-{self.words[1]}"


@cache
def clues() -> dict[str, dict[str, tuple[str, ...]]]:
    """Kind → word → its clues."""
    kinds: dict[str, dict[str, tuple[str, ...]]] = {}
    current: dict[str, tuple[str, ...]] = {}
    for line in WORDS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = kinds.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            word, _, listed = line.partition(": ")
            current[word] = tuple(listed.split("; "))
    return kinds


@cache
def clues_of(word: str) -> tuple[str, ...]:
    """The clues of a word; none where the list does not have it."""
    return next((words[word] for words in clues().values() if word in words), ())


@cache
def pairs() -> tuple[Pair, ...]:
    """Every two words of a kind."""
    return tuple(Pair(kind, both) for kind, words in clues().items() for both in combinations(words, 2))


def full_names(count: int, rng: random.Random) -> list[str]:
    """So many different names; no two share a first or a last name, so that each is enough to mean a player."""
    firsts, lasts = rng.sample(FIRST_NAMES, count), rng.sample(LAST_NAMES, count)
    return [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]
