"""Sampling against the definition: uniforms on a grid turn frequencies into probabilities, exact to one grid step."""

import pytest
import torch

from swarmtune.engines import sampler
from swarmtune.engines.sampler import RowParams, sample
from swarmtune.types import SamplingParams

GRID = 4000
VOCABULARY = 300


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def frequencies(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """How often each token is drawn over a grid of uniforms."""
    rows = row.expand(GRID, -1)
    uniforms = [(i + 0.5) / GRID for i in range(GRID)]
    drawn = sample(rows, RowParams.of([params] * GRID, VOCABULARY), uniforms)
    return torch.bincount(torch.tensor(drawn.tokens), minlength=VOCABULARY) / GRID


def expected(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then the top_k most likely, then the smallest set of those with mass top_p; renormalised."""
    probs = torch.softmax(row / params.temperature, -1)
    ordered, order = probs.sort(descending=True)
    if params.top_k:
        ordered[params.top_k :] = 0
        ordered /= ordered.sum()
    before = ordered.cumsum(-1) - ordered
    ordered[before >= params.top_p] = 0
    return torch.zeros(VOCABULARY).scatter(0, order, ordered / ordered.sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0.6),
        SamplingParams(max_tokens=1, top_p=0.5),
        SamplingParams(max_tokens=1, top_p=0.999, temperature=2.0),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1, top_k=5),
        SamplingParams(max_tokens=1, top_k=200, temperature=1.5),
        SamplingParams(max_tokens=1, top_k=20, top_p=0.8, temperature=1.3),
    ],
)
def test_tokens_are_drawn_with_the_probabilities_asked_for(params, monkeypatch):
    monkeypatch.setattr(sampler, "_CANDIDATES", 16)
    row = logits()
    assert (frequencies(row, params) - expected(row, params)).abs().max() <= 1.5 / GRID


def test_rows_of_one_batch_follow_their_own_parameters():
    row = logits(1)
    params = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, top_p=1e-6),
    ]
    drawn = sample(row.expand(4, -1), RowParams.of(params, VOCABULARY), [0.999] * 4)
    best = int(row.argmax())
    assert (drawn.tokens[0], drawn.tokens[1], drawn.tokens[3]) == (best, best, best)
    assert drawn.tokens[2] != best


def test_tokens_of_probability_zero_are_never_drawn():
    row = torch.full((VOCABULARY,), float("-inf"))
    row[[3, 7, 250]] = 0.0
    for uniform in (0.0, 0.3333333, 0.5, 0.9999999999999999):
        assert sample(row[None], RowParams.of([SamplingParams(max_tokens=1)], VOCABULARY), [uniform]).tokens[0] in {
            3,
            7,
            250,
        }


def test_logprob_is_that_of_the_uncut_distribution():
    row = logits(2)
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=3, top_p=0.5)
    drawn = sample(row[None], RowParams.of([params], VOCABULARY), [0.4])
    assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(row / 0.7, -1)[drawn.tokens[0]]), abs=1e-5)
