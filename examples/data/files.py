"""Files as the data sets see them: there or not, and in which version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["DataError", "digest", "first_present", "read_lines", "version"]


class DataError(Exception):
    """A data set's files are missing or broken: says which, where, and what to do."""


def first_present(candidates: Iterable[Path], what: str, remedy: str) -> Path:
    """Return the first path that exists.

    Raises:
        DataError: None does.
    """
    tried = list(candidates)
    for path in tried:
        if path.exists():
            return path
    places = ", ".join(map(str, tried))
    raise DataError(f"{what} not found; looked for {places}. {remedy}")


def version(*paths: Path) -> str:
    """Return text that changes when one of the files is written: times of change and sizes.

    An edit that keeps both (a copy with its times put back) is not seen here.

    Raises:
        DataError: A file is gone.
    """
    stats = []
    for path in paths:
        try:
            stats.append(os.stat(path))
        except FileNotFoundError:
            raise DataError(
                f"{path} has vanished since the data set was opened; put it back, or start again"
            ) from None
    return ",".join(f"{stat.st_mtime_ns:x}-{stat.st_size:x}" for stat in stats)


def digest(*parts: str | bytes) -> str:
    """Return 16 hex digits of the parts' content; no two lists of parts run into each other."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def read_lines(path: Path) -> list[str]:
    r"""Return a text file's lines without their ends, split at "\n" alone.

    `str.splitlines` would also split at the separators that occur inside sentences (U+2028, form
    feed), and shift all lines after them against the other file of a pair.

    Raises:
        DataError: It is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start}); convert it: iconv -t UTF-8"
        ) from None
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
