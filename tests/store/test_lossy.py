from __future__ import annotations

import pytest
import torch

from egeria_cache.store.codecs.lossy import LossyError, pack, storage_bytes, unpack
from egeria_cache.store.store import ActivationStore
from tests.store.conftest import keep

FLUSH_S = 30
SHAPES = [(5,), (6, 7), (3, 4, 5), (2, 3, 4, 5), ()]


def through(rows, storage):
    packed, used = pack(rows, storage)
    shape = tuple(rows.shape[1:])
    assert packed.shape == (len(rows), storage_bytes(shape, rows.dtype, used))
    return unpack(packed, shape, rows.dtype, used), used


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("storage", "bound"), [("float16", 5e-4), ("bfloat16", 4e-3), ("int8", 5e-3)]
)
def test_the_error_is_within_the_storages_resolution(storage, bound, shape):
    rows = torch.randn(8, *shape, generator=torch.Generator().manual_seed(0))
    back, used = through(rows, storage)
    assert used == storage
    assert back.shape == rows.shape
    assert back.dtype == rows.dtype
    scale = rows.abs().max() if storage == "int8" else rows.abs()
    assert ((back - rows).abs() <= bound * scale + 1e-7).all()


def test_each_channel_has_a_scale_of_its_own():
    rows = torch.randn(2, 3, 8, 8) * torch.tensor([1e-4, 1.0, 1e4]).view(1, 3, 1, 1)
    back, _ = through(rows, "int8")
    for channel in range(3):
        error = (back - rows)[:, channel].abs().max()
        assert error <= rows[:, channel].abs().max() / 200


@pytest.mark.parametrize(
    ("rows", "storage"),
    [
        (torch.full((2, 3), 1e6), "float16"),
        (torch.tensor([[float("nan")]]), "int8"),
        (torch.tensor([[float("inf")]]), "bfloat16"),
        (torch.arange(6).view(2, 3), "int8"),
        (torch.ones(2, 3, dtype=torch.bool), "float16"),
        (torch.ones(2, 3, dtype=torch.bfloat16), "float16"),
        (torch.ones(2, 3, dtype=torch.complex64), "int8"),
        (torch.empty(2, 0), "int8"),
    ],
    ids=str,
)
def test_what_the_storage_cannot_hold_keeps_every_bit(rows, storage):
    back, used = through(rows, storage)
    assert used is None
    assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))


def test_the_error_is_measured():
    error = LossyError()
    error.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    assert error.relative_rms == pytest.approx(0.1)
    assert LossyError().relative_rms == 0.0


@pytest.mark.parametrize("codec", ["raw", "zstd", "split+zstd", "bitmap+split", "auto"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "int8"])
def test_a_lossy_generation_has_its_own_address_and_states_its_error(directory, storage, codec):
    batch = {
        "act": torch.randn(20, 8, 16),
        "label": torch.arange(20),
        "ragged": [torch.ones(3)] * 20,
    }
    with ActivationStore(directory, codec=codec) as store:
        exact = store.open_generation({"a": 1}).name
        assert store.stats().lossy_error == 0
    with ActivationStore(directory, codec=codec, storage_dtype=storage) as store:
        generation = store.open_generation({"a": 1})
        assert generation.name != exact
        assert generation.fields["storage_dtype"] == storage
        keep(store, range(20), batch, into=generation)
        got, hit = generation.get_batch([3, 50, 4])
        assert hit.tolist() == [True, False, True]
        assert got["act"].dtype == torch.float32
        torch.testing.assert_close(got["act"][[0, 2]], batch["act"][[3, 4]], atol=0.02, rtol=0.02)
        assert not got["act"][1].any()
        assert got["label"][[0, 2]].tolist() == [3, 4]
        assert 0 < store.stats().lossy_error < 0.01
    with ActivationStore(directory, storage_dtype=storage) as store:
        store.open_generation({"a": 1})
        assert 0 < store.stats().lossy_error < 0.01
