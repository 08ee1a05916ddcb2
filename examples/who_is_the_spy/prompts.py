"""What the players are told and asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from game import Game, Seat, Void

_AGAIN = {
    "empty": "You said nothing.",
    "states_word": "You may not say your word.",
    "repeats": "Someone has said that already.",
    "confesses": "You may not say which side you are on.",
}
SECRET = "Your secret word is: "


def rules(seat: Seat) -> str:
    """The system message of one player. It does not say which side they are on: they do not know either."""
    return (
        f"You are {seat.name} and play Who is the Spy. Most players have the same secret word, a few spies have a "
        "similar one. Describe your word so that those who share it recognise you, and vote out those who do not. "
        f"{SECRET}{seat.word}"
    )


def describe(game: Game, seat: Seat) -> str:
    return f"{_said_so_far(game)}Describe your word in one short sentence. Do not say the word."


def describe_again(void: Void) -> str:
    return f"{_AGAIN[void.value]} Describe your word in one short sentence, in other words."


def vote(game: Game, seat: Seat, others: Sequence[str]) -> str:
    return f"{_said_so_far(game)}Who is the spy? Answer with one name: {', '.join(others)}."


def vote_again(others: Sequence[str]) -> str:
    return f"Answer with exactly one of these names: {', '.join(others)}."


def _said_so_far(game: Game) -> str:
    """The descriptions of this round, and who left in the round before."""
    *before, now = game.rounds
    lines = [f"Round {now.number}."]
    if before:
        lines.append(f"{before[-1].eliminated} was voted out.")
    lines += [f"{said.speaker}: {said.text or '(said nothing)'}" for said in now.descriptions]
    return "\n".join(lines) + "\n"
