"""What any training run needs besides its loop: settings, a log, and checkpoints."""

from __future__ import annotations

from training.checkpoint import Checkpoint, CheckpointError
from training.log import RunLog
from training.ranks import Ranks, joined
from training.settings import Settings, parse_arguments

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Ranks",
    "RunLog",
    "Settings",
    "joined",
    "parse_arguments",
]
