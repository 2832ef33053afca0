"""How often the samples of a loader were passed, over all runs that share a cache directory.

Random draws of samples are replaced in turns (`samples/draws.py`), and what is stored is the newest
of each. A run over a directory that others have filled therefore goes on where they stopped: it is
served from its first pass on. Which draws it has is decided when it begins, and is part of its
loader's state: a run that is resumed, here or elsewhere, has the draws that it would have had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from egeria_cache.cache.notes import read_note, read_notes, write_note
from egeria_cache.samples import Clock, Draws, LoaderSource

__all__ = ["Passes", "schedules"]

MAX_TICK = 1 << 31


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
