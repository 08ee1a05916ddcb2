"""The engines side by side: tokens/s on the same prompts, weight sync as a share of a step, memory; then the update's
time per 1,000 tokens in one process and in ranks over Ray.

    python benchmarks/engines.py [--model smollm2-135m] [--engines hf vllm] [--requests 1 8 32] [--ranks 1 2]

Each engine runs as in training: an engine process with its trainer, through the same backend as the server's. A step is
the last of the rounds, trained as one batch of groups of eight; its share of weight sync is of generating, draining,
updating and syncing together. Memory is what the engine process and all it started hold between them (PSS).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import ranks

from swarmtune.config import TrainConfig
from swarmtune.engines.process import ProcessBackend
from swarmtune.types import FinishedEpisode, GenerateChunk, GenerateRequest, Sample, SamplingParams, TrainBatch

GROUP = 8


@dataclass(slots=True)
class Measured:
    start_s: float
    speeds: dict[int, float]
    """Requests together → tokens/s, median."""
    generate_s: float
    """Of the step's episodes."""
    step: dict[str, float]
    """Metrics of the step."""
    memory_mb: float


def make_prompts(count: int) -> list[list[int]]:
    """Distinct prompts of 24 to 48 tokens."""
    draw = random.Random(0)
    return [[draw.randrange(100, 40_000) for _ in range(draw.randint(24, 48))] for _ in range(count)]


async def generate(backend: ProcessBackend, prompts: list[list[int]], new_tokens: int) -> list[list[GenerateChunk]]:
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

    async def one(i: int, prompt: list[int]) -> list[GenerateChunk]:
        request = GenerateRequest(str(i), prompt, sampling, episode_id=f"e{i}")
        return [chunk async for chunk in backend.generate(request)]

    return await asyncio.gather(*[one(i, prompt) for i, prompt in enumerate(prompts)])


def make_batch(prompts: list[list[int]], answers: list[list[GenerateChunk]], step: int) -> TrainBatch:
    """Groups of GROUP answers are taken for one task's, and every second one is rewarded."""
    episodes = []
    for i, (prompt, chunks) in enumerate(zip(prompts, answers, strict=True)):
        said, blank = [token for chunk in chunks for token in chunk.token_ids], len(prompt)
        sample = Sample(
            sample_id=f"s{i}",
            episode_id=f"e{i}",
            task_id=f"t{i // GROUP}",
            token_ids=prompt + said,
            loss_mask=[0] * blank + [1] * len(said),
            logprobs=[0.0] * blank + [value for chunk in chunks for value in chunk.logprobs],
            weight_versions=[-1] * blank + [chunk.weight_version for chunk in chunks for _ in chunk.token_ids],
        )
        episodes.append(FinishedEpisode(f"e{i}", f"t{i // GROUP}", float(i % 2), [sample]))
    return TrainBatch(step, episodes)


def memory_mb(pid: int) -> float:
    """PSS of a process and its descendants."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True))) / 1e6


async def measure(kind: str, options: argparse.Namespace) -> Measured:
    config = TrainConfig.from_dict(
        {
            "model": options.model,
            "engine.kind": kind,
            "engine.threads": options.threads,
            "trainer.dtype": options.dtype,
            "batch_tasks": max(1, options.step_episodes // GROUP),
            "repeats": GROUP,
        }
    )
    backend = ProcessBackend()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        await backend.start(config, work_dir=Path(folder), resume=None)
        start_s = time.perf_counter() - began
        try:
            await generate(backend, make_prompts(2), 4)
            speeds = {}
            for count in options.requests:
                prompts, rates = make_prompts(count), []
                for _ in range(options.repetitions):
                    began = time.perf_counter()
                    answers = await generate(backend, prompts, options.new_tokens)
                    rates.append(sum(len(c.token_ids) for a in answers for c in a) / (time.perf_counter() - began))
                speeds[count] = statistics.median(rates)
            prompts = [p for p in make_prompts(options.step_episodes // GROUP) for _ in range(GROUP)]
            began = time.perf_counter()
            answers = await generate(backend, prompts, options.new_tokens)
            generate_s = time.perf_counter() - began
            result = await backend.train(make_batch(prompts, answers, 1))
            assert backend.pid is not None
            return Measured(start_s, speeds, generate_s, result.metrics, memory_mb(backend.pid))
        finally:
            await backend.stop()


def report(measured: dict[str, Measured], options: argparse.Namespace) -> None:
    def row(name: str, cells: list[str]) -> None:
        print(f"{name:36}" + "".join(f"{cell:>12}" for cell in cells))

    all_ = list(measured.values())
    row("", list(measured))
    row("start, s", [f"{m.start_s:.1f}" for m in all_])
    for count in options.requests:
        row(f"tokens/s, {count} requests together", [f"{m.speeds[count]:.0f}" for m in all_])
    row(f"step of {options.step_episodes} episodes: generate, s", [f"{m.generate_s:.2f}" for m in all_])
    for name in ("s/drain", "s/update", "s/weight_sync"):
        row(f"  {name}", [f"{m.step[name]:.2f}" for m in all_])
    whole = [m.generate_s + sum(m.step[n] for n in ("s/drain", "s/update", "s/weight_sync")) for m in all_]
    row(
        "  weight sync, share of the step",
        [f"{m.step['s/weight_sync'] / w:.1%}" for m, w in zip(all_, whole, strict=True)],
    )
    row("  logprob difference, mean", [f"{m.step['training/rollout_logprobs_diff_mean']:.1e}" for m in all_])
    row("memory, MB", [f"{m.memory_mb:.0f}" for m in all_])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a Hugging Face folder")
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32], help="how many run together")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--step-episodes", type=int, default=32, help="a multiple of eight")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], help="of the update; none leaves it out")
    parser.add_argument("--update-tokens", type=int, default=2000)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.model}, {options.dtype}")
    report({kind: asyncio.run(measure(kind, options)) for kind in options.engines}, options)
    if options.ranks:
        threads = options.threads or os.cpu_count() or 1
        ranks.compare(options.model, options.ranks, tokens=options.update_tokens, row=100, rounds=3, threads=threads)


if __name__ == "__main__":
    main()
