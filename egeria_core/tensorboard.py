"""Scalars for TensorBoard, where it is installed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardListener", "make_listener"]

log = logging.getLogger("egeria")


class TensorBoardListener:
    """Turns history records into scalars.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, record: dict[str, Any]) -> None:
        """Write what can be drawn."""
        step = record["step"]
        if record["kind"] == "reading" and record["value"] is not None:
            self._writer.add_scalar(
                f"egeria/plasticity/{record['boundary']}", record["value"], step
            )
        elif record["kind"] == "boundary":
            self._writer.add_scalar("egeria/frozen_layers", record["num_frozen"], step)
            active = record["active_parameters"]
            self._writer.add_scalar("egeria/active_parameters", active, step)

    def close(self) -> None:
        """Flush and close the writer."""
        self._writer.close()


def make_listener(directory: str | Path) -> TensorBoardListener | None:
    """Return a listener that writes to `directory`; None, and one line, without tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info("egeria: tensorboard is not installed, so no scalars are written")
        return None
    return TensorBoardListener(SummaryWriter(str(directory)))
