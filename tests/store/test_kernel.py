"""The compiled kernel: the same as without it, byte for byte; what it believes, and how long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from egeria_cache.store import ActivationStore, native
from egeria_cache.store.codecs.codec import Codec, Coder, Fields
from egeria_cache.store.codecs.gather import Source
from egeria_cache.store.decoders import Decoders, num_parts
from egeria_cache.store.disk.segment import SEGMENT_NAME, Segment
from egeria_cache.store.native import SWITCH, kernel
from egeria_cache.store.serve import NUM_TURNS

FLUSH_S = 30
needs_kernel = pytest.mark.skipif(kernel() is None, reason="nothing was compiled here")


@contextmanager
def without_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        kernel.cache_clear()
        yield
    kernel.cache_clear()


@contextmanager
def stored(
    directory: Path, rows: Tensor, codec: str = "raw", **options: str
) -> Iterator[ActivationStore]:
    with ActivationStore(directory, codec=codec, **options) as store:
        store.put_batch(range(len(rows)), rows)
        assert store.flush(FLUSH_S)
        yield store


def some(*shape: int) -> Tensor:
    """Always the same, so that a place in their file is what it is."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def records_of(directory: Path) -> Path:
    (path,) = directory.glob(f"gen-*/{SEGMENT_NAME}")
    return path


def flip(path: Path, at: int, *, secretly: bool = False) -> None:
    """Change a bit; secretly: so that the file seems not to have been written to."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    if secretly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_where_there_is_a_compiler_it_was_compiled():
    if shutil.which(os.environ.get("CC") or "cc") is None or os.environ.get(SWITCH) == "0":
        pytest.skip("no compiler here, or the kernel is left aside")
    assert kernel() is not None


@pytest.mark.usefixtures("compiled")
def test_a_library_of_another_version_is_left_aside(monkeypatch):
    monkeypatch.setattr(native, "SHAPE", [native.SHAPE[0] + 1, *native.SHAPE[1:]])
    kernel.cache_clear()
    assert kernel() is None
    assert native.has_kernel() is False


AT_EXIT = """
import atexit
import numpy as np

def decode():
    out = np.zeros(5000, np.uint8)
    coder.decode_into(packed, Codec.ZSTD, out, (1, False))
    print(int(out.sum()))

atexit.register(decode)  # after all that is cleared up at the end
from egeria_cache.store.codecs.codec import Codec, Coder, Fields
coder = Coder()
packed = coder.encode(np.ones(5000, np.uint8), Codec.ZSTD, (1, False))[1]
decode()
"""


@pytest.mark.usefixtures("compiled")
def test_a_thread_that_outlives_the_interpreter_may_still_decode():
    freed_memory_is_overwritten = {**os.environ, "MALLOC_PERTURB_": "165"}
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], env=freed_memory_is_overwritten,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "5000\n5000\n"), done.stderr


MAPPED_BY_ANOTHER_USER = """
import os, sys
from egeria_cache.store.native import Mapping, kernel
kernel()
os.setuid(65534)
try:
    Mapping(int(sys.argv[1]))
except OSError as error:
    print(error)
