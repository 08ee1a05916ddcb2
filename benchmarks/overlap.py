"""Time per step with and without batching.overlap, on the same workload.

    python benchmarks/overlap.py [--engine hf] [--model tiny] [--steps 6] [--tool-s 2.0] [--update-s 2.0]

Agents call the model, wait for a pretended tool, and call it again; each setting trains the same tasks with the same
seeds in a server of its own, one after the other. A step's time is from one step's end to the next one's; the first
step, before which nothing can overlap, is left out. The last lines compare the settings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import openai

from swarmtune import SwarmClient, TrainConfig
from swarmtune.client import Episode
from swarmtune.local import LocalServer
from swarmtune.protocol import StepRecord

TASKS = [f"count to {n}" for n in range(10, 42)]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    found = {overlap: measure(options, overlap=overlap) for overlap in (False, True)}
    print(
        f"{'overlap':<8} {'s/step':>7} {'median':>7} {'update s':>9} {'rollout s':>10} {'staleness':>10} {'reward':>7}"
    )
    for overlap, records in found.items():
        print(f"{overlap!s:<8} {row_of(records)}")
    without, with_it = (fmean(seconds(found[overlap])) for overlap in (False, True))
    print(f"a step takes {with_it:.2f} s instead of {without:.2f} s: {100 * (1 - with_it / without):.0f} % less")
    return 0


def measure(options: argparse.Namespace, *, overlap: bool) -> list[StepRecord]:
    """The records of one training."""

    def rollout(task: str, episode: Episode) -> float:
        llm = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        messages: list[Any] = [{"role": "user", "content": f"Please {task}."}]
        reply = _ask(llm, messages)
        time.sleep(options.tool_s)
        _ask(llm, [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "And backwards."}])
        return float((episode.seed or 0) % 2)

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServer(Path(folder), fresh=True) as server,
        SwarmClient(server.url) as client,
    ):
        client.start(config_of(options, overlap=overlap))
        records = client.train(TASKS, rollout, steps=options.steps, parallel=options.parallel)
        client.stop()
    return records


def config_of(options: argparse.Namespace, *, overlap: bool) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "model": options.model,
            "batch_tasks": options.tasks,
            "repeats": options.repeats,
            "sampling.max_tokens": options.max_tokens,
            "engine.kind": options.engine,
            "engine.context_length": 512,
            "engine.threads": options.threads,
            "batching.overlap": overlap,
            "checkpoint.every_steps": 0,
            # Both settings compute the same loss, so that only the overlap differs.
            "algorithm.rollout_correction": {"rollout_is": "token"},
            **({"engine.script_update_s": options.update_s} if options.engine == "scripted" else {}),
        }
    )


def seconds(records: Sequence[StepRecord]) -> list[float]:
    """From each step's end to the next one's."""
    ends = [record.ended_at for record in records]
    return [after - before for before, after in pairwise(ends)]


def row_of(records: Sequence[StepRecord]) -> str:
    taken, later = seconds(records), records[1:]

    def mean(name: str) -> float:
        return fmean(record.metrics[name] for record in later)

    return (
        f"{fmean(taken):>7.2f} {median(taken):>7.2f} {mean('timing/update_s'):>9.2f} {mean('timing/rollout_s'):>10.2f} "
        f"{mean('staleness/mean'):>10.2f}"
    )


def _ask(llm: openai.OpenAI, messages: list[Any]) -> str:
    return llm.chat.completions.create(model="swarm", messages=messages).choices[0].message.content or ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time per step with and without batching.overlap.")
    parser.add_argument("--engine", choices=("hf", "scripted"), default="hf")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--threads", type=int, help="torch threads of the engine process; default: all cores")
    parser.add_argument("--tool-s", type=float, default=2.0, help="what each agent waits for its tool")
    parser.add_argument("--update-s", type=float, default=2.0, help="scripted engine: length of an update")
    return parser


if __name__ == "__main__":
    sys.exit(main())
