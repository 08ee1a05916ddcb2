"""How long an update takes, beside a plain transformers forward and backward pass over the same tokens, in one run.

    python benchmarks/update.py --model smollm2-135m --dtype bf16 --episodes 64 --repeats 8 --prompt 45 --answer 16

Prints seconds per 1,000 tokens of: `plain` (padded batches, logits at every position, cross-entropy on the sampled
tokens, AdamW), `update` (the trainer, everything included), `update, prompts not shared`, and each part's share.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from swarmtune import models
from swarmtune.config import TrainConfig
from swarmtune.trainer import trainer as trainer_module
from swarmtune.trainer.trainer import Trainer
from swarmtune.types import FinishedEpisode, Sample, TrainBatch


def make_batch(step: int, *, episodes: int, repeats: int, prompt: int, answer: int, vocabulary: int) -> TrainBatch:
    """Episodes of one turn; `repeats` of them share a prompt, as a task's do. Lengths vary by a quarter."""
    rng = random.Random(step)
    made = []
    for index in range(episodes):
        task = index // repeats
        common = random.Random(1000 * step + task)
        head = [common.randrange(vocabulary) for _ in range(common.randint(prompt * 3 // 4, prompt * 5 // 4))]
        tail = [rng.randrange(vocabulary) for _ in range(rng.randint(max(1, answer // 2), answer))]
        made.append(
            FinishedEpisode(
                episode_id=f"e{index}",
                task_id=f"t{task}",
                reward=rng.random(),
                samples=[
                    Sample(
                        sample_id=f"s{index}",
                        episode_id=f"e{index}",
                        task_id=f"t{task}",
                        token_ids=head + tail,
                        loss_mask=[0] * len(head) + [1] * len(tail),
                        logprobs=[0.0] * len(head) + [-5.0] * len(tail),
                        weight_versions=[-1] * len(head) + [0] * len(tail),
                    )
                ],
            )
        )
    return TrainBatch(step=step, episodes=made)


def plain_update(folder: Path, dtype: str, budget: int) -> Callable[[TrainBatch], None]:
    """A forward and backward pass in transformers as one would write it: rows sorted by length, padded, masked."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")

    def update(batch: TrainBatch) -> None:
        rows = sorted((s for e in batch.episodes for s in e.samples), key=lambda s: len(s.token_ids))
        per_pass = max(1, budget // len(rows[-1].token_ids))
        total = sum(sum(s.loss_mask) for s in rows)
        for start in range(0, len(rows), per_pass):
            part = rows[start : start + per_pass]
            width = max(len(s.token_ids) for s in part)
            ids = torch.tensor([s.token_ids + [0] * (width - len(s.token_ids)) for s in part])
            seen = torch.tensor([[1] * len(s.token_ids) + [0] * (width - len(s.token_ids)) for s in part])
            labels = torch.tensor(
                [
                    [t if m else -100 for t, m in zip(s.token_ids, s.loss_mask, strict=True)]
                    + [-100] * (width - len(s.token_ids))
                    for s in part
                ]
            )
            with autocast:
                logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def measure(update: Callable[[TrainBatch], object], batches: list[TrainBatch]) -> float:
    """Median seconds of an update; the first batch warms up."""
    update(batches[0])
    times = []
    for batch in batches[1:]:
        began = time.perf_counter()
        update(batch)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=45)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = models.resolve(args.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    batches = [
        make_batch(
            step,
            episodes=args.episodes,
            repeats=args.repeats,
            prompt=args.prompt,
            answer=args.answer,
            vocabulary=vocabulary,
        )
        for step in range(1, args.rounds + 2)
    ]
    thousands = sum(len(s.token_ids) for b in batches[1:] for e in b.episodes for s in e.samples) / args.rounds / 1000
    config = TrainConfig.from_dict(
        {
            "model": str(folder),
            "trainer.dtype": args.dtype,
            "trainer.tokens_per_micro_batch": args.budget,
            "repeats": max(2, args.repeats),
        }
    )
    seconds = {"plain": measure(plain_update(folder, args.dtype, args.budget), batches)}
    with tempfile.TemporaryDirectory() as work:
        trainer = Trainer(config, folder, work_dir=Path(work))
        trainer.start()
        seconds["update"] = measure(trainer.update, batches)
        shares, trainer_module.shares_prefixes = trainer_module.shares_prefixes, lambda _: False
        seconds["update, prompts not shared"] = measure(trainer.update, batches)
        trainer_module.shares_prefixes = shares
    result = {
        "model": args.model,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "tokens": round(thousands * 1000),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "seconds_per_1000_tokens": {name: round(value / thousands, 3) for name, value in seconds.items()},
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.model}, {args.dtype}, {result['threads']} threads, {result['tokens']} tokens per update")
    for name, value in seconds.items():
        print(f"  {name:28} {value:8.2f} s   {value / thousands:7.3f} s per 1,000 tokens")


if __name__ == "__main__":
    main()
