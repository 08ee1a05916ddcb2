"""Trains a model for each of several roles or seats, on a server of its own each, in common games.

    python examples/werewolves/train_roles.py --roles werewolf,seer                      # a server each, started here
    python examples/werewolves/train_roles.py --roles werewolf-1,werewolf-2,werewolf-3   # each werewolf its own
    python examples/werewolves/train_roles.py --roles werewolf,seer --server werewolf=http://a:10086 --server seer=…
    python examples/werewolves/train_roles.py … --set model=Qwen/Qwen2.5-14B-Instruct --set seer.lora.rank=16

Everybody without a model of their own is a fixed opponent, as in train.py. Keys of --set are TrainConfig's, for all
models or after a role's name for one, those under `task.`, and `steps`, `parallel`, `seed`. Results: OUT/<role>.jsonl,
a line a step, and OUT/win_rates.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import werewolf_games
from werewolf_players import Endpoint
from werewolf_rules import rewards_of

from swarmtune import Swarm, SwarmClient, TrainConfig
from swarmtune.config import ConfigError, nest
from swarmtune.errors import SwarmError
from swarmtune.local import LocalServer
from swarmtune.protocol import StepRecord
from swarmtune.swarm import SwarmEpisode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains a model for each of several roles, in common games.")
    parser.add_argument("--roles", required=True, help="comma-separated roles or seats, a model each")
    parser.add_argument("--server", action="append", default=[], metavar="ROLE=URL", help="a running server of a role")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{datetime.date.today():%Y-%m-%d}-werewolf-roles")
    options = parser.parse_args(argv)
    roles = options.roles.split(",")
    try:
        configs, table, loop = settings(roles, options.set)
        tasks = werewolf_games.make_tasks(table, loop["seed"])
        train(roles, _pairs(options.server), configs, tasks, loop, options.out)
    except (ConfigError, SwarmError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def settings(roles: Sequence[str], asked: Sequence[str]) -> tuple[dict[str, TrainConfig], werewolf_games.Table, Any]:
    """Configuration of each role, the table, and steps, parallel and seed of the loop.

    Raises:
        ConfigError
    """
    loop: dict[str, Any] = {"steps": werewolf_games.DEFAULTS["steps"], "parallel": 16, "seed": 0}
    common = {k: v for k, v in werewolf_games.DEFAULTS.items() if k not in loop}
    own: dict[str, dict[str, Any]] = {role: {} for role in roles}
    table: dict[str, Any] = {"trained": roles}
    for key, text in _pairs(asked).items():
        value = _value(text)
        first, _, rest = key.partition(".")
        if first in own:
            own[first][rest] = value
        elif first == "task":
            table[rest] = value
        elif key in loop:
            loop[key] = value
        else:
            common[key] = value
    configs = {role: TrainConfig.from_dict(nest(common | {"seed": loop["seed"]} | own[role])) for role in roles}
    try:
        return configs, werewolf_games.Table(**table), loop
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None


def train(
    roles: Sequence[str],
    urls: Mapping[str, str],
    configs: Mapping[str, TrainConfig],
    tasks: Sequence[Any],
    loop: Mapping[str, Any],
    out: Path,
) -> None:
    """Raises:
    SwarmError
    """
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out, roles)
    with ExitStack() as stack:
        servers = {
            role: urls.get(role) or stack.enter_context(LocalServer(out / f"server-{role}", fresh=True)).url
            for role in roles
        }
        swarm = stack.enter_context(Swarm({role: SwarmClient(url) for role, url in servers.items()}))
        swarm.start(dict(configs))
        swarm.train(
            tasks,
            rollout,
            steps=loop["steps"],
            parallel=loop["parallel"],
            seed=loop["seed"],
            on_step=results.step,
        )
    results.plot()


def rollout(task: Mapping[str, Any], episode: SwarmEpisode) -> dict[str, tuple[float, dict[str, float]]]:
    """One game; each role is rewarded for its own side."""
    models = {
        role: Endpoint(episode[role].base_url, episode[role].api_key, episode[role].model, trained=True)
        for role in episode
    }
    seed = next(iter(episode[role].seed for role in episode)) or 0
    result = werewolf_games.play(task, models, seed)
    rewards, metrics = rewards_of(result), werewolf_games.metrics_of(result)
    return {role: (rewards[side], metrics) for role, side in werewolf_games.sides_of(list(models)).items()}


class Results:
    """A file of steps for each role, and the curves of all. Steps are told from several threads."""

    def __init__(self, out: Path, roles: Sequence[str]) -> None:
        self._out = out
        self._rewards: dict[str, list[float]] = {role: [] for role in roles}
        self._lock = threading.Lock()

    def step(self, role: str, record: StepRecord) -> None:
        with self._lock, (self._out / f"{role}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": record.step, **record.metrics}) + "\n")
            self._rewards[role].append(record.metrics["reward/mean"])
            print(
                f"{role} step {record.step}  win rate {record.metrics['reward/mean']:.3f}", file=sys.stderr, flush=True
            )

    def plot(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for role, rewards in self._rewards.items():
            axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label=role)
        axes.set_xlabel("step")
        axes.set_ylabel("win rate of the side")
        axes.set_ylim(0, 1)
        axes.legend()
        figure.savefig(self._out / "win_rates.png", dpi=120)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    """Raises:
    ConfigError
    """
    if wrong := [text for text in texts if "=" not in text]:
        raise ConfigError(f"{wrong[0]}: write key=value")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def _value(text: str) -> Any:
    """As JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
