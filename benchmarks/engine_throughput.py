"""Throughput of the embedded engine, in ratios: against itself one request at a time, and against plain `generate`.

    python benchmarks/engine_throughput.py [--model smollm2-135m] [--repetitions 5] [--threads N]

Every repetition runs all contestants after each other and the medians are compared, so that a slow spell of the
machine hits each alike. All sample at temperature 1 and ignore the end-of-turn token: the same number of tokens each.
`generate` gets the static batch, padded and with its cache, and returns no logprobs; the engine returns them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmtune import models
from swarmtune.engines.hf import DTYPES, load_model
from swarmtune.engines.rolling import RollingBatch
from swarmtune.types import GenerateRequest, SamplingParams

Work = Callable[[], int]
"""Generates and returns how many tokens."""


def make_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Distinct prompts of 24 to 48 tokens."""
    draw = random.Random(0)
    return [[draw.randrange(100, vocabulary) for _ in range(draw.randint(24, 48))] for _ in range(count)]


def make_batch(model: PreTrainedModel) -> RollingBatch:
    return RollingBatch(
        model, max_batch=64, context_length=2048, decode=lambda ids: "", eos_token_ids=frozenset(), seed=0
    )


def requests(prompts: list[list[int]], new_tokens: int, temperature: float) -> Iterator[GenerateRequest]:
    for i, prompt in enumerate(prompts):
        yield GenerateRequest(str(i), prompt, SamplingParams(max_tokens=new_tokens, temperature=temperature))


def together(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, temperature: float) -> int:
    batch = make_batch(model)
    for request in requests(prompts, new_tokens, temperature):
        batch.submit(request)
    return drain(batch)


def one_by_one(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, temperature: float) -> int:
    total, batch = 0, make_batch(model)
    for request in requests(prompts, new_tokens, temperature):
        batch.submit(request)
        total += drain(batch)
    return total


def drain(batch: RollingBatch) -> int:
    total = 0
    while batch.has_work:
        total += len(batch.step())
    return total


def plain_generate(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, temperature: float) -> int:
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **sampling,
        )
    return int((out.shape[1] - longest) * out.shape[0])


def race(contestants: dict[str, Work], repetitions: int) -> dict[str, float]:
    """Median tokens per second of each, after one round that does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, work in contestants.items():
            begin = time.perf_counter()
            tokens = work()
            if repetition:
                speeds[name].append(tokens / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a Hugging Face folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 compares greedy decoding")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    folder: Path = models.resolve(options.model)
    ours = load_model(folder, DTYPES[options.dtype], context_length=2048)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[options.dtype], local_files_only=True).eval()
    prompts = make_prompts(32, ours.config.vocab_size)
    each = (options.new_tokens, options.temperature)
    speed = race(
        {
            "engine, 8 requests one at a time": lambda: one_by_one(ours, prompts[:8], *each),
            "engine, 8 requests together": lambda: together(ours, prompts[:8], *each),
            "engine, 32 requests together": lambda: together(ours, prompts, *each),
            "transformers generate, batch of 32": lambda: plain_generate(plain, prompts, *each),
        },
        options.repetitions,
    )
    for name, value in speed.items():
        print(f"{name:36} {value:8.1f} tokens/s")
    one, eight, many, generate = speed.values()
    print(f"8 together / one at a time           {eight / one:8.2f} x (wanted: at least 2)")
    print(f"32 together / generate               {many / generate:8.2f} x (wanted: at least 0.8)")


if __name__ == "__main__":
    main()
