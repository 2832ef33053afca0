"""What a process says of the cache that it has open, for `cache-inspect watch` in another one.

A small file per open cache, `live-PID-N.json`, written anew from time to time and removed at the
end. Nothing depends on it: it is not flushed to disk, and whatever goes wrong with it is ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from egeria_cache.errors import ForeignError
from egeria_cache.store.disk.own import open_own

__all__ = ["LiveFile", "read_live"]

PREFIX = "live-"
MAX_BYTES = 1 << 16
_NUMBERS = itertools.count()


class LiveFile:
    """The file of one open cache."""

    def __init__(self, directory: Path) -> None:
        self._process = os.getpid()
        self._path = directory / f"{PREFIX}{self._process}-{next(_NUMBERS)}.json"
        with contextlib.suppress(OSError):
            for path in directory.glob(f"{PREFIX}*.json"):
                if not _is_alive(path):  # its process was killed
                    path.unlink()

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace what the file says; from one thread at a time."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError, ForeignError):
            text = json.dumps({"at": time.time(), **content})
            with open(open_own(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(text)
            beside.replace(self._path)

    def remove(self) -> None:
        """The cache is closed; a forked child leaves its parent's file alone."""
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._path.unlink()


def read_live(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each live process last said of each of its caches in this directory."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(directory.glob(f"{PREFIX}*.json")):
        with contextlib.suppress(OSError, ForeignError, ValueError, RecursionError):
            if not _is_alive(path):
                continue
            with open(open_own(path, os.O_RDONLY), "rb") as file:
                content = json.loads(file.read(MAX_BYTES))
            if isinstance(content, dict):
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
    return int(path.name.removeprefix(PREFIX).partition("-")[0])
