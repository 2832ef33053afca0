from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from egeria_cache.store.codecs.codec import Codec, Coder, Fields
from egeria_cache.store.codecs.gather import Scratch, Source
from egeria_cache.store.codecs.planes import GROUPS, cut, join
from egeria_cache.store.disk.segment import SEGMENT_NAME
from egeria_cache.store.store import ActivationStore

DATA = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 1000))
def test_gathered_rows_are_the_slices_wherever_they_begin(starts, num_bytes):
    places = np.array([start for start in starts if start + num_bytes <= 1000], np.int64)
    rows = Source.of(DATA.tobytes()).rows(places, num_bytes)
    assert rows.shape == (len(places), num_bytes)
    for row, place in zip(rows, places.tolist(), strict=True):
        assert (row == DATA[place : place + num_bytes]).all()


@pytest.mark.parametrize("start", [-8, -1, 993, 1000, 2**40])
@pytest.mark.parametrize("num_bytes", [8, 9])
def test_a_row_that_is_not_within_the_source_is_an_error_and_never_read(start, num_bytes):
    if start < 0:  # NumPy would count from the end
        start = 2**63 - 8
    with pytest.raises(IndexError):
        Source.of(DATA.tobytes()).rows(np.array([start]), num_bytes)


@pytest.mark.parametrize("width", GROUPS)
@pytest.mark.parametrize("floating", [True, False])
@pytest.mark.parametrize("negative", [True, False])
def test_planes_joined_are_the_numbers_cut(width, floating, negative):
    numbers = np.random.default_rng(width).integers(0, 2**63, 500).astype(f"<u{width}")
    if not negative:
        numbers >>= 1
    planes = [np.ascontiguousarray(one).view(np.uint8) for one in cut(numbers, (width, floating))]
    joined = np.empty_like(numbers)
    join(planes, joined, (width, floating), Scratch())
    assert (joined == numbers).all()


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.SPLIT, Codec.BITMAP])
def test_a_damaged_field_fails_alone_and_the_others_of_its_batch_are_decoded(codec):
    rows = torch.randn(5, 600).relu().numpy().view(np.uint8)
    coder, elements = Coder(), (4, True)
    stored = [bytes(coder.encode(row, codec, elements)[1]) for row in rows]
    stored[2] = bytes(len(stored[2]))
    sizes = np.array(list(map(len, stored)))
    out = np.zeros_like(rows)
    source, starts = Source.of(b"".join(stored)), np.cumsum(sizes) - sizes
    fields = Fields(source, starts, sizes, codec, elements)
    failed = coder.decode_many(fields, out, np.arange(5))
    assert list(failed) == [2]
    assert (np.delete(out, 2, 0) == np.delete(rows, 2, 0)).all()


@pytest.mark.parametrize("codec", ["raw", "zstd", "bitmap+split"])
def test_records_cut_off_the_file_while_it_is_open_are_misses(tmp_path, codec):
    rows = torch.randn(20, 2000).relu()
    with ActivationStore(tmp_path, codec=codec) as store:
        store.put_batch(range(20), rows)
        assert store.flush(30)
        assert store.get_batch(range(20))[1].all()
        (path,) = tmp_path.glob(f"gen-*/{SEGMENT_NAME}")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        found, hit = store.get_batch(range(20))
        assert 0 < hit.sum() < 20
        assert torch.equal(found[torch.from_numpy(hit)], rows[torch.from_numpy(hit)])


def test_raw_compressed_odd_and_absent_samples_of_one_batch_come_back_in_order(tmp_path):
    noise = torch.randint(0, 256, (6, 4096)).to(torch.uint8)
    zeros, short = torch.zeros_like(noise), torch.ones(2, 7)
    with ActivationStore(tmp_path, codec="zstd") as store:
        store.put_batch(range(6), {"x": noise, "name": [str(one) for one in range(6)]})
        store.put_batch(range(6, 12), {"x": zeros, "name": ["zero"] * 6})
        store.put_batch([12, 13], {"x": short, "name": ["odd", "odd"]})
        assert store.flush(30)
        order = [7, 3, 99, 0, 11, 12, 5]
        found, hit = store.get_batch(order)
    assert hit.tolist() == [one != 99 for one in order]
    for one, row, name in zip(order, found["x"], found["name"], strict=True):
        expected = {99: None, 12: short[0]}.get(one, noise[one] if one < 6 else zeros[0])
        assert row is expected is None or torch.equal(row, expected)
        assert name == {99: None, 12: "odd"}.get(one, str(one) if one < 6 else "zero")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=str)
def test_elements_without_a_sign_are_not_rotated_and_both_kinds_are_read_together(dtype):
    elements = (np.dtype(dtype).itemsize, True)
    coder, generator = Coder(), np.random.default_rng(0)
    values = generator.standard_normal((6, 1000)).astype(dtype)
    values[::2] = np.maximum(values[::2], 0)
    values[2, ::7] = -0.0  # which has one
    rows = values.view(np.uint8)
    stored = [bytes(coder.encode(row, Codec.BITMAP, elements)[1]) for row in rows]
    assert [one[7] >> 7 for one in stored] == [1, 0, 0, 0, 1, 0]
    # As earlier releases stored what has no sign.
    numbers = rows[0].view(f"<u{elements[0]}")
    bitmap = np.packbits(numbers != 0).tobytes()
    head = struct.pack("<QQ", np.count_nonzero(numbers), len(bitmap) << 1)
    stored[3] = head + bitmap + coder._split(numbers[numbers != 0], elements)
    sizes, out = np.array(list(map(len, stored))), np.zeros_like(rows)
    source, starts = Source.of(b"".join(stored)), np.cumsum(sizes) - sizes
    fields = Fields(source, starts, sizes, Codec.BITMAP, elements)
    assert not coder.decode_many(fields, out, np.arange(6))
    assert (out == rows[[0, 1, 2, 0, 4, 5]]).all()
