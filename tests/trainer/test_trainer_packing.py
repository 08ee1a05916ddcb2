"""Rows, bundles and micro-batches, and the engine that computes them.

Rules:
1. Every row is in exactly one micro-batch of a mini-batch; nothing is dropped.
2. A micro-batch stays within its token budget unless a single row is longer.
3. Rows sharing a prefix give the same log-probabilities and gradients as rows computed one by one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_episodes import episode_advantages, make_batch, sample

from swarmtune.config import AlgorithmConfig
from swarmtune.trainer.batch import Row, build_rows, bundle_rows, loss_weights, micro_batches, pack, split_by_episode
from swarmtune.trainer.layout import layout, token_logprobs
from swarmtune.types import FinishedEpisode


def rows_of(episodes: list[FinishedEpisode], **keys: int) -> list[Row]:
    return build_rows(episodes, episode_advantages(episodes, AlgorithmConfig()), **keys).rows


def made_up_row(tokens: list[int], episode: int = 0) -> Row:
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[-1] = True
    return Row(
        episode=episode,
        tokens=torch.tensor(tokens),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(tokens)),
        exact=torch.ones(len(tokens), dtype=torch.bool),
        advantages=mask.float(),
        sources=torch.zeros(len(tokens), dtype=torch.long),
        temperature=1.0,
    )


many_rows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 60), st.lists(st.integers(0, 5), min_size=2, max_size=40)),
    min_size=1,
    max_size=30,
).map(lambda made: [made_up_row([family] * stem + tail, i % 5) for i, (family, stem, tail) in enumerate(made)])


@given(rows=many_rows, budget=st.integers(32, 400), share=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_micro_batch_within_the_budget(rows: list[Row], budget: int, share: bool):
    micros = micro_batches(rows, range(len(rows)), tokens=budget, share_prefixes=share)
    assert sorted(i for micro in micros for i in micro.rows) == list(range(len(rows)))
    for micro in micros:
        assert micro.computed_tokens <= budget or len(micro.rows) == 1


@given(rows=many_rows, limit=st.integers(16, 500))
@settings(max_examples=60, deadline=None)
def test_bundles_save_tokens_and_share_what_they_say(rows: list[Row], limit: int):
    bundles = bundle_rows(rows, range(len(rows)), limit)
    assert sorted(i for b in bundles for i in b.rows) == list(range(len(rows)))
    for bundle in bundles:
        members = [rows[i].tokens for i in bundle.rows]
        assert all(torch.equal(m[: bundle.shared], members[0][: bundle.shared]) for m in members)
        assert bundle.length == bundle.shared + sum(len(m) - bundle.shared for m in members)
        if len(members) > 1:
            assert bundle.length < sum(map(len, members))
            assert bundle.length <= limit


def test_packing_begins_a_new_micro_batch_rather_than_pad_a_long_one():
    rows = [made_up_row([1] * 200)] + [made_up_row([2, 3, 4])] * 20
    packs = pack(bundle_rows(rows, range(len(rows)), 0), 100_000)
    assert [len(p) for p in packs] == [1, 20]


def test_episodes_are_not_split_over_mini_batches_and_none_is_empty():
    rows = rows_of(make_batch().episodes)
    parts = split_by_episode(rows, 4, np.random.default_rng(0))
    assert sorted(i for p in parts for i in p) == list(range(len(rows)))
    owners = [{rows[i].episode for i in p} for p in parts]
    assert all(owners)
    assert sum(map(len, owners)) == len(set().union(*owners)) == 9
    assert len(split_by_episode(rows, 50, np.random.default_rng(0))) == 9


@pytest.mark.parametrize("agg", ["episode-mean", "token-mean"])
def test_loss_weights_sum_to_one(agg: str):
    rows = rows_of(make_batch().episodes)
    assert sum(w * r.targets for w, r in zip(loss_weights(rows, agg), rows, strict=True)) == pytest.approx(1.0)


def test_a_sampled_first_token_has_no_context_and_is_counted():
    first = sample(0, "e", "t", prompt=[], turns=[(3, 0)])
    built = build_rows([FinishedEpisode("e", "t", 1.0, [first])], [torch.ones(3)])
    assert built.no_context == 1
    assert built.rows[0].loss_mask.tolist() == [False, True, True]


def test_a_row_longer_than_the_context_is_cut_and_counted():
    long = sample(0, "e", "t", prompt=[1, 2], turns=[(4, 0)])
    built = build_rows([FinishedEpisode("e", "t", 1.0, [long])], [torch.ones(4)], max_length=4)
    assert built.over_context == 2
    assert [len(r.tokens) for r in built.rows] == [4]


def test_advantages_reach_the_tokens_of_their_own_row():
    two = [sample(i, "e", "t", prompt=[1, 2], turns=[(2, 1), (1, 0)]) for i in range(2)]
    built = build_rows([FinishedEpisode("e", "t", 1.0, two)], [torch.arange(6.0)])
    assert [r.advantages.tolist() for r in built.rows] == [[0, 0, 0, 1, 0, 2], [0, 0, 3, 4, 0, 5]]


def test_temperature_zero_counts_as_one():
    greedy = sample(0, "e", "t", prompt=[1], turns=[(2, 0)], temperature=0.0)
    assert build_rows([FinishedEpisode("e", "t", 1.0, [greedy])], [torch.ones(2)]).rows[0].temperature == 1.0


def test_bundled_rows_have_the_logprobs_and_gradients_of_single_ones(plain_model):
    model = plain_model()
    rows = [[*range(20), 30, 31, 32], [*range(20), 40], [*range(20), 50, 51], [5, 6, 7]]
    bundles = [0, 0, 0, 1]
    shared = [20, 20, 20, 0]
    lengths = torch.tensor([0, *map(len, rows)])
    flat = torch.tensor([t for row in rows for t in row])
    plan = layout(flat, lengths.cumsum(0), bundles, shared)
    assert plan.input_ids.shape == (2, 26)
    together = model(
        input_ids=plan.input_ids, attention_mask=plan.attention_mask, position_ids=plan.position_ids
    ).logits.flatten(0, 1)[plan.slots]
    alone = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    weights = model.model.layers[0].self_attn.q_proj.weight
    (first,) = torch.autograd.grad(together.logsumexp(-1).sum(), weights)
    (second,) = torch.autograd.grad(alone.logsumexp(-1).sum(), weights)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_token_logprobs_and_their_gradient_equal_log_softmax(entropy_grad: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("swarmtune.trainer.layout.CHUNK_ELEMENTS", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(10, 50, generator=generator)).requires_grad_()
    labels = torch.randint(0, 50, (10,), generator=generator)
    temperature = torch.rand(10, generator=generator) + 0.5
    upstream = torch.randn(10, generator=generator)
    values, entropy = token_logprobs(logits, labels, temperature, entropy_grad=entropy_grad)
    reference = torch.log_softmax(logits / temperature[:, None], dim=-1)
    torch.testing.assert_close(values, reference[torch.arange(10), labels])
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))
    assert entropy.requires_grad == entropy_grad
    (ours,) = torch.autograd.grad((values * upstream).sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad((reference[torch.arange(10), labels] * upstream).sum(), logits)
    torch.testing.assert_close(ours, theirs)
