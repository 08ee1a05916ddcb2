"""Update time per 1,000 tokens with one process and with ranks over Ray, on the same episodes.

    python benchmarks/ranks.py                       tiny model, 1 process and 2 ranks
    python benchmarks/ranks.py --model smollm2-135m --tokens 4000 --ranks 1 2

Updates of the contestants alternate; medians are printed. All use the same number of torch threads together. On one
machine the ranks share its processors, so what they gain is what one process leaves unused, and what they cost is the
exchange of gradients and one more copy of the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from swarmtune import models
from swarmtune.config import TrainConfig
from swarmtune.trainer.trainer import Trainer
from swarmtune.types import FinishedEpisode, Sample, TrainBatch


def batch_of(tokens: int, row: int, vocabulary: int, step: int) -> TrainBatch:
    """Rows of `row` tokens, the second half sampled, four to a task, until there are `tokens`."""
    generator = torch.Generator().manual_seed(step)
    episodes = []
    for number in range(max(4, tokens // row)):
        ids = torch.randint(0, vocabulary, (row,), generator=generator).tolist()
        name, half = f"e{number}", row // 2
        sample = Sample(
            sample_id=name,
            episode_id=name,
            task_id=f"t{number // 4}",
            token_ids=ids,
            loss_mask=[0] * half + [1] * (row - half),
            logprobs=[0.0] * half + [-3.0] * (row - half),
            weight_versions=[-1] * half + [0] * (row - half),
        )
        episodes.append(FinishedEpisode(name, sample.task_id, reward=float(number % 2), samples=[sample]))
    return TrainBatch(step=step, episodes=episodes)


def memory_mb(trainer: Trainer) -> float:
    """Resident memory of this process, or of the ranks."""
    pids = getattr(getattr(trainer._model, "_group", None), "pids", None) or [os.getpid()]
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6


def compare(model: str, ranks: Sequence[int], *, tokens: int, row: int, rounds: int, threads: int) -> None:
    """Print the update time of each number of ranks."""
    torch.set_num_threads(threads)
    path = models.resolve(model)
    vocabulary = int(json.loads((path / "config.json").read_text())["vocab_size"])
    with tempfile.TemporaryDirectory() as scratch:
        trainers = {count: started(model, path, count, threads, Path(scratch)) for count in ranks}
        seconds: dict[int, list[float]] = {count: [] for count in trainers}
        norms: dict[int, float] = {}
        trained = 0
        for step in range(1, rounds + 2):
            batch = batch_of(tokens, row, vocabulary, step)
            trained = sum(len(s.token_ids) for e in batch.episodes for s in e.samples)
            for count, trainer in trainers.items():
                began = time.perf_counter()
                metrics = trainer.update(batch)
                if step == 1:  # warms up
                    norms[count] = metrics["actor/grad_norm"]
                else:
                    seconds[count].append((time.perf_counter() - began) / trained * 1000)
        print(f"{model}, {trained} tokens a step, {threads} threads in all, {rounds} rounds")
        for count, values in seconds.items():
            print(
                f"{count} rank(s): {statistics.median(values):.3f} s per 1,000 tokens "
                f"({min(values):.3f}-{max(values):.3f}), first gradient norm {norms[count]:.6g}, "
                f"{memory_mb(trainers[count]):.0f} MB resident"
            )
        for trainer in trainers.values():
            trainer.close()


def started(model: str, path: Path, ranks: int, threads: int, work_dir: Path) -> Trainer:
    spread = {"ray.processes": ranks} if ranks > 1 else {}
    config = TrainConfig.from_dict({"model": model, "engine.threads": threads} | spread)
    trainer = Trainer(config, path, work_dir=work_dir)
    trainer.start()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--row", type=int, default=200, help="tokens of a row")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    compare(
        options.model,
        options.ranks,
        tokens=options.tokens,
        row=options.row,
        rounds=options.rounds,
        threads=options.threads,
    )
    print(f"peak of the driver: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
