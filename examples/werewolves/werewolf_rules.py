"""The game of werewolves: nights, days, and who has won. Knows nothing of models; players are asked through `Player`.

Night: the werewolves choose a victim; the seer learns one player's side; the witch hears of the victim and may use one
of her two potions. Day: the dead are announced, everyone speaks, everyone votes; whoever has most votes leaves with
last words, a tie sends nobody away. A hunter who is killed by werewolves or voted out may shoot somebody; one who is
poisoned may not. The village wins when no werewolf is alive, the werewolves when they are at least as many as the
others; after `max_days` nobody.

What always holds: a game follows from its seed and the players' answers; an answer that names none of the options is
asked for once more and then decided by rule: an optional move is not made, a necessary one is drawn. It is counted,
never an error.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol


class Role(StrEnum):
    WEREWOLF = "werewolf"
    VILLAGER = "villager"
    SEER = "seer"
    WITCH = "witch"
    HUNTER = "hunter"

    @property
    def side(self) -> Side:
        return "werewolves" if self is Role.WEREWOLF else "village"


Side = Literal["werewolves", "village"]
NINE_PLAYERS = (*[Role.WEREWOLF] * 3, *[Role.VILLAGER] * 3, Role.SEER, Role.WITCH, Role.HUNTER)
NOBODY = "nobody"
_SPEECH_CHARACTERS = 400


class Player(Protocol):
    """Whoever sits in a seat. What a player is told comes in order; what it answers is text."""

    def tell(self, news: str) -> None: ...

    def answer(self, question: str) -> str: ...


@dataclass
class Seat:
    name: str
    role: Role
    player: Player
    alive: bool = True
    nonsense: int = 0
    """Answers that named none of the options."""


@dataclass(frozen=True)
class Result:
    winner: Side | None
    """None when the days ran out."""
    days: int
    nonsense: dict[str, int]
    """Seat's name → answers that named none of the options."""
    log: list[str] = field(default_factory=list)
    """Everything that happened, for a reader who may know all."""


