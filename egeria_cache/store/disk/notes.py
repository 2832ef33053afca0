"""Small notes that a cache keeps beside its generations, `note-NAME.json`. None is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from egeria_cache.errors import StoreError
from egeria_cache.store.disk.manifest import ROOT_FORMAT, read_json, write_json

__all__ = ["read_note", "read_notes", "write_note"]

PREFIX = "note-"


def write_note(directory: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a note over what it said before, if the disk lets us."""
    with contextlib.suppress(OSError, StoreError):
        write_json(_path(directory, name), {"format": ROOT_FORMAT, **content})


def read_note(directory: Path, name: str) -> dict[str, Any]:
    """Return what a note says; nothing where there is none that can be read."""
    with contextlib.suppress(OSError, StoreError):
        return read_json(_path(directory, name), ROOT_FORMAT)
    return {}


def read_notes(directory: Path) -> list[dict[str, Any]]:
    """Return what all of them say."""
    paths = sorted(directory.glob(f"{PREFIX}*.json"))
    found = [read_note(directory, path.stem.removeprefix(PREFIX)) for path in paths]
    return [one for one in found if one]


def _path(directory: Path, name: str) -> Path:
    return directory / f"{PREFIX}{name}.json"
