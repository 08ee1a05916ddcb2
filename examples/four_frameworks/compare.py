"""Trains the task through each of the four clients, one after the other, and draws their reward curves in one plot.

    python examples/four_frameworks/compare.py [--out runs/four_frameworks] [arguments of train.py …]

A client whose results are there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CLIENTS = {"openai": "OpenAI SDK", "langchain": "LangChain", "agentscope": "AgentScope", "http": "plain HTTP"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains one task through four clients and plots the rewards.")
    parser.add_argument("--out", type=Path, default=Path("runs/four_frameworks"))
    options, rest = parser.parse_known_args(argv)
    for via in CLIENTS:
        folder = options.out / via
        if (folder / "eval.json").is_file():  # the last file that a run writes
            continue
        status = train(via, folder, rest)
        if status:
            return status
    curves = {via: rewards(options.out / via / "metrics.jsonl") for via in CLIENTS}
    plot(curves, options.out / "rewards.png")
    for via, curve in curves.items():
        print(f"{CLIENTS[via]:12}", " ".join(f"{reward:.2f}" for reward in curve))
    print(options.out / "rewards.png")
    return 0


def train(via: str, folder: Path, arguments: Sequence[str]) -> int:
    """The exit status of train.py."""
    script = Path(__file__).with_name("train.py")
    command = [sys.executable, str(script), "--out", str(folder), "--set", f"task.via={via}", *arguments]
    return subprocess.run(command, check=False).returncode


def rewards(metrics: Path) -> list[float]:
    """Mean reward of each step's batch."""
    return [json.loads(line)["reward/mean"] for line in metrics.read_text().splitlines()]


def plot(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (via, curve), marker in zip(curves.items(), "os^x", strict=True):
        axes.plot(range(1, len(curve) + 1), curve, marker=marker, alpha=0.8, label=CLIENTS[via])
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the batch")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
