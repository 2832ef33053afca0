"""Rows of different sizes, the rules that sizes follow, and what collate functions do."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from egeria_cache.batch import Axis, Lengths, Padding, flatten
from egeria_cache.ragged import PaddedRows, blank, pad_rows, widen
from egeria_cache.samples.collation import find_padding
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.serve.dynamic_shapes import DynamicShapes, OutputAxis, watched
from egeria_cache.skip.serve.padded import Rule
from egeria_cache.store.records.record import Rows
from tests.helpers.sentences import pad_by_eights, pad_left, pad_right

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
        assert rule.least((7, length)) <= size(length) <= rule.most((7, length))
        before = rule.most((7, length)) - rule.least((7, length))
        assert rule.add((7, length), size(length))
        assert before >= rule.most((7, length)) - rule.least((7, length)) == 0


def test_a_rule_that_may_follow_either_of_two_lengths_waits_until_they_differ():
    rule = Rule({(length, length): length + 1 for length in (5, 9)})
    assert rule.at((12, 12)) == 13
    assert rule.at((12, 8)) is None
    assert rule.add((12, 8), 9)
    assert rule.at((30, 20)) == 21
    assert not rule.add((30, 20), 25)


def test_what_follows_no_rule_is_said():
    rule = Rule({(length,): length**2 for length in (4, 9)})
    assert [rule.add((length,), length**2) for length in (30, 70)][-1] is False
    assert not rule.explains


def leaves(batch, size):
    return flatten(batch, size)[1]


@pytest.mark.parametrize("collate", [pad_right, pad_left, pad_by_eights])
def test_padding_is_found(collate):
    sizes = (3, 9, 5, 12)
    samples = [(torch.arange(1, size + 1), i) for i, size in enumerate(sizes)]
    alone = [leaves(collate([sample]), 1) for sample in samples]
    found = find_padding(leaves(collate(samples), 4), alone)
    assert found == Padding((Axis("[0]", 0, collate is pad_left),), {"[0]": 0})
    own = np.array([[rows["[0]"].shape[1]] for rows in alone])
    together = leaves(collate(samples), 4)["[0]"]
    lengths = Lengths(found, own, (together.shape[1],))
    rows = list(lengths.rows("[0]", together))
    assert torch.equal(found.padded("[0]", rows, lengths.whole), together)


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


def test_what_is_no_padding_is_not_taken_for_it():
    def noisy(samples):
        longest = max(map(len, samples))
        rows = [F.pad(row, (0, longest - len(row))) for row in samples]
        return torch.stack(rows) + torch.arange(longest)

    def shortest(samples):
        size = min(map(len, samples))
        return torch.stack([row[:size] for row in samples])

    def longer(samples):
        longest = max(map(len, samples)) + len(samples) - 1
        return torch.stack([F.pad(row, (0, longest - len(row))) for row in samples])

    samples = [torch.arange(1, size + 1) for size in (2, 5, 3)]
    for collate in (noisy, shortest, longer):
        alone = [leaves(collate([sample]), 1) for sample in samples]
        assert find_padding(leaves(collate(samples), 3), alone) is None


def test_the_writers_queue_counts_the_memory_that_padded_rows_hold():
    padded = torch.zeros(3, 10, 4)
    short = PaddedRows(padded, ((0, False),), np.array([[1], [2], [1]]))
    rows = Rows(False, {"a": short, "b": [1, 2, 3]})
    assert sum(one.nbytes for one in rows.tensors()) == padded.nbytes == 480
    assert rows.num_bytes() == sum(row.nbytes for row in short) == 64
    assert [one is padded for one in rows.tensors()] == [True]


def test_an_output_of_another_shape_than_was_proved_is_handed_out_as_it_is():
    """Code behind the boundary may return something else now and then."""
    axis = OutputAxis(1, Rule.longer_by(0, 0), False)
    growth = DynamicShapes({}, {}, (False,), (9,), frozenset(), outputs={0: axis})
    growth.proof.missing = 1.0
    lengths = Lengths(Padding((Axis("x", 0),), {"x": 0}), np.array([[4], [9]]), (9,))
    batch = SimpleNamespace(lengths=lengths)
    call = dataclasses.replace(Invocation.of((), {}), batch=batch)
    for output in (torch.zeros(()), torch.zeros(2), torch.zeros(2, 5), "text", [], {"a": None}):
        assert watched(growth, call, output, lambda: pytest.fail("nothing was read")) is output
    hidden = torch.ones(2, 9, requires_grad=True) * 2
    found: list[bool] = []
    assert watched(growth, call, hidden, lambda: found.append(True)) is hidden
    hidden.sum().backward()
    assert found == [True]