class Game:
    def __init__(self, seats: Sequence[Seat], seed: int, *, max_days: int = 8) -> None:
        """Raises:
        ValueError: two seats with one name, or no game with these roles.
        """
        names = [seat.name for seat in seats]
        if len(set(names)) != len(names) or NOBODY in names:
            raise ValueError(f"seats: every name once, and none is {NOBODY!r}; got {', '.join(names)}")
        wolves = sum(seat.role is Role.WEREWOLF for seat in seats)
        if not 0 < wolves < len(seats) - wolves:
            raise ValueError(f"seats: {wolves} of {len(seats)} are werewolves; take at least 1 and fewer than others")
        self._seats = list(seats)
        self._draw = random.Random(seed)
        self._max_days = max_days
        self._potions = {"antidote", "poison"}
        self._log: list[str] = []

    def play(self) -> Result:
        """From the first night to the end. What a player raises ends the game."""
        for seat in self._seats:
            seat.player.tell(self._introduction(seat))
        day = 0
        while day < self._max_days and self._winner() is None:
            day += 1
            self._night(day)
            if self._winner() is None:
                self._day(day)
        winner = self._winner()
        self._log.append(f"winner: {winner}")
        return Result(winner, day, {seat.name: seat.nonsense for seat in self._seats}, self._log)

    # -- night

    def _night(self, day: int) -> None:
        self._announce(f"Night {day} falls.")
        victim = self._hunt()
        self._look()
        saved, poisoned = self._brew(victim)
        dead = [] if victim is None or saved else [victim]
        if poisoned is not None and poisoned not in dead:
            dead.append(poisoned)
        for seat in dead:
            seat.alive = False
        names = " and ".join(seat.name for seat in dead)
        self._announce(f"Day {day} breaks. {names or NOBODY.title()} died in the night.")
        if victim in dead and victim is not poisoned:
            self._last_shot(victim)

    def _hunt(self) -> Seat | None:
        """Each werewolf names a victim, hearing the others' choices; the most named is taken, ties are drawn."""
        wolves = [seat for seat in self._alive() if seat.role is Role.WEREWOLF]
        options = [seat.name for seat in self._alive() if seat.role is not Role.WEREWOLF]
        choices: list[str] = []
        for wolf in wolves:
            heard = f" So far: {', '.join(choices)}." if choices else ""
            choices.append(self._choose(wolf, f"Werewolves: whom do you kill tonight?{heard}", options))
        victim = self._seat(self._draw.choice(_most_named(choices)))
        for wolf in wolves:
            wolf.player.tell(f"The werewolves chose {victim.name}.")
        self._log.append(f"werewolves chose {victim.name}")
        return victim

    def _look(self) -> None:
        for seer in self._alive(Role.SEER):
            others = [seat.name for seat in self._alive() if seat is not seer]
            seen = self._seat(self._choose(seer, "Seer: whose side do you want to know?", others))
            truth = "a werewolf" if seen.role is Role.WEREWOLF else "no werewolf"
            seer.player.tell(f"{seen.name} is {truth}.")
            self._log.append(f"seer saw {seen.name}")

    def _brew(self, victim: Seat | None) -> tuple[bool, Seat | None]:
        """Whether the victim is saved, and who is poisoned: one potion a night at most."""
        for witch in self._alive(Role.WITCH):
            if victim is not None and "antidote" in self._potions:
                question = f"Witch: the werewolves attack {victim.name}. Do you use your only antidote?"
                if self._choose(witch, question, ["yes", "no"], otherwise="no") == "yes":
                    self._potions.discard("antidote")
                    self._log.append(f"witch saved {victim.name}")
                    return True, None
            if "poison" in self._potions:
                others = [seat.name for seat in self._alive() if seat is not witch and seat is not victim]
                question = "Witch: whom do you give your only poison?"
                choice = self._choose(witch, question, [*others, NOBODY], otherwise=NOBODY)
                if choice != NOBODY:
                    self._potions.discard("poison")
                    self._log.append(f"witch poisoned {choice}")
                    return False, self._seat(choice)
        return False, None

    # -- day

    def _day(self, day: int) -> None:
        speakers = self._alive()
        first = self._draw.randrange(len(speakers))
        for seat in speakers[first:] + speakers[:first]:
            self._speech(seat, "says", "It is your turn to speak to all. Say at most three sentences.")
        votes: dict[str, str] = {}
        for seat in self._alive():
            others = [other.name for other in self._alive() if other is not seat]
            question = "Vote: who is to leave?"
            votes[seat.name] = self._choose(seat, question, [*others, NOBODY], otherwise=NOBODY)
        self._announce("Votes: " + ", ".join(f"{voter} → {choice}" for voter, choice in votes.items()) + ".")
        most = _most_named([choice for choice in votes.values() if choice != NOBODY])
        if len(most) != 1:
            self._announce("Nobody leaves today.")
            return
        loser = self._seat(most[0])
        loser.alive = False
        self._announce(f"{loser.name} has to leave.")
        self._speech(loser, "says as last words", "You have to leave. Your last words to all, at most two sentences.")
        self._last_shot(loser)

    def _last_shot(self, seat: Seat | None) -> None:
        if seat is None or seat.role is not Role.HUNTER or self._winner() is not None:
            return
        others = [other.name for other in self._alive()]
        choice = self._choose(seat, "Hunter: whom do you shoot?", [*others, NOBODY], otherwise=NOBODY)
        if choice != NOBODY:
            self._seat(choice).alive = False
            self._announce(f"{seat.name} was the hunter and shot {choice}.")

    # -- asking and telling

    def _choose(self, seat: Seat, question: str, options: Sequence[str], *, otherwise: str | None = None) -> str:
        """One of the options. Nonsense is asked again once; then it is `otherwise`, or drawn where that is None."""
        asked = f"{question} Answer with one of: {', '.join(options)}."
        for again in ("", "That was none of them. "):
            choice = named_in(seat.player.answer(again + asked), options)
            if choice is not None:
                return choice
            seat.nonsense += 1
        choice = otherwise if otherwise is not None else self._draw.choice(list(options))
        seat.player.tell(f"It counts as: {choice}.")
        self._log.append(f"{seat.name} answered nonsense; taken as {choice}")
        return choice

    def _speech(self, seat: Seat, how: str, question: str) -> None:
        said = " ".join(seat.player.answer(question).split())[:_SPEECH_CHARACTERS]
        if not said:
            seat.nonsense += 1
        self._announce(f'{seat.name} {how}: "{said}"' if said else f"{seat.name} says nothing.", but=seat)

    def _announce(self, news: str, but: Seat | None = None) -> None:
        self._log.append(news)
        for seat in self._seats:
            if seat is not but:
                seat.player.tell(news)

    def _introduction(self, seat: Seat) -> str:
        counts = Counter(str(each.role) for each in self._seats)
        pack = [each.name for each in self._seats if each.role is Role.WEREWOLF and each is not seat]
        mates = f" The other werewolves: {', '.join(pack) or NOBODY}." if seat.role is Role.WEREWOLF else ""
        roles = ", ".join(f"{count} {role}" for role, count in counts.items())
        players = ", ".join(each.name for each in self._seats)
        return f"You are {seat.name}, your role is {seat.role}.{mates} Players: {players}. Roles: {roles}."

    # -- state

    def _alive(self, role: Role | None = None) -> list[Seat]:
        return [seat for seat in self._seats if seat.alive and role in (None, seat.role)]

    def _seat(self, name: str) -> Seat:
        return next(seat for seat in self._seats if seat.name == name)

    def _winner(self) -> Side | None:
        wolves = len(self._alive(Role.WEREWOLF))
        if wolves == 0:
            return "village"
        return "werewolves" if wolves >= len(self._alive()) - wolves else None


def named_in(text: str, options: Sequence[str]) -> str | None:
    """The option that an answer names: the only one in it, or the only one in its last line; None otherwise."""
    for part in (text, next(iter(text.strip().splitlines()[::-1]), "")):
        found = [o for o in options if re.search(rf"(?<!\w){re.escape(o)}(?!\w)", part, re.IGNORECASE)]
        if len(found) == 1:
            return found[0]
    return None


def _most_named(names: Sequence[str]) -> list[str]:
    """Those named most often, in order of first mention."""
    counts = Counter(names)
    return [name for name, count in counts.items() if count == max(counts.values())]


def seated(names: Sequence[str], roles: Sequence[Role], player_of: Callable[[str, Role], Player]) -> list[Seat]:
    """`player_of(key, role)` where key tells several of one role apart: "werewolf-1", "werewolf-2", …, "seer"."""
    keys = keys_of(roles)
    return [Seat(name, role, player_of(key, role)) for name, role, key in zip(names, roles, keys, strict=True)]


def keys_of(roles: Sequence[Role]) -> list[str]:
    """A key for each seat: the role, numbered where there are several of it."""
    total, seen = Counter(roles), Counter[Role]()
    keys = []
    for role in roles:
        seen[role] += 1
        keys.append(f"{role}-{seen[role]}" if total[role] > 1 else str(role))
    return keys


def rewards_of(result: Result) -> Mapping[Side, float]:
    """1 for the side that won, 0 for the other; 0 for both when nobody did."""
    return {"werewolves": float(result.winner == "werewolves"), "village": float(result.winner == "village")}
