"""Every record of a generation, checked: what `cache-inspect verify` does. Reads only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from egeria_cache.store import (
    FORMAT,
    Coder,
    DamagedError,
    GoneError,
    Manifest,
    Record,
    RecordError,
    decode_key,
    in_use_elsewhere,
    inspected,
    is_unfinished,
)

__all__ = ["Damage", "verify"]

PROGRESS_EVERY = 256
"""Records."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that cannot be read."""

    generation: str
    sample: str
    """The sample's ID, or the key where the ID cannot be told."""
    reason: str


def verify(path: Path, progress: Callable[[int, int], None] | None = None) -> Iterator[Damage]:
    """Check and decode every record of a generation; yield what is damaged.

    Args:
        path: The generation's directory.
        progress: Called with (records done, records in all).

    Raises:
        StoreError: It cannot be told: a file is not ours, or cannot be opened now.
        OSError: The disk cannot be read.
    """
    coder, done = Coder(), 0
    try:
        if is_unfinished(path) or Manifest.read(path).format < FORMAT:
            return
        with inspected(path) as view:
            # What another process writes to, it has looked at, and is not at rest.
            looks = not in_use_elsewhere(path)
            if looks and (problem := view.tree_problem()):
                yield Damage(path.name, "?", problem)
                return
            for key, found in view.records():
                done += 1
                try:
                    _decode(found, coder)
                except ValueError as error:  # a RecordError is one
                    yield Damage(path.name, _sample(key), str(error))
                if progress is not None and done % PROGRESS_EVERY == 0:
                    progress(done, view.num_records)
    except GoneError:
        return
    except (DamagedError, OSError) as error:
        if os.path.lexists(path):  # else it was removed just now
            yield Damage(path.name, "?", str(error))
    finally:
        if progress is not None:
            progress(done, done)


def _decode(record: Record | RecordError, coder: Coder) -> None:
    if isinstance(record, RecordError):
        raise record
    for position in range(len(record.payload)):
        record.value(position, coder)


def _sample(key: bytes) -> str:
    try:
        sample_id, variant = decode_key(key)
    except ValueError:
        return key.hex()
    shown = key.hex() if sample_id is None else repr(sample_id)
    return shown if variant == 0 else f"{shown} (variant {variant})"
