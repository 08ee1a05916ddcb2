"""Answers under a grammar: always obeyed, among free neighbours, with the logprobs of the whole distribution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from swarmtune.backend import RequestRefused
from swarmtune.engines.constraint import Grammars
from swarmtune.engines.hf import eos_token_ids, load_model
from swarmtune.engines.rolling import RollingBatch
from swarmtune.engines.sampler import RowParams, sample, sample_allowed
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, SamplingParams

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
    "required": ["ok", "colour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"
PROMPT = list(b"hello")


@pytest.fixture
def batch(tiny_folder: Path) -> RollingBatch:
    model = load_model(tiny_folder, torch.float32, context_length=256)
    ends = eos_token_ids(model)
    return RollingBatch(
        model,
        max_batch=8,
        context_length=256,
        decode=Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).decode,
        eos_token_ids=ends,
        grammars=Grammars(tiny_folder / "tokenizer.json", ends),
    )


def run(batch: RollingBatch, *requests: SamplingParams) -> list[list[GenerateChunk]]:
    for at, sampling in enumerate(requests):
        batch.submit(GenerateRequest(str(at), PROMPT, sampling))
    chunks: list[list[GenerateChunk]] = [[] for _ in requests]
    while batch.has_work:
        for request_id, item in batch.step():
            assert isinstance(item, GenerateChunk), item
            chunks[int(request_id)].append(item)
    return chunks


def text_of(chunks: list[GenerateChunk], folder: Path) -> str:
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.3}, {"top_k": 2}, {"temperature": 0.4}])
def test_every_answer_obeys_its_grammar_whatever_else_is_in_the_batch(batch, tiny_folder, how):
    bound = [SamplingParams(80, seed=seed, grammar=GRAMMAR, **how) for seed in range(4)]
    free = SamplingParams(40, seed=9, ignore_eos=True)
    *answers, free_answer = run(batch, *bound, free)
    for chunks in answers:
        answer = json.loads(text_of(chunks, tiny_folder))
        assert set(answer) == {"ok", "colour"} and answer["colour"] in ("red", "blue")
        assert chunks[-1].finish_reason is FinishReason.STOP
    (alone,) = run(batch, free)
    assert [c.token_ids for c in alone] == [c.token_ids for c in free_answer]


def test_logprobs_are_those_of_the_whole_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 50)
    for temperature in (1.0, 0.5):
        params = RowParams.of([SamplingParams(1, temperature=temperature)], 50)
        token, logprob = sample_allowed(logits[0], torch.arange(50) == 7, params, 0.3)
        assert token == 7
        assert logprob == pytest.approx(float((logits[0] / temperature).log_softmax(-1)[7]), abs=1e-5)


def test_what_allows_everything_draws_what_is_drawn_without_it():
    logits = torch.randn(1, 50)
    params = RowParams.of([SamplingParams(1, top_p=0.8)], 50)
    for uniform in (0.0, 0.3, 0.99):
        free = sample(logits, params, [uniform])
        token, logprob = sample_allowed(logits[0], torch.ones(50, dtype=torch.bool), params, uniform)
        assert token == free.tokens[0] and logprob == pytest.approx(free.logprobs[0], abs=1e-5)


def test_a_forced_token_that_the_model_thinks_impossible_has_a_finite_logprob():
    logits = torch.zeros(50)
    logits[3] = -500.0
    token, logprob = sample_allowed(logits, torch.arange(50) == 3, RowParams.of([SamplingParams(1)], 50), 0.5)
    assert token == 3 and -510 < logprob < -490


def test_a_held_answer_goes_on_where_it_was(batch, tiny_folder):
    batch.submit(GenerateRequest("0", PROMPT, SamplingParams(80, seed=1, grammar=GRAMMAR)))
    chunks: list[GenerateChunk] = []
    for round_ in range(200):
        if not batch.has_work:
            break
        if round_ % 5 == 4:
            batch.hold()
        chunks += [item for _, item in batch.step() if isinstance(item, GenerateChunk)]
    assert set(json.loads(text_of(chunks, tiny_folder))) == {"ok", "colour"}


@pytest.mark.parametrize("grammar", ['start: %json {"type": "nonsense"}', "start: [", 'start: %json {"if": {}}'])
def test_a_grammar_that_cannot_be_compiled_is_refused_and_says_why(batch, grammar):
    with pytest.raises(RequestRefused, match="cannot be enforced"):
        batch.submit(GenerateRequest("0", PROMPT, SamplingParams(5, grammar=grammar)))
    assert not batch.has_work


def test_an_engine_without_grammars_refuses_one(tiny_folder):
    model = load_model(tiny_folder, torch.float32, context_length=64)
    plain = RollingBatch(
        model, max_batch=1, context_length=64, decode=str, eos_token_ids=eos_token_ids(model), grammars=None
    )
    with pytest.raises(RequestRefused):
        plain.submit(GenerateRequest("0", PROMPT, SamplingParams(5, grammar=GRAMMAR)))


def test_a_tokenizer_with_further_decoders_is_still_read_as_byte_level(tiny_folder, tmp_path):
    settings = json.loads((tiny_folder / "tokenizer.json").read_text())
    byte_fallback = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, settings["decoder"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings | {"decoder": byte_fallback}))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    constraint = Grammars(tmp_path / "tokenizer.json", [257]).start('start: "a b"')
    for token in tokenizer.encode("a b", add_special_tokens=False).ids:
        assert constraint.allowed(272, [257])[token]
        constraint.take(token)
    assert constraint.allowed(272, [257]).nonzero().flatten().tolist() == [257]
