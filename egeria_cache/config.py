"""Settings of the store, checked once. Sizes are bytes, times are seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from egeria_cache.arguments import Codec, StorageDtype, check_choice

PAGE_BYTES = 4096
"""Files are counted in whole pages, as the disk does."""

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(size: int | str) -> int:
    """Return a positive number of bytes from 100_000 or "100GB", "1.5 GiB".

    Raises:
        TypeError: It is neither a number nor text.
        ValueError: The text is no size, or the size is not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{size!r} is not a size; write bytes, or a text like '100GB' or '8GiB'"
            )
        size = int(float(match[1].replace("_", "")) * _UNITS[match[2].lower()])
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"the size limit is bytes, or a text like '100GB'; got {size!r}")
    if size <= 0:
        raise ValueError(f"the size limit must be positive, got {size}")
    return int(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Where activations live, how they are written, and how much room they may take."""

    directory: Path
    """Created with mode 0700 if absent."""
    limit_bytes: int = 100 * 10**9
    """Hard bound on disk use of the whole directory; past it new samples are not stored."""
    codec: str = "auto"
    """One of `Codec`; "auto" decides from the first records of each generation."""
    storage_dtype: str | None = None
    """One of `StorageDtype`, or None: lossless."""
    force_network: bool = False
    """Use the directory even if it lies on a network filesystem, and whoever owns it there."""

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(f"limit_bytes must be positive, got {self.limit_bytes}")
        check_choice("codec", self.codec, Codec)
        if self.storage_dtype is not None:
            check_choice("storage_dtype", self.storage_dtype, StorageDtype)
