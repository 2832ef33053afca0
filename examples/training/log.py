"""The run's log: a JSON object per line, as exact as the numbers are.

{"step": 12, "loss": 1.7381929159164429}
{"epoch": 0, "step": 20, "accuracy": 0.41, "seconds": 3.2, "boundary": null, "frozen": 0.0}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["RunLog"]


class RunLog:
    """Appends to a file; `position` and `cut` let a resumed run write what a whole run would."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
        self._losses: list[tuple[int, Tensor]] = []

    def add_loss(self, step: int, loss: Tensor) -> None:
        """Note a loss where it lies: reading each one would make the host wait for the device."""
        self._losses.append((step, loss.detach()))
        if len(self._losses) >= 50:
            self.flush()

    def add(self, **fields: Any) -> None:
        """Note anything else."""
        self.flush()
        self._write(fields)

    def flush(self) -> None:
        """Write what was noted."""
        if self._losses:
            values = torch.stack([loss for _, loss in self._losses]).tolist()
            for (step, _), value in zip(self._losses, values, strict=True):
                self._write({"step": step, "loss": value})
            self._losses.clear()
        self._file.flush()

    def position(self) -> int:
        """Return the number of bytes so far, on disk."""
        self.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def cut(self, position: int) -> None:
        """Forget what was written after a checkpoint: those steps are taken again."""
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        """Write the rest. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields).encode() + b"\n")
