"""Where, when and how a benchmark ran: what every results file says beside its figures."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from egeria_cache.device import device_name

__all__ = ["command", "environment"]

ROOT = Path(__file__).parents[2]


def environment(
    seeds: int | Sequence[int] | None = None, *, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """Return plain values for the field "environment" of a results file.

    Args:
        seeds: How many seeds from 0 on, or which; None where nothing is drawn that matters.
        device: What it ran on.
    """
    if isinstance(seeds, int):
        seeds = range(seeds)
    device = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": command(sys.argv),
        "seeds": None if seeds is None else list(seeds),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpu": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command(argv: Sequence[str]) -> str:
    """Return what to type in the repository's root to run this module again."""
    script = Path(argv[0]).resolve()
    if not script.is_relative_to(ROOT):
        return shlex.join(["python", *argv])
    parts = script.relative_to(ROOT).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__main__")
    return shlex.join(["python", "-m", module, *argv[1:]])


def cpu_model() -> str:
    """Return the processor's name as the system gives it; the architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
