"""In the embedded engine, generations of the two lanes have rows of their own.

Rules:
1. A full training lane does not keep an evaluation waiting, and the other way round; within a lane it does.
2. What an evaluation draws does not depend on the lane.
3. An update holds both lanes and both go on after it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmtune.engines.rolling import ATTENTION, RollingBatch
from swarmtune.types import GenerateRequest, Lane, SamplingParams

Submit = Callable[[str, Lane], None]


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, attn_implementation=ATTENTION,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def batch(llama: LlamaForCausalLM) -> RollingBatch:
    return rolling(llama, slots=1)


def rolling(llama: LlamaForCausalLM, slots: int) -> RollingBatch:
    return RollingBatch(
        llama, max_batch=2, context_length=64, decode=str, eos_token_ids=frozenset(), evaluation_slots=slots
    )


def request(name: str, lane: Lane, tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(name, [3, 5, 8, len(name)], SamplingParams(max_tokens=tokens, seed=len(name)), lane=lane)


def round_of(batch: RollingBatch) -> set[str]:
    """Requests that got a token in one round."""
    return {name for name, _ in batch.step()}


def running(batch: RollingBatch, rounds: int = 3) -> set[str]:
    return set().union(*(round_of(batch) for _ in range(rounds)))


def test_a_full_training_lane_keeps_no_evaluation_waiting(batch: RollingBatch):
    for name in ("t", "tt", "ttt"):
        batch.submit(request(name, "train"))
    assert running(batch) == {"t", "tt"}
    batch.submit(request("e", "evaluate"))
    batch.submit(request("ee", "evaluate"))
    assert running(batch) == {"t", "tt", "e"}


def test_a_full_evaluation_lane_keeps_no_training_waiting(batch: RollingBatch):
    for name in ("e", "ee", "eee"):
        batch.submit(request(name, "evaluate"))
    assert running(batch) == {"e"}
    for name in ("t", "tt", "ttt"):
        batch.submit(request(name, "train"))
    assert running(batch) == {"e", "t", "tt"}
    batch.abort("e")
    assert running(batch) == {"ee", "t", "tt"}


def test_one_lane_never_runs_dry_under_a_stream_of_the_other(batch: RollingBatch):
    batch.submit(request("e", "evaluate", tokens=10))
    told = 0
    for number in range(40):
        batch.submit(request(f"t{number}", "train", tokens=1))
        told += "e" in round_of(batch)
    assert told == 10


def test_without_slots_both_share_the_rows(llama: LlamaForCausalLM):
    batch = rolling(llama, slots=0)
    for name, lane in (("t", "train"), ("e", "evaluate"), ("ee", "evaluate")):
        batch.submit(request(name, lane))  # type: ignore[arg-type]
    assert running(batch) == {"t", "e"}


@pytest.mark.parametrize("lane", ["train", "evaluate"])
def test_the_lane_changes_nothing_about_what_is_drawn(llama: LlamaForCausalLM, lane: Lane):
    batch, tokens = rolling(llama, slots=1), []
    batch.submit(request("x", lane, tokens=12))
    while batch.has_work:
        tokens += [token for _, chunk in batch.step() if not isinstance(chunk, Exception) for token in chunk.token_ids]
    other, expected = rolling(llama, slots=0), []
    other.submit(request("x", "train", tokens=12))
    while other.has_work:
        expected += [t for _, chunk in other.step() if not isinstance(chunk, Exception) for t in chunk.token_ids]
    assert tokens == expected and len(tokens) == 12


def test_both_lanes_are_held_for_new_weights_and_go_on(batch: RollingBatch, llama: LlamaForCausalLM):
    for name, lane in (("t", "train"), ("e", "evaluate"), ("ee", "evaluate")):
        batch.submit(request(name, lane))  # type: ignore[arg-type]
    assert running(batch) == {"t", "e"}
    batch.hold()
    assert not batch.has_running and batch.has_work
    batch.take_weights(((n, v.clone()) for n, v in llama.state_dict().items()), 1)
    versions = {
        name: chunk.weight_version for _ in range(3) for name, chunk in batch.step() if not isinstance(chunk, Exception)
    }
    assert versions == {"t": 1, "e": 1}
