"""What comes of evaluations, and everything the controller saw and did, in order, as records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class History(list[dict[str, Any]]):
    """List of JSON records, each with `kind` and `step`; docs/controller.md lists them.

    Args:
        path: Also written here as JSON lines, one flushed line per record.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Called with every record that is added."""
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, step: int, **fields: Any) -> None:
        """Append one record."""
        record = {"kind": kind, "step": step, **fields}
        self.append(record)
        if self._path is not None:
            # Opened for each record: a reading every n steps, and no handle to own or to leak.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        for listener in self.listeners:
            listener(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self if record["kind"] == kind]

    def __repr__(self) -> str:
        return f"History({len(self)} records)"


@dataclass(slots=True)
class Verdict:
    """Readings of the step at which they were taken."""

    step: int
    layer: int
    """The frontmost active one then."""
    value: float | None
    """Of that layer; None: there was nothing to read against, or all layers were read."""
    values: tuple[float | None, ...] | None = None
    """Of all layers."""
    reference: str = "none"
    noise: float = 0.0
    costly: bool = False
    """Whether a refresh of the reference is much dearer than copying weights."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
