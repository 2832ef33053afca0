"""A look at elements that lie anywhere in memory finds each that is written to, and no other."""

import numpy as np
import pytest
import torch

from egeria_cache.skip.state.content import ContentProbe, _Scattered

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def test_every_element_looked_at_is_seen_and_no_neighbour():
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 99, 257).astype(np.int32) for _ in range(12)]
    views = [array[1:200:step] for step, array in enumerate(arrays, 1)]
    elements = _Scattered(views)
    before = elements.tobytes()
    assert len(before) == sum(view.nbytes for view in views)
    for step, (array, view) in enumerate(zip(arrays, views, strict=True), 1):
        array[0] += 1
        array[200:] += 1
        if step > 1:
            array[2] += 1
        assert elements.tobytes() == before
        for i in range(view.size):
            view[i] += 1
            assert elements.tobytes() != before
            view[i] -= 1
    assert elements.tobytes() == before


def test_elements_that_are_not_aligned_alike_are_read_one_by_one():
    raw = np.zeros(64, np.uint8)
    views = [np.zeros(4, np.int32), raw[1:33].view(np.int32)]
    elements = _Scattered(views)
    before = elements.tobytes()
    views[1][3] = 7
    assert elements.tobytes() != before


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_write_through_data_is_noticed_among_tensors_of_all_kinds(dtype):
    tensors = [torch.zeros(33, dtype=kind) for kind in KINDS for _ in range(3)]
    probe = ContentProbe(tensors)
    assert not probe.changed()
    tensors[3 * KINDS.index(dtype) + 1].data.fill_(1)
    assert probe.changed()


def test_a_single_element_is_seen_within_a_round_and_never_believed_to_be_as_before():
    weight = torch.zeros(256, 256)  # eight pieces
    probe = ContentProbe([weight])
    weight.numpy()[100, 7] = 1.0
    assert any(probe.changed() for _ in range(8))
    assert all(probe.whole_changed() for _ in range(9))
    weight.numpy()[100, 7] = 0.0
    assert not any(probe.changed() or probe.whole_changed() for _ in range(8))
