"""Padded rows on the device: as long as their batch is."""

from __future__ import annotations

import pytest
import torch

from egeria_cache.cache import engine_callbacks
from egeria_cache.prefetch import prefetcher
from tests.device.backend import counts
from tests.device.simulated.runs import assert_same, plain, run
from tests.helpers.sentences import Encoder, Sentences, pad_by_eights, pad_left, pad_right

NUM, B = 48, 8


def freezes(model, boundary):
    for name in ("embed", "layers.0"):
        model.get_submodule(name).requires_grad_(False)


def settings(collate=pad_right, **others):
    return {
        "make": Encoder, "boundary": "layers.0", "freezes": freezes, "data": Sentences(NUM),
        "collate_fn": collate, "epochs": 6,
    } | others  # fmt: skip


def served(directory, **changes):
    """Train with a cache."""
    return run(directory, gate="always", **settings(**changes))


@pytest.mark.parametrize("collate", [pad_right, pad_left, pad_by_eights])
def test_padded_rows_come_ahead_and_losses_are_those_of_computing(tmp_path, collate):
    found = served(tmp_path, collate=collate)
    assert_same(found, plain(**settings(collate)))
    assert found[2].why_not is None
    assert found[2].hits == 5 * NUM


@pytest.mark.parametrize("free", [0, 10_000, None])
def test_batches_that_grow_from_step_to_step_come_in_whatever_room_there_is(
    tmp_path, monkeypatch, free
):
    """In the order of their lengths: each batch has longer rows than those before."""
    monkeypatch.setattr(prefetcher, "room", lambda device: free)
    data = Sentences(NUM)
    order = sorted(range(NUM), key=lambda i: len(data.tokens[i]))
    changes = {"data": data, "sampler": order, "shuffle": False}
    found = served(tmp_path, **changes)
    assert_same(found, plain(**settings(**changes)))
    assert found[2].hits == 5 * NUM


def test_batches_that_are_partly_hits_are_as_long_as_their_longest_sample(tmp_path):
    """Every second sample was stored by a run before."""
    served(tmp_path, sampler=range(0, NUM, 2), shuffle=False, epochs=2)
    found = served(tmp_path)
    assert_same(found, plain(**settings()), exact=False)
    assert found[2].partial_batches > 0
    assert found[2].hits > 5 * NUM


def test_a_step_of_padded_hits_makes_the_host_wait_no_more_than_a_computed_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        engine_callbacks, "MAX_COST", 0.0
    )  # the first hit is recomputed, and no other

    def waits(gate):
        steps, before = [], [counts().waits]

        def on_step(step, model, cache):
            steps.append(counts().waits - before[0])
            before[0] = counts().waits

        run(tmp_path / gate, gate=gate, on_step=on_step, **settings())
        return steps

    computed, hits = waits("never"), waits("always")
    last = slice(3 * NUM // B, None)
    more = [a - b for a, b in zip(hits[last], computed[last], strict=True)]
    assert more == [0] * 3 * (NUM // B)
    assert torch.get_num_threads() == 1
