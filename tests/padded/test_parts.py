"""Rows of different sizes, the rules that sizes follow, and what collate functions do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from egeria_cache import EgeriaLoader
from egeria_cache.batch import flatten
from egeria_cache.ragged import PaddedRows, blank, pad_rows, widen
from egeria_cache.samples.collation import find_padding
from egeria_cache.skip.serve.cut import Rule
from tests.helpers.sentences import Encoder, Sentences, pad_left, pad_right
from tests.padded.test_loops import Run, assert_same

SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=5)


@given(SIZES, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_rows_come_back_from_padding_as_they_were(sizes, above, left, more, wider):
    rows = [torch.arange(1, h * w * 2 + 1).view(h, 2, w) for h, w in sizes]
    dims = ((0, above), (2, left))
    whole = [max(h for h, _ in sizes) + more, max(w for _, w in sizes)]
    padded = pad_rows(rows, dims, whole, -7)
    assert padded.shape == (len(rows), whole[0], 2, whole[1])
    assert int((padded != -7).sum()) == sum(row.numel() for row in rows)
    broad = widen(padded, dims, [whole[0] + wider, whole[1] + 1], -7)
    for one in (padded, broad):
        found = PaddedRows(one, dims, np.array(sizes))
        assert all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))
        assert torch.equal(blank(one, dims, np.array(sizes), -7), one)
        filled = blank(one, dims, np.array(sizes), 0)
        assert int((filled != 0).sum()) == sum(row.numel() for row in rows)
    assert widen(padded, dims, whole, 0) is padded


@given(
    st.integers(1, 40), st.integers(-20, 40), st.integers(1, 6),
    st.lists(st.integers(60, 400), min_size=1, max_size=12),
    st.lists(st.integers(60, 400), min_size=1, max_size=12),
)  # fmt: skip
@example(stride=2, offset=1, multiple=1, seen=[94, 95], asked=[100])
@example(stride=3, offset=0, multiple=1, seen=[61, 63, 60], asked=[200])
@settings(max_examples=150, deadline=None)
def test_a_rule_is_certain_only_where_it_is_right(stride, offset, multiple, seen, asked):
    def size(length):
        return (length - offset) // stride if stride > 1 else multiple * length + offset

    if len({size(length) for length in seen}) == 1:
        return
    rule = Rule({(7, length): size(length) for length in seen})
    assert rule.explains
    for length in asked:
        certain = rule.at((7, length))
        assert certain is None or certain == size(length)
        least, most = rule.within((7, length))
        assert least <= size(length) <= most


def test_a_rule_that_may_follow_either_of_two_lengths_says_nothing_where_they_differ():
    rule = Rule({(length, length): length + 1 for length in (5, 9)})
    assert rule.at((12, 12)) == 13
    assert rule.at((12, 8)) is None
    assert Rule({(5, 5): 6, (9, 9): 10, (12, 8): 9}).at((30, 20)) == 21


def test_what_follows_no_rule_is_said():
    assert not Rule({(length,): length**2 for length in (4, 9, 30, 70)}).explains


def leaves(batch, size):
    return flatten(batch, size)[1]


def test_each_leaf_has_a_value_and_a_side_of_its_own():
    def collate(samples):
        longest = max(map(len, samples))
        right = [F.pad(row, (0, longest - len(row)), value=-100) for row in samples]
        left = [F.pad(row * 1.5, (longest - len(row), 0), value=0.5) for row in samples]
        return {"labels": torch.stack(right), "scores": torch.stack(left),
                "square": torch.stack([F.pad(torch.outer(row, row), (0, longest - len(row)) * 2)
                                       for row in samples])}  # fmt: skip

    samples = [torch.arange(1, size + 1) for size in (2, 5, 3)]
    alone = [leaves(collate([sample]), 1) for sample in samples]
    found = find_padding(leaves(collate(samples), 3), alone)
    assert found is not None
    assert found.values == {"['labels']": -100, "['scores']": 0.5, "['square']": 0}
    assert found.dims("['scores']") == ((0, True),)
    assert found.dims("['square']") == ((0, False), (1, False))


# Any order of events in training on padded batches, against the same training without a cache.

FRONTS = ((), ("embed", "layers.0"), ("embed", "layers.0", "layers.1"))

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("epoch"), st.permutations(range(24)), st.integers(1, 9)),
        st.tuples(st.just("move"), st.integers(0, 2), st.none()),
    ),
    min_size=3,
    max_size=9,
)


@given(EVENTS, st.sampled_from([pad_right, pad_left]), st.integers(0, 2))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_epochs_and_moves(events, collate, lasting):
    data = Sentences(24)
    data.tokens[: 8 * lasting] = [row[:4].repeat(2) for row in data.tokens[: 8 * lasting]]
    with tempfile.TemporaryDirectory() as directory:
        plain = Run(Encoder, data, collate)
        served = Run(Encoder, data, collate, Path(directory, "cache"))
        assert served.cache is not None
        for run in (plain, served):  # a loss that jumps makes 1e-6 of rounding 6e-5 in one step
            run.optimizer = torch.optim.SGD(run.model.parameters(), 0.02)
        with served.cache:
            for kind, what, size in events:
                for run in (plain, served):
                    if kind == "move":
                        run.move(*FRONTS[what])
                        continue
                    batches = [what[i : i + size] for i in range(0, 24, size)]
                    run.loader = (
                        run.loader._around(batches)
                        if isinstance(run.loader, EgeriaLoader)
                        else type(run.loader)(data, batch_sampler=batches, collate_fn=collate)
                    )
                    run.epochs(1)
            assert_same(plain, served)
            assert served.cache.stats().audit_failures == 0
