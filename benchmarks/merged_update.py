"""Wall time of a training update, unmerged against merged, with the real veRL worker and the same rewards.

    python benchmarks/merged_update.py [--episodes 2] [--turns 25] [--answer 30] [--output 120] [--rounds 2]

Episodes as AppWorld's: a system prompt with API documentation, a task, then answers of code and long tool outputs in
turn. They run through the tracker; "merged" is what the merger makes of them under `match: token`, "unmerged" is one
row per call: the whole conversation up to it, of which only its answer trains. Episodes of one task share their
opening. Three contestants take turns: merged; unmerged as trainers do it that compute each row by itself; unmerged with
the trainer's own sharing of common prefixes, which is on by default and makes up for a part. A Llama of random weights
trains, fp32, one thread; then the gradients of merged and unmerged are compared.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gateway_servers import TEXT

from swarmtune.config import TrainConfig
from swarmtune.merger import check_conservation, merge
from swarmtune.rendering.load import load_renderer
from swarmtune.rendering.renderer import Renderer
from swarmtune.testing import chatml_model
from swarmtune.tracker import Tracker
from swarmtune.trainer import trainer as trainer_module
from swarmtune.trainer.trainer import Trainer
from swarmtune.types import FinishedEpisode, FinishReason, Message, Reply, Sample, TrainBatch


def excerpt(draw: random.Random, length: int) -> str:
    """Real text: Python's documentation. With one token per byte, about `length` tokens."""
    start = draw.randrange(len(TEXT) - length)
    return TEXT[start : start + length]


def play(renderer: Renderer, number: int, task: int, options: argparse.Namespace) -> Tracker:
    """One episode of `turns` calls."""
    opening, draw = random.Random(task), random.Random(1000 + number)
    tracker = Tracker(f"e{number}", renderer)
    messages = [
        Message("system", excerpt(opening, options.system)),
        Message("user", excerpt(opening, 80)),
    ]
    for _ in range(options.turns):
        turn = tracker.prepare(messages)
        text = excerpt(draw, draw.randint(options.answer // 2, options.answer * 3 // 2)).strip() or "pass"
        ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
        message = Message("assistant", text, turn_id=turn.turn_id)
        logprobs = [-draw.uniform(0.01, 6.0) for _ in ids]
        tracker.commit(turn, Reply(ids, logprobs, [0] * len(ids), FinishReason.STOP, text, message))
        output = excerpt(draw, draw.randint(options.output // 2, options.output * 3 // 2))
        messages += [message, Message("user", output)]
    return tracker


def one_row_per_call(tracker: Tracker, task: str) -> list[Sample]:
    samples = []
    for timeline in tracker.timelines():
        ids, mask, logprobs, versions = (
            [value for block in timeline.blocks for value in getattr(block, name)]
            for name in ("token_ids", "loss_mask", "logprobs", "weight_versions")
        )
        samples.append(Sample(timeline.call_id, tracker.episode_id, task, ids, mask, logprobs, versions))
    return samples


Rows = Callable[[Tracker, str], list[Sample]]


def batch_of(trackers: list[Tracker], repeats: int, rows: Rows) -> TrainBatch:
    """The same reward for an episode, however many rows it has."""
    episodes = []
    for number, tracker in enumerate(trackers):
        task = f"t{number // repeats}"
        reward = random.Random(number).random()
        episodes.append(FinishedEpisode(tracker.episode_id, task, reward, rows(tracker, task)))
    return TrainBatch(1, episodes)


def merged_rows(tracker: Tracker, task: str) -> list[Sample]:
    samples = merge(tracker, match="token", task_id=task).samples
    check_conservation(tracker, samples)
    return samples


def llama(folder: Path, context: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Update:
    wall_s: float
    cpu_s: float
    gradient: torch.Tensor
    """Flat, before it was clipped and applied."""


def timed_update(trainer: Trainer, batch: TrainBatch) -> Update:
    """One update, everything included; afterwards the weights are as they were."""
    in_process: Any = trainer._worker
    worker = in_process._worker
    weights = {name: value.clone() for name, value in worker.engine.module.state_dict().items()}
    step, taken = worker.optimizer_step, []

    def look_and_step(settings: dict[str, Any]) -> dict[str, float]:
        grads = [p.grad for p in worker.engine.module.parameters() if p.grad is not None]
        taken.append(torch.cat([g.detach().flatten() for g in grads]))
        return step(settings)

    worker.optimizer_step = look_and_step
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.update(batch)
        took = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        worker.optimizer_step = step
    worker.engine.module.load_state_dict(weights)
    return Update(*took, taken[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="episodes per task")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--system", type=int, default=400, help="tokens of the system prompt")
    parser.add_argument("--answer", type=int, default=30)
    parser.add_argument("--output", type=int, default=120, help="tokens of a tool's output")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8192, help="tokens per micro-batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        renderer = load_renderer(chatml_model(work / "tokenizer"))
        trackers = [play(renderer, n, n // options.repeats, options) for n in range(options.episodes)]
        merged = batch_of(trackers, options.repeats, merged_rows)
        unmerged = batch_of(trackers, options.repeats, one_row_per_call)
        longest = max(len(s.token_ids) for e in merged.episodes for s in e.samples)
        config = TrainConfig.from_dict(
            {
                "model": "llama",
                "repeats": options.repeats,
                "trainer.dtype": "fp32",
                "trainer.tokens_per_micro_batch": options.budget,
            }
        )
        trainer = Trainer(config, llama(work / "llama", longest + 16), work_dir=work)
        trainer.start()
        compare(trainer, merged, unmerged, options)


def compare(trainer: Trainer, merged: TrainBatch, unmerged: TrainBatch, options: argparse.Namespace) -> None:
    sharing = trainer_module.shares_prefixes
    contestants = {
        "merged": (merged, sharing),
        "unmerged, each row by itself": (unmerged, lambda _: False),
        "unmerged, common prefixes shared": (unmerged, sharing),
    }
    updates: dict[str, list[Update]] = {name: [] for name in contestants}
    try:
        for _ in range(options.rounds):
            for name, (batch, shares) in contestants.items():
                trainer_module.shares_prefixes = shares
                updates[name].append(timed_update(trainer, batch))
    finally:
        trainer_module.shares_prefixes = sharing
    print(
        f"{options.episodes} episodes of {options.turns} turns, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':<36}{'rows':>6}{'tokens':>10}{'wall s':>9}{'cpu s':>9}{'wall x':>8}{'cpu x':>8}{'gradient':>11}")
    base = updates["merged"]
    for name, (batch, _) in contestants.items():
        wall, cpu = (statistics.median([getattr(u, of) for u in updates[name]]) for of in ("wall_s", "cpu_s"))
        wall_x, cpu_x = (
            statistics.median([getattr(u, of) / getattr(b, of) for u, b in zip(updates[name], base, strict=True)])
            for of in ("wall_s", "cpu_s")
        )
        error = float((updates[name][0].gradient - base[0].gradient).norm() / base[0].gradient.norm())
        rows = [s for e in batch.episodes for s in e.samples]
        print(
            f"{name:<36}{len(rows):>6}{sum(len(s.token_ids) for s in rows):>10,}{wall:>9.2f}{cpu:>9.2f}"
            f"{wall_x:>8.2f}{cpu_x:>8.2f}{error:>11.1e}"
        )
    print("wanted: at least 6.25 x the time of merged with each row by itself, gradients equal to 1e-3")


if __name__ == "__main__":
    main()
