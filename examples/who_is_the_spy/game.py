"""Who is the Spy: the rules, and a referee who plays one game with players that are asked in words.

Everyone gets a word: the civilians one, the spies another that is like it. Nobody is told which side they are on. Each
round all living players describe their word in turn, then all vote at once, and whoever has the most votes is out.
Civilians win when the last spy is out, spies when they are as many as the civilians.

What always holds: a game ends, in at most as many rounds as it has players; whatever a player says or fails to say is
settled by rule. A description that is none (nothing, the word itself, another's words again, a confession) is asked for
again a bounded number of times and then forfeited; a vote that is none becomes a vote drawn by lot. Draws depend on the
game's seed, the round and the player alone. Knows nothing of models: a player is a coroutine function.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import prompts
from words import Pair, full_names

Ask = Callable[[str, Sequence[str]], Awaitable[str]]
"""A player: (what is asked, the names to choose from; none for a description) → the answer as text."""

LONGEST_DESCRIPTION = 160
"""Characters of a description that the others hear."""
SAME_WORDS = 0.7
"""A description repeats another when so much of its words are the other's (three words at least)."""


class Side(StrEnum):
    CIVILIAN = "civilian"
    SPY = "spy"


class Void(StrEnum):
    """Why a description does not count."""

    EMPTY = "empty"
    STATES_WORD = "states_word"
    REPEATS = "repeats"
    CONFESSES = "confesses"


@dataclass(frozen=True, slots=True)
class Seat:
    name: str
    side: Side
    word: str


@dataclass(frozen=True, slots=True)
class Description:
    speaker: str
    text: str | None
    """None: forfeited."""
    voids: tuple[Void, ...] = ()
    """What was wrong with each attempt that did not count."""


@dataclass(frozen=True, slots=True)
class Ballot:
    voter: str
    target: str
    by_lot: bool
    """The voter named nobody who could be voted for."""


@dataclass(slots=True)
class Round:
    number: int
    """From 1."""
    descriptions: list[Description] = field(default_factory=list)
    ballots: list[Ballot] = field(default_factory=list)
    eliminated: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    attempts: int = 2
    """How often a player is asked for one description or vote."""
    refuse_repeats: bool = True
    """A description in another's words is void."""


@dataclass(slots=True)
class Game:
    """A game from its deal to its end."""

    seats: tuple[Seat, ...]
    seed: int
    rules: Rules = Rules()
    rounds: list[Round] = field(default_factory=list)

    @property
    def living(self) -> list[Seat]:
        out = {played.eliminated for played in self.rounds}
        return [seat for seat in self.seats if seat.name not in out]

    @property
    def winner(self) -> Side | None:
        """None while the game goes on."""
        sides = Counter(seat.side for seat in self.living)
        if not sides[Side.SPY]:
            return Side.CIVILIAN
        return Side.SPY if sides[Side.SPY] >= sides[Side.CIVILIAN] else None

    def seat(self, name: str) -> Seat:
        return next(seat for seat in self.seats if seat.name == name)

    def draw(self, *parts: object) -> random.Random:
        """Random numbers for one thing of this game, the same however the rest of it went."""
        return random.Random("/".join(map(str, (self.seed, *parts))))


def deal(pair: Pair, *, players: int, spies: int, seed: int, rules: Rules | None = None) -> Game:
    """Names, sides and words for everyone, all drawn from the seed.

    Raises:
        ValueError: the spies would have won before the first word.
    """
    if not 1 <= spies < players - spies:
        raise ValueError(f"{spies} spies among {players} players: at least one, and fewer than the civilians")
    rng = random.Random(f"{seed}/deal")
    names = full_names(players, rng)
    civilian_word, spy_word = rng.sample(pair.words, 2)
    sides = [Side.SPY] * spies + [Side.CIVILIAN] * (players - spies)
    rng.shuffle(sides)
    words = {Side.SPY: spy_word, Side.CIVILIAN: civilian_word}
    return Game(tuple(Seat(n, side, words[side]) for n, side in zip(names, sides, strict=True)), seed, rules or Rules())


async def play(game: Game, players: Mapping[str, Ask]) -> Side:
    """Play to the end; returns the winners.

    Raises:
        Exception: whatever a player raises: an endpoint that fails is no move of the game.
    """
    while (winner := game.winner) is None:
        game.rounds.append(now := Round(len(game.rounds) + 1))
        living = game.living
        game.draw("order", now.number).shuffle(living)
        for seat in living:
            now.descriptions.append(await _describe(game, seat, players[seat.name]))
        now.ballots = list(await asyncio.gather(*(_vote(game, seat, players[seat.name]) for seat in living)))
        now.eliminated = _most_voted(game, now)
    return winner


async def _describe(game: Game, seat: Seat, ask: Ask) -> Description:
    """Asks until a description counts, at most `rules.attempts` times."""
    question, voids = prompts.describe(game, seat), []
    for _ in range(game.rules.attempts):
        text = heard(await ask(question, ()))
        void = why_void(text, seat, game)
        if void is None:
            return Description(seat.name, text, tuple(voids))
        voids.append(void)
        question = prompts.describe_again(void)
    return Description(seat.name, None, tuple(voids))


async def _vote(game: Game, seat: Seat, ask: Ask) -> Ballot:
    """Asks until a vote names one other living player; after that the lot decides."""
    others = [other.name for other in game.living if other.name != seat.name]
    question = prompts.vote(game, seat, others)
    for _ in range(game.rules.attempts):
        target = named(await ask(question, others), others)
        if target is not None:
            return Ballot(seat.name, target, by_lot=False)
        question = prompts.vote_again(others)
    lot = game.draw("lot", game.rounds[-1].number, seat.name).choice(others)
    return Ballot(seat.name, lot, by_lot=True)


def _most_voted(game: Game, played: Round) -> str:
    """Who is out; the lot decides between equals."""
    votes = Counter(ballot.target for ballot in played.ballots)
    most = max(votes.values())
    return game.draw("tie", played.number).choice(sorted(name for name, count in votes.items() if count == most))


def heard(text: str) -> str:
    """What the others hear of an answer: its first line, without quotes, cut."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].strip("\"'*").strip()[:LONGEST_DESCRIPTION] if lines else ""


def why_void(text: str, seat: Seat, game: Game) -> Void | None:
    """Why a description does not count; None where it does."""
    words = _words(text)
    if not words:
        return Void.EMPTY
    if any(word.startswith(seat.word) for word in words):
        return Void.STATES_WORD
    if re.search(r"\b(i am|i'm)\s+(a|an|the)\s+(spy|civilian)\b", text.lower()):
        return Void.CONFESSES
    if game.rules.refuse_repeats and any(_repeats(words, _words(other)) for other in said_by_others(game, seat)):
        return Void.REPEATS
    return None


def said_by_others(game: Game, seat: Seat) -> list[str]:
    return [
        said.text
        for played in game.rounds
        for said in played.descriptions
        if said.text is not None and said.speaker != seat.name
    ]


def named(text: str, names: Sequence[str]) -> str | None:
    """The one of the names that a text means: by its first or last name; None for nobody or for several."""
    words = set(_words(text))
    found = [name for name in names if words & set(_words(name))]
    return found[0] if len(found) == 1 else None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def _repeats(words: Sequence[str], others: Sequence[str]) -> bool:
    mine = set(words)
    return len(mine) >= 3 and len(mine & set(others)) / len(mine) >= SAME_WORDS
