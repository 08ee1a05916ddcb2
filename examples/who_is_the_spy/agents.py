"""The two agents of the paper's appendix A: winners get reward 1, losers 0.

`agent_roll`: all civilians are the model that is trained, all spies a static model. `agent_roll_adv`: the civilians are
one trained model and the spies another, each on a swarm server of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from game import Game, Rules, Side, Void, deal, play
from players import NO_KEY, ChatPlayer, Endpoint, StaticModel
from pydantic import Field
from static_endpoint import StaticEndpoint
from words import Pair, pairs

from swarmtune.script import Parameters

OPPONENT_URL = "SPY_OPPONENT_URL"
"""Environment variable with the static endpoint's address; without it the house player is started in this process."""
Metrics = dict[str, float]


class GameParameters(Parameters):
    """Which games are played."""

    players: int = Field(default=4, ge=3, le=12)
    spies: int = Field(default=1, ge=1)
    answer_tokens: int = Field(default=24, ge=8)
    """Longest answer of a player."""
    attempts: int = Field(default=2, ge=1, le=4)
    """How often a player is asked for one description or vote."""
    tools: bool = False
    """Votes as tool calls."""
    opponent_model: str = "house"
    """agent_roll: the model's name at the static endpoint."""
    opponent_key_env: str = ""
    """agent_roll: environment variable with the static endpoint's key; empty for none."""
    kinds: int = Field(default=18, ge=1, le=18)
    """The first so many kinds of words are played."""


def make_tasks(parameters: GameParameters, seed: int) -> list[dict[str, Any]]:
    """Every pair of words once; names, sides and order of speech are each episode's own."""
    settings = {name: getattr(parameters, name) for name in GameParameters.model_fields}
    kinds = list(dict.fromkeys(pair.kind for pair in pairs()))[: parameters.kinds]
    return [
        {"task_id": pair.name, "kind": pair.kind, "words": list(pair.words), "game": settings}
        for pair in pairs()
        if pair.kind in kinds
    ]


async def agent_roll(task: Mapping[str, Any], episode: Any) -> tuple[float, Metrics]:
    """One game of trained civilians against static spies; reward 1 when the civilians win."""
    game, settings = dealt(task, episode.seed)
    opponent = static_opponent(settings)
    sides: dict[Side, Endpoint] = {Side.CIVILIAN: episode, Side.SPY: opponent}
    winner = await play(game, seated(game, sides, settings))
    return float(winner is Side.CIVILIAN), metrics_of(game, Side.CIVILIAN)


async def agent_roll_adv(task: Mapping[str, Any], episode: Any) -> dict[str, tuple[float, Metrics]]:
    """One game of two trained models, roles `civilian` and `spy` of a Swarm; each side's reward is whether it won."""
    game, settings = dealt(task, episode[Side.CIVILIAN].seed)
    sides: dict[Side, Endpoint] = {side: episode[side] for side in Side}
    winner = await play(game, seated(game, sides, settings))
    return {side: (float(winner is side), metrics_of(game, side)) for side in Side}


def dealt(task: Mapping[str, Any], seed: int | None) -> tuple[Game, GameParameters]:
    """The episode's game: everything random in it follows from the episode's seed."""
    settings = GameParameters.model_validate(task["game"])
    pair = Pair(task["kind"], (task["words"][0], task["words"][1]))
    rules = Rules(attempts=settings.attempts)
    return deal(pair, players=settings.players, spies=settings.spies, seed=seed or 0, rules=rules), settings


def seated(game: Game, sides: Mapping[Side, Endpoint], settings: GameParameters) -> dict[str, ChatPlayer]:
    """A player for each seat, each with a conversation of its own; those of a side share its model."""
    return {
        seat.name: ChatPlayer(sides[seat.side], seat, settings.answer_tokens, settings.tools) for seat in game.seats
    }


def static_opponent(settings: GameParameters) -> StaticModel:
    """Raises:
    RuntimeError: the key's variable is not set.
    """
    url, key_env = os.environ.get(OPPONENT_URL) or _house().url, settings.opponent_key_env
    if key_env and not os.environ.get(key_env):
        raise RuntimeError(f"task.opponent_key_env: the environment variable {key_env} is not set")
    return StaticModel(url, settings.opponent_model, os.environ[key_env] if key_env else NO_KEY)


@cache
def _house() -> StaticEndpoint:
    """The house player, for as long as this process lives."""
    return StaticEndpoint().__enter__()


def metrics_of(game: Game, side: Side) -> Metrics:
    """How one side played, as shares of its descriptions and votes."""
    mine = {seat.name for seat in game.seats if seat.side is side}
    said = [d for played in game.rounds for d in played.descriptions if d.speaker in mine]
    votes = [b for played in game.rounds for b in played.ballots if b.voter in mine]
    against = [b for b in votes if game.seat(b.target).side is not side]
    shares = {
        "describe/forfeited": (sum(d.text is None for d in said), len(said)),
        **{f"describe/{void}": (sum(void in d.voids for d in said), len(said)) for void in Void},
        "vote/by_lot": (sum(b.by_lot for b in votes), len(votes)),
        "vote/against_other_side": (len(against), len(votes)),
    }
    return {name: count / total for name, (count, total) in shares.items()} | {"game/rounds": float(len(game.rounds))}
