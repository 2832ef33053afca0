"""A mapping that is touched where its file was cut is a signal: a miss here, others' elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


CUT_WHILE_READ = """
import faulthandler, os, random, sys, threading, time
from pathlib import Path
import torch
from egeria_cache.store import ActivationStore, helpers

early, directory = sys.argv[1] == "early", sys.argv[2]
helpers.WORTH_NS = helpers.WORTH_BYTES = 0  # others touch it, too
if early:
    faulthandler.enable()
rows = torch.arange(64.0)[:, None] + torch.zeros(64, 30_000)
with ActivationStore(directory, codec="raw") as store:
    store.put_batch(range(64), rows)
    assert store.flush(60)
    assert store.get_batch(range(64))[1].all()
if not early:
    faulthandler.enable()
(path,) = Path(directory).glob("gen-*/records.bin")
content = path.read_bytes()
half = len(content) // 2

def cut():
    time.sleep(random.random() / 100)
    with path.open("r+b") as file:
        file.truncate(half)
        time.sleep(random.random() / 1000)
        file.seek(half)
        file.write(content[half:])

def look(store):
    # rows that are served are right; how many are not
    found, hit = store.get_batch(range(64))
    for row in hit.nonzero()[0]:
        assert torch.equal(found[row], rows[row]), row
    return 64 - hit.sum()

for _ in range(40):
    with ActivationStore(directory) as store:
        assert store.get_batch(range(64))[1].all()
        thread = threading.Thread(target=cut)
        thread.start()
        while thread.is_alive():
            look(store)
        thread.join()

# However long a read takes: here it falls into the cut for certain, of which nothing tells it.
with ActivationStore(directory) as store:
    assert look(store) == look(store) == 0
    before = path.stat()
    with path.open("r+b") as file:
        file.truncate(half)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    print("misses:", look(store))
"""


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_file_that_is_cut_while_it_is_read_is_a_miss_and_no_signal(tmp_path, when):
    """Whoever else handles that signal, since before or after."""
    ran = run_python(CUT_WHILE_READ, when, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) > 0


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
