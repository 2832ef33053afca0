"""Small files beside a cache, none of which is needed: whatever goes wrong with one is ignored.

`note-NAME.json` is what one run leaves for the next.

One note says how often the samples of a loader were passed, over all runs that share the directory:
random draws of samples are replaced in turns (`samples/draws.py`), and what is stored is the newest
of each. A run over a directory that others have filled goes on where they stopped: it is served
from its first pass on. Which draws it has is decided when it begins, and is part of its loader's
state: a run that is resumed, here or elsewhere, has the draws that it would have had.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from egeria_cache.errors import StoreError
from egeria_cache.samples import Clock, LoaderSource
from egeria_cache.store import ROOT_FORMAT, read_json, write_json

NOTE = "note-"
MAX_TICK = 1 << 31


def read_notes(directory: Path, name: str = "*") -> list[dict[str, Any]]:
    """Return what the notes of this name say, or all; those that cannot be read are left out."""
    found = []
    for path in sorted(directory.glob(f"{NOTE}{name}.json")):
        with contextlib.suppress(OSError, StoreError):
            found.append(read_json(path, ROOT_FORMAT))
    return found


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
        return self._known.get(name) or next(map(_clock, read_notes(self._directory, name)), None)

    def ended(self, source: LoaderSource, clock: Clock) -> None:
        """Note that all samples have been passed."""
        after, name = Clock(clock.tick + 1, clock.since), _name(source)
        self._known[name] = after
        content = {"format": ROOT_FORMAT, "tick": after.tick, "since": after.since}
        with contextlib.suppress(OSError, StoreError):
            write_json(self._directory / f"{NOTE}{name}.json", content)


def _name(source: LoaderSource) -> str:
    fields = {**source.fields, "reuse": source.draws.reuse, "kept": source.draws.kept}
    text = json.dumps(fields, sort_keys=True, default=repr)
    return f"draws-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _clock(note: dict[str, Any]) -> Clock | None:
    tick, since = note.get("tick"), note.get("since")
    if type(tick) is int and type(since) is int and 0 <= since <= tick < MAX_TICK:
        return Clock(tick, since)
    return None
