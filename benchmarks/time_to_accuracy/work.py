"""The working file: one JSON line per finished run, so that an interrupted benchmark goes on."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Work"]


class Work:
    """Finished runs under (task, method, seed, fingerprint of the task's settings).

    Args:
        path: Created with its directory; a line that was cut off by a kill is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    self.records.append(json.loads(line))
                except json.JSONDecodeError:
                    continue

    def find(self, task: str, method: str, seed: int, fingerprint: str) -> dict[str, Any] | None:
        """Return the last such run, or None."""
        for record in reversed(self.records):
            if _key(record) == (task, method, seed, fingerprint):
                return dict(record)
        return None

    def add(self, record: dict[str, Any]) -> None:
        """Append a run, on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # several processes may measure beside each other
            cut_off = self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
            file.write(("\n" if cut_off else "") + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["task"], record["method"], record["seed"], record["fingerprint"]
