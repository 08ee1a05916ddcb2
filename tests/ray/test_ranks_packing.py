"""Rows spread over ranks: every row once, rounds whole, tokens even."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_episodes import make_batch

from swarmtune.trainer.batch import Bundle, build_rows, micro_batches, pack_for_ranks
from swarmtune.trainer.worker import SkipPadding


def rows():
    episodes = make_batch().episodes
    return build_rows(episodes, [torch.ones(e.sampled_tokens) for e in episodes]).rows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 5), st.integers(64, 1024))
def test_every_bundle_is_in_one_micro_batch_and_every_rank_has_as_many(lengths: list[int], ranks: int, tokens: int):
    packs = pack_for_ranks([Bundle([i], 0, n) for i, n in enumerate(lengths)], tokens, ranks)
    assert len(packs) % ranks == 0
    assert Counter(i for pack in packs for bundle in pack for i in bundle.rows) == Counter(range(len(lengths)))
    for pack in packs:
        assert len(pack) < 2 or max(b.length for b in pack) * len(pack) <= tokens


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(2, 5))
def test_no_rank_has_more_than_its_share_and_one_bundle(lengths: list[int], ranks: int):
    packs = pack_for_ranks([Bundle([i], 0, n) for i, n in enumerate(lengths)], 512, ranks)
    for rank in range(ranks):
        load = sum(bundle.length for pack in packs[rank::ranks] for bundle in pack)
        assert load <= sum(lengths) / ranks + max(lengths)


def test_a_rank_splits_what_it_has_before_it_is_given_an_empty_micro_batch():
    packs = pack_for_ranks([Bundle([n], 0, length) for n, length in enumerate([70, 35, 35, 35])], 100, 2)
    assert [[b.length for b in pack] for pack in packs] == [[70], [35], [35], [35]]


def test_with_fewer_rows_than_ranks_the_others_get_padding():
    made = micro_batches(rows(), [0], tokens=512, ranks=3)
    assert [bool(micro.rows) for micro in made].count(True) == 1
    assert len(made) == 3


def test_a_common_prompt_is_not_bundled_beyond_a_ranks_share():
    made = rows()
    micros = micro_batches(made, range(len(made)), tokens=512, ranks=2)
    total = sum(len(row.tokens) for row in made)
    for rank in range(2):
        assert sum(m.computed_tokens for m in micros[rank::2] if m.rows) < 0.8 * total


def test_the_loss_of_a_padding_micro_batch_counts_nothing():
    made = micro_batches(rows(), [0], tokens=512, ranks=2)
    loss = SkipPadding(lambda model_output, data, dp_group: (torch.tensor(3.0), {"targets": 5.0}))
    values = {bool(micro.rows): loss({}, micro.data) for micro in made}
    assert values[True] == (torch.tensor(3.0), {"targets": 5.0})
    assert values[False] == (torch.tensor(0.0), {"targets": 0.0})
