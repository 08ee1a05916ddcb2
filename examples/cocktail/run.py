"""A cocktail: two clients in separate processes and virtual environments train one model on two tasks at once.

    python examples/cocktail/run.py [--out DIR] [--config FILE] [--python PYTHON]

Starts a server and both clients, each with a fixed share of every batch: a step begins when both agree to it. After
step 2 the second client is killed (SIGKILL), the first trains alone, and after step 4 the second is started again. At
the end a line a step lists the episodes and the mean reward of each client, and OUT/cocktail.png shows them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from environments import EnvironmentFailed, python_of

from swarmtune import SwarmClient
from swarmtune.config import ConfigError, TrainConfig
from swarmtune.local import LocalServer
from swarmtune.protocol import Event

HERE = Path(__file__).resolve().parent
CLIENTS = {"sums": "sums.py", "one-word": "one_word.py"}
KILLED = "one-word"
KILL_AFTER, RESTART_AFTER = 2, 4
"""Steps after which that client is killed and started again."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Two clients, one model; one client is killed and started again.")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{datetime.date.today():%Y-%m-%d}-cocktail")
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml")
    parser.add_argument("--environments", type=Path, default=HERE.parents[1] / ".venv-agents" / "cocktail")
    parser.add_argument("--python", type=Path, help="runs both clients, instead of environments of their own")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        steps = prepare(options.config, options.out / "clients.json")
        pythons = {name: options.python or python_of(name, options.environments) for name in CLIENTS}
    except (ConfigError, EnvironmentFailed) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    # In environments of their own the clients are to find what is installed there, not this checkout.
    environment = {k: v for k, v in os.environ.items() if options.python or k != "PYTHONPATH"}
    status, events = play(options.out, pythons, environment, steps)
    drunk = contributions(events)
    for step, each in drunk.items():
        parts = [f"{name} {len(rewards):>3} {mean(rewards):.3f}" for name, rewards in each.rewards.items()]
        print(f"step {step:>2}  {'  '.join(parts)}")
    plot(drunk, options.out / "cocktail.png")
    print(options.out / "cocktail.png")
    return status


def prepare(source: Path, target: Path) -> int:
    """Check the configuration and write what the clients read; the number of steps.

    Raises:
        ConfigError
    """
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    missing = {"train", "steps", "parallel", "shares"} - set(config)
    if missing or set(config["shares"]) != set(CLIENTS):
        raise ConfigError(f"{source}: needs train, steps, parallel, and shares for {' and '.join(CLIENTS)}")
    config["train"] = TrainConfig.from_dict(config["train"]).model_dump(mode="json")
    target.write_text(json.dumps(config, indent=1))
    return config["steps"]


def play(out: Path, pythons: dict[str, Path], environment: dict[str, str], steps: int) -> tuple[int, list[Event]]:
    """The training with its accident; the worse exit status of the two clients, and what happened."""
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer(out / "server", fresh=True))
        watch = stack.enter_context(SwarmClient(server.url))

        def start(name: str) -> subprocess.Popen[bytes]:
            command = [str(pythons[name]), str(HERE / CLIENTS[name]), "--server", server.url]
            process = subprocess.Popen([*command, "--config", str(out / "clients.json")], env=environment)
            stack.callback(_end, process)
            return process

        running = {name: start(name) for name in CLIENTS}
        _wait_started(watch, running)
        watch.wait_step(after=KILL_AFTER - 1)
        running[KILLED].kill()
        _say(f"{KILLED} was killed after step {watch.status().step}")
        watch.wait_step(after=RESTART_AFTER - 1)
        running[KILLED] = start(KILLED)
        _say(f"{KILLED} was started again after step {watch.status().step}")
        watch.wait_step(after=steps - 1)
        status = max(process.wait() for process in running.values())
        return status, watch.events_so_far()


@dataclass
class Step:
    """What each client put into a step's batch."""

    rewards: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CLIENTS})


def contributions(events: Sequence[Event]) -> dict[int, Step]:
    """Step → the rewards that each client had admitted since the step before."""
    steps: dict[int, Step] = {}
    collecting = Step()
    for event in events:
        if event.kind == "episode" and event.data.get("outcome") == "admitted":
            collecting.rewards[str(event.data["client"])].append(float(event.data["reward"]))
        elif event.kind == "step":
            steps[int(event.data["step"])] = collecting
            collecting = Step()
    return steps


def mean(rewards: Sequence[float]) -> float:
    return fmean(rewards) if rewards else float("nan")


def plot(steps: dict[int, Step], path: Path) -> None:
    """Above the mean reward of each client per step, below its episodes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    bottom = [0] * len(steps)
    for name in CLIENTS:
        rewards = [each.rewards[name] for each in steps.values()]
        above.plot(list(steps), [mean(r) for r in rewards], marker="o", label=name)
        below.bar(list(steps), [len(r) for r in rewards], bottom=bottom, label=name)
        bottom = [b + len(r) for b, r in zip(bottom, rewards, strict=True)]
    above.set_ylabel("mean reward")
    above.set_ylim(0, 1)
    above.legend()
    below.set_ylabel("episodes")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _wait_started(watch: SwarmClient, clients: dict[str, subprocess.Popen[Any]]) -> None:
    """Until all are registered.

    Raises:
        RuntimeError: one of them ended before.
    """
    while watch.status().clients < len(clients):
        for name, client in clients.items():
            if client.poll() is not None:
                raise RuntimeError(f"{name} ended with status {client.returncode} before training began")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(30)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
