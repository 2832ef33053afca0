"""Settings of the store, checked once. Sizes are bytes, times are seconds."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CODECS", "STORAGE_DTYPES", "StoreConfig", "num_decoders", "parse_size"]

PAGE_BYTES = 4096
"""Files are counted in whole pages, as the disk does."""

CODECS = ("auto", "raw", "zstd", "split+zstd", "bitmap+split")
"""Names accepted as `codec`."""

STORAGE_DTYPES = ("float16", "bfloat16", "int8")
"""Lossy number formats on disk. None, the default, keeps every bit."""

MOST_DECODERS = 16
"""Threads that decode one batch: more of them wait for memory."""

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(size: int | str) -> int:
    """Return a positive number of bytes from 100_000 or "100GB", "1.5 GiB".

    Raises:
        ValueError: The text is no size, or the size is not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{size!r} is not a size; write bytes, or a text like '100GB' or '8GiB'"
            )
        size = int(float(match[1].replace("_", "")) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"the size limit must be positive, got {size}")
    return int(size)


def num_decoders() -> int:
    """Return how many threads may decode together on this machine."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return max(2, min(cores, MOST_DECODERS))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Where activations live, how they are written, and how much room they may take."""

    directory: Path
    """Created with mode 0700 if absent."""
    limit_bytes: int = 100 * 10**9
    """Hard bound on disk use of the whole directory; past it new samples are not stored."""
    codec: str = "auto"
    """One of `CODECS`; "auto" decides from the first records of each generation."""
    storage_dtype: str | None = None
    """One of `STORAGE_DTYPES`, or None: lossless."""
    force_network: bool = False
    """Use the directory even if it lies on a network filesystem, and whoever owns it there."""
    queue_batches: int = 16
    """Batches that may wait for the writer; one more is dropped and counted."""
    queue_bytes: int = 2 * 2**30
    """Bytes that may wait for the writer."""
    num_threads: int = field(default_factory=num_decoders)
    """Threads that may decode one batch together; how many do follows from what they cost."""
    verify: str = "once"
    """When a record's checksum is verified: "once" after its file was opened, and again in turns
    and whenever anybody else has written to it; or "always"."""
    evict_unused: bool = True
    """When the limit is reached, remove whole generations that no live process uses."""

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(f"limit_bytes must be positive, got {self.limit_bytes}")
        if self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}; got {self.codec!r}")
        if self.storage_dtype is not None and self.storage_dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"storage_dtype must be None or one of {', '.join(STORAGE_DTYPES)}; "
                f"got {self.storage_dtype!r}"
            )
        if self.verify not in ("once", "always"):
            raise ValueError(f"verify must be 'once' or 'always', got {self.verify!r}")
        for name in ("queue_batches", "queue_bytes", "num_threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
