"""Flip bits in a cache's files, and use each damaged copy in a child process.

python -m tests.helpers.flipper DIRECTORY NUM_FLIPS SEED: prints a JSON count of outcomes. A flip of
which the child dies by a signal, hangs, raises, or reads a wrong tensor is a failure, and listed.
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
from dataclasses import dataclass
from pathlib import Path

import torch

from egeria_cache.errors import StoreError
from egeria_cache.store.disk.manifest import generation_name
from egeria_cache.store.store import ActivationStore

FIELDS = {"use": "flips", "boundary": "layer1"}
NUM_SAMPLES = 60
FLIPS_PER_CHILD = 25


def truth(sample: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sample)
    size = 1500 if sample % 2 else 80  # of several pages, and of a part of one
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


@dataclass(frozen=True)
class Flip:
    path: Path
    """Relative to the cache's directory."""
    at: int
    bit: int


def draw_flips(original: Path, num_flips: int, seed: int) -> list[Flip]:
    """Half of the flips anywhere, half in the small files, which are few."""
    rng = random.Random(seed)
    files = [path for path in original.rglob("*") if path.is_file() and path.stat().st_size]
    weights = [path.stat().st_size for path in files]
    flips = []
    for number in range(num_flips):
        path = rng.choices(files, weights)[0] if number % 2 else rng.choice(files)
        at = rng.randrange(path.stat().st_size)
        flips.append(Flip(path.relative_to(original), at, rng.randrange(8)))
    return flips


def try_one(original: Path, copy: Path, flip: Flip) -> str:
    """Use a copy with this bit flipped; of the generations only the one it is in is needed."""
    inside = flip.path.parent.name
    codecs = {generation_name({**FIELDS, "codec": codec}): [codec] for codec in CODECS}
    unused = {name for name in codecs if inside in codecs and name != inside}
    shutil.copytree(original, copy, ignore=lambda _, names: unused & {*names})
    with (copy / flip.path).open("r+b") as file:
        file.seek(flip.at)
        (byte,) = file.read(1)
        file.seek(flip.at)
        file.write(bytes([byte ^ 1 << flip.bit]))
    try:
        signal.alarm(60)
        return use(copy, codecs.get(inside, CODECS))
    except BaseException:
        return "raised " + traceback.format_exc()
    finally:
        signal.alarm(0)
        shutil.rmtree(copy, ignore_errors=True)


def try_in_a_child(directory: Path, flips: Sequence[Flip]) -> list[str]:
    """Return the flips' outcomes up to the first that kills the child, that one included.

    One child tries several: to fork a process that has torch loaded costs more than a flip.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for flip in flips:
            answer = try_one(directory / "original", directory / "copy", flip)
            os.write(writing, json.dumps(answer[-3000:]).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answers = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        answers.append(f"signal {os.WTERMSIG(status)}")
        shutil.rmtree(directory / "copy", ignore_errors=True)
    assert answers
    return answers


def run(directory: Path, num_flips: int, seed: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    fill(directory / "original")
    flips = draw_flips(directory / "original", num_flips, seed)
    outcomes: collections.Counter[str] = collections.Counter()
    failures, done = [], 0
    while done < num_flips:
        answers = try_in_a_child(directory, flips[done : done + FLIPS_PER_CHILD])
        for flip, answer in zip(flips[done:], answers, strict=False):
            outcomes[answer.split(maxsplit=1)[0]] += 1
            if answer not in ("intact", "missed", "refused"):
                failures.append([str(flip.path), flip.at, flip.bit, answer])
        done += len(answers)
        if done % 500 < len(answers):
            print(f"{done} flips: {dict(outcomes)}", file=sys.stderr, flush=True)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
