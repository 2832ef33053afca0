"""Small files beside a cache, none of which is needed: whatever goes wrong with one is ignored.

`note-NAME.json` is what one run leaves for the next; `live-PID-N.json` what a process says of a
cache that it has open, for `cache-inspect` in another one, removed at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from egeria_cache.errors import StoreError
from egeria_cache.store import ROOT_FORMAT, read_json, write_json

__all__ = ["LiveFile", "read_live", "read_note", "read_notes", "write_note"]

NOTE, LIVE = "note-", "live-"
_NUMBERS = itertools.count()


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
