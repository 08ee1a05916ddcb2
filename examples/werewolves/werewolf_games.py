"""Games as tasks: who sits where, who is trained, who plays against them. Shared by the three scripts."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from werewolf_players import AimlessPlayer, Endpoint, ModelPlayer
from werewolf_rules import NINE_PLAYERS, Game, Player, Result, Role, Side, keys_of, rewards_of, seated

from swarmtune.client import Episode
from swarmtune.config import ConfigError
from swarmtune.script import Parameters
from swarmtune.swarm import SwarmEpisode

NAMES = (
    "Ada Ben Cleo Dan Ella Finn Gwen Hugo Iris Jack Kate Liam Mona Noah Olga Paul Quin Rosa Sam Tess Udo Vera Will Yara"
).split()
DEFAULTS: dict[str, Any] = {
    "model": "smollm2-135m",
    "steps": 8,
    "batch_tasks": 4,
    "repeats": 8,
    "parallel": 16,
    "train_side_calls": True,  # each seat is a conversation of its own
    "sampling.max_tokens": 48,
    "engine.context_length": 4096,
    "optim.lr": 1e-5,
    "checkpoint.every_steps": 0,
}


class Table(Parameters):
    """The game, who is trained in it, and the opponents."""

    trained: list[str] = Field(default=["werewolf"], min_length=1)
    """Roles ("seer") or seats ("werewolf-2") that a trained model plays."""
    games: int = Field(default=64, ge=1)
    """Different seatings."""
    max_days: int = Field(default=8, ge=1)
    opponent_url: str | None = None
    """OpenAI-compatible endpoint of everybody else; None plays against no plan."""
    opponent_model: str = "qwen3-235b-a22b"


def make_tasks(table: Table, seed: int) -> list[dict[str, Any]]:
    """Seatings. Names and roles are drawn for each; its repeats play the same one.

    Raises:
        ConfigError: a role that is not in the game.
    """
    sides_of(table.trained)
    settings = table.model_dump(mode="json")
    return [{"task_id": f"game-{seed}-{number}", **settings} for number in range(table.games)]


def shared_tasks(table: Table, seed: int) -> list[dict[str, Any]]:
    """Tasks for one model that plays all trained seats.

    Raises:
        ConfigError: the trained roles are of both sides, so that it would have to win and lose.
    """
    if len(set(sides_of(table.trained).values())) > 1:
        raise ConfigError(
            f"task.trained: {', '.join(table.trained)} are of both sides, and one model cannot win and lose at once; "
            "name roles of one side, or give each a model of its own with train_roles.py"
        )
    return make_tasks(table, seed)


def shared_rollout(task: Mapping[str, Any], episode: Episode) -> tuple[float, dict[str, float]]:
    """One game; all trained seats are played by the episode's model."""
    model = Endpoint(episode.base_url, episode.api_key, episode.model, trained=True)
    result = play(task, dict.fromkeys(task["trained"], model), episode.seed or 0)
    (side,) = set(sides_of(task["trained"]).values())
    return rewards_of(result)[side], metrics_of(result)


def rollout_of_roles(task: Mapping[str, Any], episode: SwarmEpisode) -> dict[str, tuple[float, dict[str, float]]]:
    """One game of several models; each trained role is rewarded for its own side."""
    models = {
        role: Endpoint(episode[role].base_url, episode[role].api_key, episode[role].model, trained=True)
        for role in episode
    }
    result = play(task, models, next((episode[role].seed for role in episode), None) or 0)
    rewards = rewards_of(result)
    return {role: (rewards[side], metrics_of(result)) for role, side in sides_of(list(models)).items()}


def sides_of(trained: Sequence[str]) -> dict[str, Side]:
    """Trained role or seat → its side.

    Raises:
        ConfigError: not in the game.
    """
    known: dict[str, Side] = {key: role.side for key, role in zip(keys_of(NINE_PLAYERS), NINE_PLAYERS, strict=True)}
    known |= {str(role): role.side for role in Role}
    if wrong := [key for key in trained if key not in known]:
        raise ConfigError(f"trained: {', '.join(wrong)} is not in the game; it has {', '.join(sorted(known))}")
    return {key: known[key] for key in trained}


def play(task: Mapping[str, Any], trained: Mapping[str, Endpoint], seed: int) -> Result:
    """One game of a seating; seats that nobody is trained for are the opponents'.

    Raises:
        OpponentFails: the opponents' endpoint does not answer.
    """
    seating = random.Random(task["task_id"])
    names = seating.sample(NAMES, len(NINE_PLAYERS))
    roles = seating.sample(NINE_PLAYERS, len(NINE_PLAYERS))
    chance = random.Random(seed)

    def player_of(key: str, role: Role) -> Player:
        endpoint = trained.get(key) or trained.get(str(role)) or _opponent(task)
        return AimlessPlayer(chance.getrandbits(32)) if endpoint is None else ModelPlayer(endpoint)

    return Game(seated(names, roles, player_of), seed, max_days=task["max_days"]).play()


def metrics_of(result: Result) -> dict[str, float]:
    return {
        "werewolves_win": float(result.winner == "werewolves"),
        "village_wins": float(result.winner == "village"),
        "days": float(result.days),
        "nonsense": float(sum(result.nonsense.values())),
    }


def _opponent(task: Mapping[str, Any]) -> Endpoint | None:
    if task["opponent_url"] is None:
        return None
    key = os.environ.get("OPPONENT_API_KEY", "none")
    return Endpoint(task["opponent_url"], key, task["opponent_model"], trained=False)
