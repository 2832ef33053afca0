"""Reading: the same with the kernel and without it, byte for byte; every record verified."""

from __future__ import annotations

import _thread
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from egeria_cache.store import NotInMemoryError, codecs
from egeria_cache.store.codecs import SWITCH, Codec, CodecError, Coder, decode, kernel
from egeria_cache.store.generation import encode_keys
from tests.helpers.stored import ActivationStore
from tests.store.conftest import damage, entries_of, keep


@contextmanager
def without_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        kernel.cache_clear()
        yield
    kernel.cache_clear()


def some(*shape: int) -> Tensor:
    """Always the same, so that a place in their file is what it is."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_where_there_is_a_compiler_it_was_compiled():
    if shutil.which(os.environ.get("CC") or "cc") is None or os.environ.get(SWITCH) == "0":
        pytest.skip("no compiler here, or the kernel is left aside")
    assert kernel() is not None


@pytest.mark.usefixtures("compiled")
def test_a_library_of_another_version_is_left_aside(monkeypatch):
    monkeypatch.setattr(codecs, "SHAPE", [codecs.SHAPE[0] + 1, *codecs.SHAPE[1:]])
    kernel.cache_clear()
    assert kernel() is None


@pytest.mark.usefixtures("compiled")
def test_a_thread_that_python_has_not_made_decodes_and_is_noted_nowhere():
    known, out = threading.enumerate(), np.zeros(4, np.uint8)
    _thread.start_new_thread(decode, (zstandard.compress(b"abcd"), 1, out, (1, False)))
    while not out.all():
        time.sleep(0.001)
    assert not {*threading.enumerate()} - {*known}


dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
     torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
)  # fmt: skip
ids = st.one_of(
    st.lists(st.integers(0, 500), min_size=1, max_size=24, unique=True),
    st.lists(st.integers(-(2**40), 2**62), min_size=1, max_size=24, unique=True),
    st.lists(st.text(max_size=5), min_size=1, max_size=12, unique=True),
)


@pytest.mark.usefixtures("compiled")
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
        keep(store, sample_ids, fields, variant=variant)
        first = store.get_batch(asked, variant=variant)
        again = store.get_batch(asked, variant=variant)
    with without_kernel(), ActivationStore(directory, codec="zstd") as store:
        plain = store.get_batch(asked, variant=variant)
        if not plain[1][:-1].all():  # it needs the kernel, and is computed and stored again
            assert codec in (Codec.SPLIT, Codec.BITMAP)
            assert store.stats().corrupt == 0
            keep(store, sample_ids, fields, variant=variant)
            plain = store.get_batch(asked, variant=variant)
    for found, hit in (first, again):
        assert hit.tolist() == plain[1].tolist()
        assert hit[:-1].all()
        for name, tensor in plain[0].items():
            assert found[name].dtype == tensor.dtype
            assert (bits(found[name]) == bits(tensor)).all()
    assert (bits(first[0]["x"][: len(sample_ids)]) == bits(values.flip(0).to(dtype))).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("codec", ["raw", "bitmap+split", "zstd", "split+zstd"])
@pytest.mark.parametrize("stack_bytes", [1 << 20, 1 << 50], ids=["helped", "no thread can start"])
@pytest.mark.cases(4)
def test_two_threads_read_a_batch_as_one(request, directory, monkeypatch, codec, stack_bytes):
    ids, rows = np.random.default_rng(0).permutation(400) - 3, some(400, 8000).relu()
    libc, ours, usual = ctypes.CDLL(None), *map(ctypes.create_string_buffer, (64, 64))
    libc.pthread_getattr_default_np(usual)
    request.addfinalizer(lambda: libc.pthread_setattr_default_np(usual))
    libc.pthread_attr_init(ours)
    libc.pthread_attr_setstacksize(ours, ctypes.c_size_t(stack_bytes))
    with ActivationStore(directory, codec=codec) as store:
        keep(store, range(397), rows[:397])
        damage(store, [2, 393])
        libc.pthread_setattr_default_np(ours)
        for load in [(0.0, 0.0, 0.0)] * 9 + [OSError("hidden")]:  # then one thread reads all
            monkeypatch.setattr(os, "getloadavg", Mock(side_effect=[load]))
            store._own()._files.hidden.clear()
            found, hit = store.get_batch(ids)
            assert hit.tolist() == [one >= 0 and one not in (2, 393) for one in ids]
            assert torch.equal(found, rows[ids] * torch.from_numpy(hit)[:, None])
        assert store.stats().corrupt == 20


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.usefixtures("compiled")
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
    codec, stored = Coder(codec.label).encode(row, elements)
    encoded = bytearray(stored)
    for at, byte in changes:
        encoded[at % len(encoded)] = byte
    if changes:
        del encoded[len(encoded) - cut % (len(encoded) // 2) :]
    around = np.full((3, len(row)), 7, np.uint8)
    try:
        decode(bytes(encoded), codec, around[1], elements)
        assert changes or (around[1] == row).all()
    except CodecError:
        assert changes
    assert (around[0] == 7).all()
    assert (around[2] == 7).all()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("ids", [range(64), [*map(str, range(64))]], ids=["integers", "texts"])
def test_what_is_asked_for_from_memory_waits_for_no_disk(directory, codec, ids):
    rows = {"x": some(64, 2000), "name": [str(one) for one in ids]}
    rows = {"x": rows["x"]} if isinstance(ids, range) else rows  # one by one
    with ActivationStore(directory, codec=codec) as store:
        keep(store, ids, rows)
        generation = store._own()
        some_ids = [ids[3], ids[30], ids[3]]  # asking for another page reads ahead of it
        got, found = from_memory(generation, some_ids)
        assert found.all()
        assert torch.equal(got["x"], rows["x"][[3, 30, 3]])
        with pytest.raises(NotInMemoryError):
            from_memory(generation, [ids[3], "not there"])
        place = int(entries_of(store, [ids[60]])["place"][0])
    (path,) = directory.glob("gen-*/data.mdb")
    with ActivationStore(directory) as store, path.open("rb") as file:
        generation = store._own()
        forget(path)
        try:
            os.preadv(file.fileno(), [bytearray(8)], place, os.RWF_NOWAIT)
            pytest.skip("this file system keeps its pages")
        except BlockingIOError:
            pass
        with pytest.raises(NotInMemoryError):
            from_memory(generation, some_ids)
        got, found = generation.get_batch(ids)
        assert found.all()
        assert torch.equal(got["x"], rows["x"])
        assert from_memory(generation, some_ids)[1].all()


def from_memory(generation, ids):
    return generation.get_located(generation.locate(ids), in_memory=True)


def forget(path: Path) -> None:
    """Let memory keep nothing of a file that nobody has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("place", [2**40, 2**64 - 8, 16], ids="at {}".format)
