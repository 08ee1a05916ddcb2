"""Mocked games for a supervised warm-up: the house player in every seat, told as the conversations of the winners.

python mock_games.py --games 2      # prints some
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import house
import prompts
from agents import GameParameters, dealt, make_tasks
from game import Seat, play

Conversation = dict[str, list[dict[str, str]]]


class HousePlayer:
    """Plays one seat by rule and keeps the conversation."""

    def __init__(self, seat: Seat) -> None:
        self.messages = [{"role": "system", "content": prompts.rules(seat)}]

    async def __call__(self, question: str, choices: Sequence[str]) -> str:
        self.messages.append({"role": "user", "content": question})
        said = house.reply(self.messages)
        self.messages.append({"role": "assistant", "content": said})
        return said


def conversations(parameters: GameParameters, *, games: int, seed: int) -> list[Conversation]:
    """`{"messages": […]}` of every winner of so many games."""
    tasks = make_tasks(parameters, seed)
    return [
        conversation
        for number in range(games)
        for conversation in asyncio.run(winners_of(tasks[number * 7 % len(tasks)], seed * 1_000_003 + number))
    ]


async def winners_of(task: Mapping[str, Any], seed: int) -> list[Conversation]:
    game, _ = dealt(task, seed)
    players = {seat.name: HousePlayer(seat) for seat in game.seats}
    winner = await play(game, players)
    return [{"messages": players[seat.name].messages} for seat in game.seats if seat.side is winner]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints mocked conversations, a JSON line each.")
    parser.add_argument("--games", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for conversation in conversations(GameParameters(), games=options.games, seed=options.seed):
        print(json.dumps(conversation))
