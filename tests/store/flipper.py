"""Flip bits in a cache's files, and use each damaged copy in a child process of its own.

python flipper.py DIRECTORY NUM_FLIPS SEED: prints a JSON count of outcomes. A child that dies of a
signal, hangs, raises, or reads a wrong tensor is a failure and its flip is listed.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from egeria_cache.errors import StoreError
from egeria_cache.manifest import generation_name
from egeria_cache.store import ActivationStore

FIELDS = {"use": "flips", "boundary": "layer1"}
NUM_SAMPLES = 60


def truth(sample: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sample)
    size = 1500 if sample % 2 else 80  # in pages of their own, and inside a leaf
    act = torch.randn(size, generator=generator)
    return {"act": act.relu() if sample % 3 else act, "label": torch.tensor(sample)}


TRUTH = [truth(sample) for sample in range(NUM_SAMPLES + 10)]
CODECS = ("raw", "zstd", "bitmap+split")


def fill(directory: Path) -> None:
    for codec in CODECS:
        with ActivationStore(directory, "100MB", codec=codec) as store:
            generation = store.open_generation({**FIELDS, "codec": codec})
            for start in range(0, NUM_SAMPLES, 10):
                samples = TRUTH[start : start + 10]
                batch = {name: [one[name] for one in samples] for name in ("act", "label")}
                generation.put_batch(range(start, start + 10), batch)
                store.flush(30)


def use(directory: Path, codecs: Sequence[str]) -> str:
    """Read all, write some more, read again."""
    try:
        store = ActivationStore(directory, "100MB", codec="raw")
    except StoreError:
        return "refused"
    with store:
        outcome = "intact"
        for codec in codecs:
            try:
                generation = store.open_generation({**FIELDS, "codec": codec})
            except StoreError:
                outcome = "refused"
                continue
            for turn in range(2):
                got, hit = generation.get_batch(range(NUM_SAMPLES + 10))
                for row in hit.nonzero()[0].tolist():
                    for name, value in TRUTH[row].items():
                        if not torch.equal(got[name][row], value):
                            return "wrong"
                if not hit[:NUM_SAMPLES].all() and outcome == "intact":
                    outcome = "missed"
                if turn == 0:  # what was missed, and ten new samples
                    batch = {name: [one[name] for one in TRUTH] for name in ("act", "label")}
                    generation.put_batch(range(NUM_SAMPLES + 10), batch)
                    store.flush(10)
        return outcome


def run(directory: Path, num_flips: int, seed: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rng = random.Random(seed)
    original = directory / "original"
    fill(original)
    files = [path for path in original.rglob("*") if path.is_file() and path.stat().st_size]
    touched = {generation_name({**FIELDS, "codec": codec}): [codec] for codec in CODECS}
    weights = [path.stat().st_size for path in files]
    outcomes: collections.Counter[str] = collections.Counter()
    failures = []
    for flip in range(num_flips):
        # Half of the flips anywhere, half in the trees' pages and small files, which are few.
        path = rng.choices(files, weights)[0] if flip % 2 else rng.choice(files)
        blob = bytearray(path.read_bytes())
        at = rng.randrange(len(blob))
        if flip % 4 == 0 and path.name == "data.mdb":
            at = at // 4096 * 4096 + rng.randrange(128)
        bit = rng.randrange(8)
        blob[at] ^= 1 << bit
        copy = directory / "copy"
        shutil.copytree(original, copy)
        (copy / path.relative_to(original)).write_bytes(blob)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                answer = use(copy, touched.get(path.parent.name, CODECS))
            except BaseException:
                answer = "raised " + traceback.format_exc()
            os.write(writing, answer.encode()[-4000:])
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        answer = os.read(reading, 5000).decode()
        os.close(reading)
        if os.WIFSIGNALED(status):
            answer = f"signal {os.WTERMSIG(status)}"
        outcomes[answer.split(maxsplit=1)[0]] += 1
        if answer not in ("intact", "missed", "refused"):
            failures.append([str(path.relative_to(original)), at, bit, answer])
        shutil.rmtree(copy, ignore_errors=True)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