@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.cases(12)
def test_a_record_that_is_not_where_its_entry_says_is_found_by_its_block(
    directory, codec, place, way
):
    rows = some(64, 3000)
    fields = {"x": rows} if way == "together" else {"x": rows, "name": ["of its own"] * 64}
    with ActivationStore(directory, codec=codec) as store:
        keep(store, range(64), fields)
        entries = entries_of(store, list(range(64))).copy()
        entries["place"][7] = place
        with store._own()._files.reading(writes=True) as view:
            (key,) = encode_keys([7])
            view._transaction.put(key, entries[7].tobytes(), db=view.tables[b"samples"])
        found, hit = store.get_batch(range(64))
        assert hit.all()
        assert torch.equal(found["x"], rows)


class Halved(TorchFunctionMode):
    """Of the user's: whatever makes floats makes shorter ones."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        is_float = isinstance(made, torch.Tensor) and made.dtype is torch.float32
        return made.half() if is_float else made


@pytest.mark.parametrize("mode", [Halved, lambda: torch.device("meta")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_of_the_loop_do_not_change_what_is_read(directory, mode, dtype):
    rows = some(40, 300).to(dtype)
    with ActivationStore(directory) as store:
        keep(store, range(40), rows)
        for _ in range(2):
            with mode():
                found, hit = store.get_batch(range(40))
            assert hit.all()
            assert (found.dtype, found.device) == (rows.dtype, rows.device)
            assert torch.equal(found, rows)


# Compiling the kernel while Egeria is installed: it is made, or left out, and nothing fails.

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The hook at work on a copy of the source, without hatchling, which is not needed after."""
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", ModuleType(f"hatchling{name}"))
    plugin = ModuleType("interface")
    plugin.BuildHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", plugin)
    spec = importlib.util.spec_from_file_location("build_kernel", ROOT / "build_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / module.SOURCE).parent.mkdir(parents=True)
    shutil.copy(ROOT / module.SOURCE, tmp_path / module.SOURCE)
    hook = module.KernelHook()
    hook.root, hook.library, hook.warnings = str(tmp_path), tmp_path / module.LIBRARY, []
    hook.app = SimpleNamespace(display_warning=hook.warnings.append)
    return hook


def build(hook):
    data = {"artifacts": [], "pure_python": True}
    hook.initialize("standard", data)
    return data


@pytest.mark.parametrize("compiler", ["no such compiler", "false", "'cc", "not-utf-8"])
def test_without_a_compiler_there_is_a_warning_and_no_library_of_another_time(
    hook, tmp_path, monkeypatch, compiler
):
    if compiler == "not-utf-8":
        compiler = str(tmp_path / "cc")
        Path(compiler).write_text("#!/bin/sh\nprintf 'caf\\351: fatal' >&2; exit 1\n")
        Path(compiler).chmod(0o755)
    monkeypatch.setenv("CC", compiler)
    hook.library.write_bytes(b"of another time")
    assert build(hook) == {"artifacts": [], "pure_python": True}
    assert not hook.library.exists()
    assert len(hook.warnings) == 1


# A mapping is touched where the disk cannot read it: a signal. A miss here; others' elsewhere.


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


UNREADABLE = """
import ctypes, faulthandler, logging, mmap, os, shutil, signal, sys, threading
from pathlib import Path
import torch
from tests.helpers.stored import ActivationStore

how, directory, codec = sys.argv[1:]
logging.basicConfig()
os.getloadavg = lambda: (0, 0, 0)
if how == "early":
    faulthandler.enable()
rows = torch.arange(64.0)[:, None] + torch.rand(64, 30_000).round()
with ActivationStore(directory, codec=codec) as store:
    store.put_batch(range(64), rows)
    assert store.flush(60)
    assert store.get_batch(range(64))[1].all()
    if how == "late":
        faulthandler.enable()
    if how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
    # Half of what is mapped instead is not there; the file is as it was, so nothing tells of it.
    environment = store._own()._files._environment
    cut = directory + "/cut"
    shutil.copy(directory + "/" + store._own().name + "/data.mdb", cut)
    file = open(cut, "r+b")
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    where = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    file.truncate(os.path.getsize(cut) // 8192 * 4096)
    known, environment.map = environment.map, (where, len(mapped), environment.descriptor)

    def look(repeat=range(3)):
        for _ in repeat:
            found, hit = store.get_batch(range(64))
            assert 8 < hit.sum() < 56, hit
            for row in range(64):
                assert torch.equal(found[row], rows[row] * hit[row]), row

    look()
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if how == "blocked":
        assert signal.SIGBUS in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    # It is not stored anew: the disk may find it again.
    before = store.stats().stored_bytes
    store.put_batch(range(64), rows)
    assert store.flush(60)
    assert store.stats().stored_bytes == before
    environment.map = known
with ActivationStore(directory) as store:
    assert torch.equal(store.get_batch(range(64))[0], rows)
"""


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("codec", ["raw", "bitmap+split"])
@pytest.mark.parametrize("how", ["early", "late", "never", "blocked"])
def test_what_the_disk_cannot_read_under_a_mapping_is_a_miss_and_no_signal(tmp_path, how, codec):
    """Whoever else handles that signal, since before or after, or blocks it."""
    ran = run_python(UNREADABLE, how, str(tmp_path), codec)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("the disk cannot read it") == 1, ran.stderr


ANOTHERS_FAULT = """
import faulthandler, mmap, os, signal, sys, torch
from tests.helpers.stored import ActivationStore

how, directory = sys.argv[1:]
if how == "early":
    faulthandler.enable()
if how == "handled":
    signal.signal(signal.SIGBUS, lambda *_: print("handled", flush=True))
with ActivationStore(directory) as store:
    store.put_batch(range(4), torch.randn(4, 1000))
    assert store.flush(60)
    for _ in range(2):
        assert store.get_batch(range(4))[1].all()
if how == "late":
    faulthandler.enable()
if how == "handled":
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGBUS)
    raise SystemExit
file = open(directory + "/other", "w+b")
file.truncate(8192)
mapped = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
mapped[5000]
"""


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("how", ["early", "late", "never", "handled"])
def test_the_signal_of_another_fault_is_left_to_others(tmp_path, how):
    ran = run_python(ANOTHERS_FAULT, how, str(tmp_path))
    if how == "handled":
        assert (ran.returncode, ran.stdout) == (0, "handled\nhandled\n"), ran.stderr
        return
    assert ran.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in ran.stderr) == (how != "never")
