"""agent_roll_adv: civilians and spies are two models, each trained on a swarm server of its own, against each other.

    python examples/who_is_the_spy/train_adversarial.py --steps 8        # starts both servers; results in runs/
    python examples/who_is_the_spy/train_adversarial.py --civilian-server URL --spy-server URL --config FILE

Configuration keys are those of train.py; both servers get the same. Files in --out: civilian.jsonl and spy.jsonl (a
line a step), win_rate.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from agents import agent_roll_adv, make_tasks
from game import Side
from train import SCRIPT, warm_up

from swarmtune import SwarmClient
from swarmtune.config import ConfigError
from swarmtune.local import LocalServer
from swarmtune.protocol import StepRecord
from swarmtune.script import ScriptConfig
from swarmtune.swarm import Swarm


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    asked: dict[str, Any] = yaml.safe_load(options.config.read_text(encoding="utf-8")) if options.config else {}
    asked |= {key: value for key in ("steps", "seed") if (value := getattr(options, key)) is not None}
    try:
        config = SCRIPT.resolve(asked)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out)
    with ExitStack() as stack:
        given = {Side.CIVILIAN: options.civilian_server, Side.SPY: options.spy_server}
        urls = {
            side: url or stack.enter_context(LocalServer(options.out / side.value, fresh=True)).url
            for side, url in given.items()
        }
        train(urls, config, results)
    results.plot()
    print(f"done: {results.summary()}", file=sys.stderr)
    return 0


def train(urls: dict[Side, str], config: ScriptConfig, results: Results) -> None:
    with Swarm({side.value: SwarmClient(url) for side, url in urls.items()}) as swarm:
        swarm.start(config.for_server())
        for side in Side:
            warm_up(swarm[side.value], config)
        swarm.train(
            make_tasks(config.parameters, config.seed),
            agent_roll_adv,
            steps=config.steps,
            parallel=config.parallel,
            attempts=config.attempts,
            seed=config.seed,
            on_step=results.step,
        )


class Results:
    """A line per step and side, and the plot of both win rates."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._rates: dict[str, dict[int, float]] = {side.value: {} for side in Side}

    def step(self, side: str, record: StepRecord) -> None:
        if (rate := record.metrics.get("reward/mean")) is not None:
            self._rates[side][record.step] = rate
        with (self._out / f"{side}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": record.step} | record.metrics) + "\n")

    def summary(self) -> str:
        return ", ".join(
            f"{side} wins {rates[max(rates)]:.2f} at step {max(rates)}" for side, rates in self._rates.items() if rates
        )

    def plot(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for side, rates in self._rates.items():
            axes.plot(list(rates), list(rates.values()), marker="o", label=side)
        axes.set_xlabel("step of the side's own model")
        axes.set_ylabel("win rate")
        axes.set_ylim(0.0, 1.0)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(self._out / "win_rate.png", dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains civilians and spies against each other.")
    parser.add_argument("--config", type=Path, help="YAML or JSON file with keys of train.py")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{datetime.date.today():%Y-%m-%d}-spy-adversarial")
    parser.add_argument("--civilian-server", metavar="URL", help="a running server; default: one of this script's own")
    parser.add_argument("--spy-server", metavar="URL", help="likewise")
    return parser


if __name__ == "__main__":
    sys.exit(main())
