"""What the speed suite runs at every commit: update, engine, gateway, or a whole small training.

    python speed_probe.py PART --config FILE --seed N --out DIR

Writes eval.json. A time is the shortest of several rounds: what disturbs a round only makes it longer. CPU times are of
this process and its threads. Everything uses random weights of 3 M parameters; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MODEL = "tiny"


def shortest(work: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """(wall, CPU) seconds of the shortest of some rounds, after one that does not count."""
    work(0)
    walls, cpus = [], []
    for number in range(1, rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        work(number)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def update(seed: int, rounds: int) -> dict[str, float]:
    """The trainer's update of a batch of 24 one-turn episodes."""
    from swarmtune import models
    from swarmtune.config import TrainConfig
    from swarmtune.trainer.trainer import Trainer

    folder = models.resolve(MODEL)
    batches = [make_batch(seed * 1000 + n, n + 1) for n in range(rounds + 1)]
    tokens = sum(len(s.token_ids) for e in batches[0].episodes for s in e.samples)
    with tempfile.TemporaryDirectory() as work:
        trainer = Trainer(TrainConfig.from_dict({"model": str(folder), "repeats": 8}), folder, work_dir=Path(work))
        trainer.start()
        wall, cpu = shortest(lambda n: trainer.update(batches[n]), rounds)
    return {
        "update/s_per_1000_tokens": wall / tokens * 1000,
        "update/cpu_s_per_1000_tokens": cpu / tokens * 1000,
        "update/peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def make_batch(seed: int, step: int):
    """Three tasks of eight episodes: 48 to 54 prompt tokens in common, 32 sampled ones each; every seed's is as big."""
    from swarmtune.types import FinishedEpisode, Sample, TrainBatch

    draw = random.Random(seed)
    episodes = []
    for index in range(24):
        task = index // 8
        shared = random.Random(seed * 100 + task)
        head = [shared.randrange(1000) for _ in range(48 + 3 * task)]
        tail = [draw.randrange(1000) for _ in range(32)]
        sample = Sample(
            sample_id=f"s{index}", episode_id=f"e{index}", task_id=f"t{task}", token_ids=head + tail,
            loss_mask=[0] * len(head) + [1] * len(tail), logprobs=[0.0] * len(head) + [-9.0] * len(tail),
            weight_versions=[-1] * len(head) + [0] * len(tail),
        )  # fmt: skip
        episodes.append(
            FinishedEpisode(episode_id=f"e{index}", task_id=f"t{task}", reward=draw.random(), samples=[sample])
        )
    return TrainBatch(step=step, episodes=episodes)


def engine(seed: int, rounds: int) -> dict[str, float]:
    """The embedded engine: 32 requests of 32 new tokens together."""
    import torch

    from swarmtune import models
    from swarmtune.engines.hf import load_model
    from swarmtune.engines.rolling import RollingBatch
    from swarmtune.types import GenerateRequest, SamplingParams

    model = load_model(models.resolve(MODEL), torch.float32, context_length=512)
    draw = random.Random(seed)
    prompts = [[draw.randrange(100, 1000) for _ in range(32)] for _ in range(32)]

    def generate(number: int) -> None:
        batch = RollingBatch(
            model, max_batch=32, context_length=512, decode=lambda ids: "", eos_token_ids=frozenset(), seed=number
        )
        for i, prompt in enumerate(prompts):
            batch.submit(GenerateRequest(str(i), prompt, SamplingParams(max_tokens=32, temperature=1.0)))
        while batch.has_work:
            batch.step()

    wall, cpu = shortest(generate, rounds)
    return {"engine/hf_tokens_per_s": 32 * 32 / wall, "engine/hf_cpu_ms_per_token": cpu / (32 * 32) * 1000}


def gateway(seed: int, rounds: int) -> dict[str, float]:
    """Chat calls through the whole server with the scripted engine; server and caller share this process."""
    import asyncio

    from swarmtune.testing import LocalServer, chatml_model

    calls = 150

    async def serve(folder: Path) -> tuple[float, float]:
        model = str(chatml_model(folder / "model"))
        async with LocalServer(folder / "data", model, script=lambda messages, index: "ready") as local:
            await local.boot(batch_tasks=64, repeats=64)
            grant = await local.claim("task")
            walls, cpus = [], []
            for number in range(rounds + 1):
                wall, cpu = time.perf_counter(), time.process_time()
                for call in range(calls):
                    await local.chat(grant.api_key, f"call {seed} {number} {call}: {'word ' * 40}")
                walls.append(time.perf_counter() - wall)
                cpus.append(time.process_time() - cpu)
            await local.end(grant.episode_id)
            return min(walls[1:]), min(cpus[1:])

    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = asyncio.run(serve(Path(folder)))
    return {"gateway/calls_per_s": calls / wall, "gateway/cpu_ms_per_call": cpu / calls * 1000}


def training(seed: int, rounds: int) -> dict[str, float]:
    """`rounds` steps of the arithmetic example with the tiny model, server and all."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "model": MODEL, "batch_tasks": 2, "repeats": 8, "parallel": 16, "steps": rounds, "engine.threads": 1,
            "optim.lr": 1e-6, "sampling.max_tokens": 16, "engine.context_length": 128, "checkpoint.every_steps": 0,
        }  # fmt: skip
        settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "examples/arithmetic/train.py", *settings, "--seed", str(seed), "--out", folder]
        subprocess.run(command, check=True)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][1:]
    step, sync = (sum(row[name] for row in rows) for name in ("timing/step_s", "s/weight_sync"))
    return {
        "training/step_s": min(row["timing/step_s"] for row in rows),
        "training/weight_sync_share": sync / step,
        "training/peak_rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


PARTS = {"update": (update, 5), "engine": (engine, 4), "gateway": (gateway, 5), "training": (training, 3)}
"""Part → its function and how many rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--print-schema", action="store_true")
    options = parser.parse_args()
    if options.part in ("update", "engine"):
        import torch

        torch.set_num_threads(1)
    (options.out / "resolved_config.json").write_text(options.config.read_text())
    measure, rounds = PARTS[options.part]
    (options.out / "eval.json").write_text(json.dumps(measure(options.seed, rounds)))


if __name__ == "__main__":
    main()
