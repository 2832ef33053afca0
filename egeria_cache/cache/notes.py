"""Small files beside a cache, none of which is needed: whatever goes wrong with one is ignored.

`note-NAME.json` is what one run leaves for the next; `live-PID-N.json` what a process says of a
cache that it has open, for `cache-inspect` in another one, removed at the end.

One note says how often the samples of a loader were passed, over all runs that share the directory:
random draws of samples are replaced in turns (`samples/draws.py`), and what is stored is the newest
of each. A run over a directory that others have filled goes on where they stopped: it is served
from its first pass on. Which draws it has is decided when it begins, and is part of its loader's
state: a run that is resumed, here or elsewhere, has the draws that it would have had.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from egeria_cache.errors import StoreError
from egeria_cache.gate import CacheStats
from egeria_cache.prefetch import ReaderThreads
from egeria_cache.samples import Clock, Draws, LoaderSource
from egeria_cache.store import ROOT_FORMAT, read_json, write_json

NOTE, LIVE = "note-", "live-"
_NUMBERS = itertools.count()
EVERY_S = 1.0
MAX_TICK = 1 << 31


def write_note(directory: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a note over what it said before, if the disk lets us."""
    _write(_path(directory, name), content)


def read_note(directory: Path, name: str) -> dict[str, Any]:
    """Return what a note says; nothing where there is none that can be read."""
    return _read(_path(directory, name))


def read_notes(directory: Path) -> list[dict[str, Any]]:
    """Return what all of them say."""
    return [one for path in sorted(directory.glob(f"{NOTE}*.json")) if (one := _read(path))]


class LiveFile:
    """The file of one open cache."""

    def __init__(self, directory: Path) -> None:
        self._process = os.getpid()
        self._path = directory / f"{LIVE}{self._process}-{next(_NUMBERS)}.json"
        with contextlib.suppress(OSError):
            for path in directory.glob(f"{LIVE}*.json"):
                if not _is_alive(path):  # its process was killed
                    path.unlink()

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace what the file says; from one thread at a time."""
        _write(self._path, {"at": time.time(), **content})

    def remove(self) -> None:
        """The cache is closed; a forked child leaves its parent's file alone."""
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._path.unlink()


def read_live(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each live process last said of each of its caches in this directory."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(directory.glob(f"{LIVE}*.json")):
        if _is_alive(path) and (content := _read(path)):
            found.setdefault(_process_of(path), []).append(content)
    return found


def _is_alive(path: Path) -> bool:
    """Whether the process that a file is named after runs, and ran when it was written."""
    try:
        started = psutil.Process(_process_of(path)).create_time()
        return bool(started <= path.lstat().st_mtime + 1)
    except (ValueError, OSError, psutil.Error):
        return False


def _process_of(path: Path) -> int:
    return int(path.name.removeprefix(LIVE).partition("-")[0])


def _path(directory: Path, name: str) -> Path:
    return directory / f"{NOTE}{name}.json"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError, StoreError):
        write_json(path, {"format": ROOT_FORMAT, **content})


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, StoreError):
        return read_json(path, ROOT_FORMAT)
    return {}


class LiveReport:
    """Has a reader thread write the counts, at most once a second, while the model is called.

    Args:
        directory: Of the cache.
        readers: One of them writes: the training thread never waits for the disk.
        stats: Returns the counts.
    """

    def __init__(
        self, directory: Path, readers: ReaderThreads, stats: Callable[[], CacheStats]
    ) -> None:
        self._file = LiveFile(directory)
        self._readers, self._stats = readers, stats
        self._process = os.getpid()
        self._next = time.monotonic() + EVERY_S  # a shorter training tells nothing
        self._is_closed = False
        self._running: Future[None] | None = None

    def called(self) -> None:
        """The model was called with a batch."""
        now = time.monotonic()
        if self._is_closed or now < self._next or os.getpid() != self._process:
            return
        self._next = now + EVERY_S
        if self._running is None or self._running.done():
            # Closed meanwhile, or no thread can be started: then nothing is told.
            with contextlib.suppress(RuntimeError):
                self._running = self._readers.executor.submit(self._write)

    def _write(self) -> None:
        found = self._stats()
        self._file.write(
            {
                "boundary": found.boundary, "hits": found.hits, "misses": found.misses,
                "saved_s": found.saved_s, "dropped_writes": found.dropped_writes,
                "gate": found.gate, "why_not": found.why_not,
            }
        )  # fmt: skip

    def close(self) -> None:
        """Take the file away; after the reader threads have ended."""
        self._is_closed = True
        self._file.remove()


class Passes:
    """The passes of one cache directory. Used from the training thread.

    Args:
        directory: Of the cache.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Clock] = {}

    def next_of(self, source: LoaderSource) -> Clock | None:
        """Return where a loader's first pass stands; None if nobody has passed its samples, or if
        they are not random.
        """
        if not self._known and not read_notes(self._directory):
            return None
        name = _name(source)
        return self._known.get(name) or _clock(read_note(self._directory, name))

    def ended(self, source: LoaderSource, clock: Clock) -> None:
        """Note that all samples have been passed."""
        after, name = Clock(clock.tick + 1, clock.since), _name(source)
        self._known[name] = after
        content = {"of": source.fields, "reuse": source.draws.reuse, "kept": source.draws.kept}
        write_note(self._directory, name, {**content, "tick": after.tick, "since": after.since})


def schedules(directory: Path, fields: Mapping[str, Any]) -> list[tuple[Draws, Clock]]:
    """Return how the random samples of a generation are drawn, and where the next pass stands.

    Args:
        directory: Of the cache.
        fields: Of the generation's content address.
    """
    found = []
    for note in read_notes(directory):
        of, clock = note.get("of"), _clock(note)
        if clock is not None and isinstance(of, dict) and of.items() <= fields.items():
            seed = fields.get("augmentation_seed") or 0
            found.append((Draws(seed, note.get("reuse"), note.get("kept", 1)), clock))
    return found


def _name(source: LoaderSource) -> str:
    fields = {**source.fields, "reuse": source.draws.reuse, "kept": source.draws.kept}
    text = json.dumps(fields, sort_keys=True, default=repr)
    return f"draws-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _clock(note: dict[str, Any]) -> Clock | None:
    tick, since = note.get("tick"), note.get("since")
    if type(tick) is int and type(since) is int and 0 <= since <= tick < MAX_TICK:
        return Clock(tick, since)
    return None
