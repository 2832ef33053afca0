"""Padded rows in the ring: as long as need be there, and gathered as long as their batch is."""

import itertools

import pytest

from tests.device.backend import counts
from tests.device.simulated.check_memory import rings
from tests.device.simulated.runs import assert_same, plain, run
from tests.helpers.sentences import Encoder, Sentences, pad_by_eights, pad_left, pad_right

NUM, B, WIDTH = 48, 8, 16


def freezes(model, boundary):
    for name in ("embed", "layers.0"):
        model.get_submodule(name).requires_grad_(False)


def settings(collate=pad_right, **others):
    return {
        "make": Encoder, "boundary": "layers.0", "freezes": freezes, "data": Sentences(NUM),
        "collate_fn": collate, "epochs": 6,
    } | others  # fmt: skip


def served(directory, *, on_step=None, **changes):
    """Train; return the run, which of the rings it had are open in the end, and the bytes that each
    epoch copied to the device.
    """
    seen, bytes_by_step, is_open = [], [], []

    def noting(step, model, cache):
        seen.extend(ring for ring in rings(cache) if ring is not None and ring not in seen)
        is_open.append([not ring.is_closed for ring in seen])
        bytes_by_step.append(counts(all_threads=True).to_device)
        if on_step is not None:
            on_step(step, model, cache)

    kwargs = {"cache_kwargs": changes.pop("cache_kwargs", None)}
    found = run(directory, gate="always", on_step=noting, **settings(**changes), **kwargs)
    ends = bytes_by_step[NUM // B - 1 :: NUM // B]
    return found, is_open[-1], [b - a for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("collate", [pad_right, pad_left, pad_by_eights])
def test_padded_rows_are_gathered_from_the_ring_and_losses_are_those_of_computing(
    tmp_path, collate
):
    found, is_open, crossed = served(tmp_path, collate=collate)
    assert_same(found, plain(**settings(collate)))
    assert found[2].why_not is None
    assert found[2].hits == 5 * NUM
    assert is_open[-1]
    # Labels, audits, and what is read of the front's samples: no row crosses a second time.
    assert crossed[-1] < NUM * 4 * WIDTH * 4


def test_longer_rows_than_have_come_are_given_a_ring_of_their_own(tmp_path):
    """In the order of their lengths: each batch has longer rows than the ring was made for."""
    data = Sentences(NUM)
    order = sorted(range(NUM), key=lambda i: len(data.tokens[i]))
    changes = {"data": data, "sampler": order, "shuffle": False}
    found, is_open, crossed = served(tmp_path, **changes)
    assert_same(found, plain(**settings(**changes)))
    assert found[2].hits == 5 * NUM
    assert 2 <= len(is_open) <= 8
    assert is_open == [False] * (len(is_open) - 1) + [True]
    assert crossed[-1] < NUM * 4 * WIDTH * 4
