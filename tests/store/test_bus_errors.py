"""A mapping is touched where the disk cannot read it: a signal. A miss here; others' elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


UNREADABLE = """
import ctypes, faulthandler, logging, mmap, os, shutil, signal, sys, threading
from pathlib import Path
import torch
from egeria_cache.store import ActivationStore

how, directory, codec = sys.argv[1:]
logging.basicConfig()
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
from egeria_cache.store import ActivationStore

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
