"""Two models trained against each other, each on a swarm server of its own, by one client.

    python examples/two_models/train.py [--model smollm2-135m] [--steps 12] [--out DIR] [--set KEY=VALUE …]

The duel: white names a number from 1 to 9, black hears it and answers with one of its own. The higher number wins,
equal numbers share the point, and who names no such number has lost. Each model gets its own points as reward. Without
--server (twice), two servers are started, and stopped with the script. In --out: metrics.jsonl (a line per role and
step) and duel.png (share of valid numbers and of points, by role and step).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import openai

from swarmtune import Swarm, SwarmClient, TrainConfig
from swarmtune.client import Episode
from swarmtune.local import LocalServer
from swarmtune.protocol import StepRecord
from swarmtune.swarm import SwarmEpisode

ROLES = ("white", "black")
PLACES = "harbour market bridge castle garden station theatre island forest desert museum lighthouse".split()
RULES = "You play a duel in the {place}. Each side names a whole number from 1 to 9; the higher one wins."
CONFIG = {
    "batch_tasks": 4,
    "repeats": 8,
    "sampling.max_tokens": 12,
    "engine.context_length": 192,
    "optim.lr": 2e-5,
    "checkpoint.every_steps": 0,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    metrics = options.out / "metrics.jsonl"
    metrics.write_text("")

    def note(role: str, record: StepRecord) -> None:
        with metrics.open("a") as file:
            file.write(json.dumps({"role": role, "step": record.step, **record.metrics}) + "\n")
        points, valid = record.metrics["reward/mean"], record.metrics["client/valid"]
        print(f"{role}: step {record.step:>2}/{options.steps}  valid {valid:.2f}  points {points:.2f}", file=sys.stderr)

    with ExitStack() as stack:
        urls = options.server or [
            stack.enter_context(LocalServer(options.out / role, fresh=True)).url for role in ROLES
        ]
        clients = {role: SwarmClient(url) for role, url in zip(ROLES, urls, strict=True)}
        swarm = stack.enter_context(Swarm(clients))
        swarm.start({role: _config(options, seed) for seed, role in enumerate(ROLES)})
        swarm.train(make_tasks(), duel, steps=options.steps, on_step=note)
    plot(read(metrics), options.out / "duel.png")
    print(options.out / "duel.png")
    return 0


def make_tasks() -> list[dict[str, str]]:
    return [{"task_id": place, "place": place} for place in PLACES]


def duel(task: Mapping[str, str], episode: SwarmEpisode) -> dict[str, tuple[float, dict[str, float]]]:
    """White first, black with white's number in its prompt; role → (points, metrics)."""
    rules = RULES.format(place=task["place"])
    white = number_in(ask(episode["white"], f"{rules} You go first. Your number:"))
    heard = "nothing that counts" if white is None else str(white)
    black = number_in(ask(episode["black"], f"{rules} The other side named {heard}. Your number:"))
    points = {"white": points_of(white, black), "black": points_of(black, white)}
    numbers = {"white": white, "black": black}
    return {role: (points[role], {"valid": float(numbers[role] is not None)}) for role in ROLES}


def ask(episode: Episode, question: str) -> str:
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    return llm.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content or ""


def number_in(answer: str) -> int | None:
    """The one number from 1 to 9 that an answer names; None when it names none, another one, or several."""
    found = re.findall(r"\d+", answer)
    return int(found[0]) if len(found) == 1 and found[0] in "123456789" else None


def points_of(mine: int | None, theirs: int | None) -> float:
    """1 for the higher number, 0.5 for an equal one, 0 for a lower one or none."""
    if mine is None:
        return 0.0
    if theirs is None or mine > theirs:
        return 1.0
    return 0.5 if mine == theirs else 0.0


def read(metrics: Path) -> dict[str, list[dict[str, float]]]:
    """Role → its steps in order."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {role: sorted((m for m in lines if m["role"] == role), key=lambda m: m["step"]) for role in ROLES}


def plot(steps: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, (name, title) in zip(axes, (("client/valid", "valid numbers"), ("reward/mean", "points")), strict=True):
        for role, records in steps.items():
            axis.plot([r["step"] for r in records], [r[name] for r in records], marker="o", label=role)
        axis.set(title=title, xlabel="step", ylim=(-0.05, 1.05))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _config(options: argparse.Namespace, seed: int) -> TrainConfig:
    asked = dict(setting.partition("=")[::2] for setting in options.set)
    return TrainConfig.from_dict(
        CONFIG | {"model": options.model, "seed": seed} | {k: _value(v) for k, v in asked.items()}
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Two models trained against each other.")
    parser.add_argument("--model", default="smollm2-135m", help="of both; each is trained by itself")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{datetime.date.today():%Y-%m-%d}-two-models")
    parser.add_argument("--server", action="append", metavar="URL", help="white's, then black's; default: own ones")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of both configurations")
    return parser


if __name__ == "__main__":
    sys.exit(main())