"""


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_file_of_which_the_system_does_not_say_what_is_in_memory_is_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    path.chmod(0o644)  # read, and not written, by all
    with path.open("rb") as file:
        number = file.fileno()
        native.Mapping(number)
        done = subprocess.run(
            [sys.executable, "-c", MAPPED_BY_ANOTHER_USER, str(number)],
            pass_fds=[number], capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert done.stdout == "what of the file is in memory cannot be told\n"


def test_where_nothing_can_be_mapped_everything_is_read(directory, compiled, monkeypatch):
    monkeypatch.setattr(compiled, "can_tell", lambda descriptor, num_bytes: 0)
    loads = []
    monkeypatch.setattr(compiled, "load", lambda *arguments: loads.append(arguments))
    rows = some(64, 3000)
    with stored(directory, rows, "split+zstd") as store:
        for _ in range(3):
            found, hit = store.get_batch(range(64))
            assert hit.all()
            assert torch.equal(found, rows)
        assert not loads  # nothing is read twice


dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
     torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
)  # fmt: skip
ids = st.one_of(
    st.lists(st.integers(0, 500), min_size=1, max_size=24, unique=True),
    st.lists(st.integers(-(2**40), 2**62), min_size=1, max_size=24, unique=True),
    st.lists(st.text(max_size=5), min_size=1, max_size=12, unique=True),
)


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    ids, dtypes, st.sampled_from([*Codec]), st.sampled_from([1, 7, 64, 1000]),
    st.floats(0, 1), st.integers(0, 3), st.integers(0, 2**31),
)  # fmt: skip
def test_it_gives_what_python_gives(
    tmp_path_factory, sample_ids, dtype, codec, width, density, variant, seed
):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(sample_ids), width, generator=generator) * 100
    values *= torch.rand(values.shape, generator=generator) < density
    fields = {"x": values.to(dtype), "y": torch.arange(len(sample_ids))}
    directory = tmp_path_factory.mktemp("kernel")
    asked = [*sample_ids[::-1], *sample_ids[:2], sample_ids[0] * 2]
    with ActivationStore(directory, codec=codec.label) as store:
        store.put_batch(sample_ids, fields, variant=variant)
        assert store.flush(FLUSH_S)
        first = store.get_batch(asked, variant=variant)
        again = store.get_batch(asked, variant=variant)
    with without_kernel(), ActivationStore(directory) as store:
        plain = store.get_batch(asked, variant=variant)
    for found, hit in (first, again):
        assert hit.tolist() == plain[1].tolist()
        assert hit[:-1].all()
        for name, tensor in plain[0].items():
            assert found[name].dtype == tensor.dtype
            assert (bits(found[name]) == bits(tensor)).all()
    assert (bits(first[0]["x"][: len(sample_ids)]) == bits(values.flip(0).to(dtype))).all()


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@needs_kernel
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([Codec.ZSTD, Codec.SPLIT, Codec.BITMAP]),
    st.sampled_from([(1, False), (1, True), (2, True), (4, True), (4, False), (8, True)]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    st.integers(0, 10**6),
    st.integers(0, 2**31),
)
def test_whatever_it_is_given_it_fills_or_refuses(codec, elements, changes, cut, seed):
    generator = np.random.default_rng(seed)
    width, _ = elements
    data = (generator.integers(0, 60, 1024) * generator.integers(0, 2, 1024)).astype(f"<u{width}")
    row = data.view(np.uint8)
    encoded = bytearray(Coder().encode(row, codec, elements)[1])
    for at, byte in changes:
        encoded[at % len(encoded)] = byte
    if changes:
        del encoded[len(encoded) - cut % (len(encoded) // 2) :]
    around = np.full((3, len(row)), 7, np.uint8)
    at, size = np.ones(1, np.int64), np.array([len(encoded)])
    fields = Fields(Source.of(encoded), np.zeros(1, np.int64), size, codec, elements)
    failed = Coder().decode_many(fields, around, at)
    assert (around[0] == 7).all()
    assert (around[2] == 7).all()
    if not changes:
        assert not failed
        assert (around[1] == row).all()


@needs_kernel
@pytest.mark.parametrize("codec", ["raw", "bitmap+split"])
def test_a_record_that_anybody_wrote_to_is_verified_again(directory, codec):
    rows = some(40, 2000).relu()
    with stored(directory, rows, codec) as store:
        for _ in range(3):
            assert store.get_batch(range(40))[1].all()
        path = records_of(directory)
        time.sleep(0.05)  # a tick of the file system's clock
        flip(path, path.stat().st_size // 2)
        found, hit = store.get_batch(range(40))
        assert np.count_nonzero(~hit) == 1
        assert torch.equal(found[torch.from_numpy(hit)], rows[torch.from_numpy(hit)])


@needs_kernel
def test_what_is_believed_is_verified_again_in_turns(directory):
    rows = some(40, 2000)
    with stored(directory, rows) as store:
        for _ in range(2):
            assert store.get_batch(range(40))[1].all()
        path = records_of(directory)
        flip(path, path.stat().st_size // 2, secretly=True)
        seen = [np.count_nonzero(~store.get_batch(range(40))[1]) for _ in range(NUM_TURNS + 1)]
    assert max(seen) == 1
    assert seen[-1] == 1


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_always_means_at_every_read(directory, codec):
    rows = some(40, 2000)
    with stored(directory, rows, codec, verify="always") as store:
        for _ in range(2):
            assert store.get_batch(range(40))[1].all()
        path = records_of(directory)
        flip(path, path.stat().st_size // 2, secretly=True)
        assert np.count_nonzero(~store.get_batch(range(40))[1]) == 1


def test_how_to_verify_is_one_of_two_words(directory):
    with pytest.raises(ValueError, match=r"verify must be 'once' or 'always', got 'never'"):
        ActivationStore(directory, verify="never")


@needs_kernel
def test_what_this_process_adds_does_not_shake_its_belief(directory):
    rows = some(40, 2000)
    with stored(directory, rows) as store:
        for _ in range(2):
            assert store.get_batch(range(40))[1].all()
        store.put_batch(range(40, 80), rows)
        assert store.flush(FLUSH_S)
        path = records_of(directory)
        flip(path, path.stat().st_size // 4, secretly=True)
        # Still believed, but for one part in 64: the records of these forty are in forty places.
        assert store.get_batch(range(40))[1].sum() >= 39
        found, hit = store.get_batch(range(80))
        assert hit.sum() >= 79
        assert torch.equal(found[40:], rows)


@needs_kernel
@pytest.mark.parametrize("spoil", ["nothing in memory", "nothing mapped"])
@pytest.mark.parametrize("codec", ["raw", "split+zstd"])
def test_what_is_not_in_memory_is_read_from_the_disk(directory, monkeypatch, codec, spoil):
    rows = some(64, 3000)
    with stored(directory, rows, codec) as store:
        if spoil == "nothing mapped":
            monkeypatch.setattr(Segment, "map_again", lambda self: None)
        for _ in range(3):
            if spoil == "nothing in memory":
                with records_of(directory).open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found, hit = store.get_batch(range(64))
            assert hit.all()
            assert torch.equal(found, rows)


@needs_kernel
@pytest.mark.parametrize("codec", ["raw", "split+zstd"])
def test_a_file_cut_short_under_the_mapping_is_misses_and_no_signal(directory, codec):
    rows = some(64, 3000)
    with stored(directory, rows, codec) as store:
        for _ in range(2):
            assert store.get_batch(range(64))[1].all()
        path = records_of(directory)
        before = path.stat()
        os.truncate(path, before.st_size // 2)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found, hit = store.get_batch(range(64))
        assert 0 < hit.sum() < 64
        assert torch.equal(found[torch.from_numpy(hit)], rows[torch.from_numpy(hit)])


@pytest.mark.parametrize(
    ("work_s", "more_s", "most", "expected"),
    [(1e-4, 1e-4, 8, 1), (4e-4, 1e-4, 8, 2), (1e-2, 1e-4, 8, 8), (1e-2, 1e-4, 2, 2), (1, 0, 64, 64),
     (1e-3, 1e-2, 64, 1), (0, 1e-4, 4, 1)],
)  # fmt: skip
def test_as_many_threads_as_end_soonest(work_s, more_s, most, expected):
    assert num_parts(work_s, more_s, most) == expected
    if more_s:
        times = [work_s / p + (p - 1) * more_s for p in range(1, most + 1)]
        assert times[expected - 1] <= 1.3 * min(times)


def test_a_crew_covers_everything_once_and_passes_errors_on():
    decoders = Decoders(3)
    try:
        ran = decoders.run("kind", lambda part, coder: (part, get_ident(), id(coder)), 10, 1000)
        assert len(ran) == 3
        assert [at for part, *_ in ran for at in range(10)[part]] == [*range(10)]
        assert len({thread for _, thread, _ in ran}) == len({coder for *_, coder in ran})

        def fail(part: slice, coder: Coder) -> None:
            if part.stop == 10:
                raise ValueError("at the end")

        with pytest.raises(ValueError, match="at the end"):
            decoders.run("kind", fail, 10, 1000)
        assert decoders.run("kind", lambda part, coder: part.stop, 0, 0) == [0]
    finally:
        decoders.close()
