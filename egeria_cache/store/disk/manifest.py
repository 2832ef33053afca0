"""What a generation is: its fields in words, their hash as its name. JSON, written atomically.

Any file of ours is opened here. A cache directory is private: what is found in it and is not a
plain file of this user's is neither read nor written to, for a planted link would lead us outside.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria_cache.errors import ForeignError, StoreError

logger = logging.getLogger("egeria_cache.store")

FORMAT, ROOT_FORMAT = 4, 1
"""Version of a generation, and of the directory around it; what has a higher one is refused, never
guessed at. A generation of a lower one is left alone, and goes when room is needed."""
MANIFEST_NAME = "manifest.json"
MAX_JSON_BYTES = 16 * 2**20


class DamagedError(StoreError):
    """A file of the cache is not what was written."""


class GoneError(StoreError):
    """The generation is void, closed, of an earlier release, or its files are not there."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation's description."""

    name: str
    fields: Mapping[str, Any]
    created: float
    """Seconds since the epoch."""

    @classmethod
    def new(cls, fields: Mapping[str, Any]) -> Manifest:
        """Describe a generation that begins now.

        Raises:
            StoreError: A value that JSON cannot hold.
        """
        try:
            loaded = json.loads(json.dumps(dict(fields), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"the fields of a generation must be plain JSON values: {error}"
            ) from None
        return cls(generation_name(loaded), loaded, time.time())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check a generation's manifest.

        Raises:
            DamagedError: Missing, or damaged.
            GoneError: Of an earlier format.
            StoreError: Of a newer one.
        """
        path = directory / MANIFEST_NAME
        content = read_json(path, FORMAT)
        if content["format"] < FORMAT:
            raise GoneError(
                f"{directory.name} is of an earlier release (format {content['format']}): not "
                "read by this one"
            )
        try:
            fields, created = content["fields"], float(content["created"])
            if not isinstance(fields, dict) or not math.isfinite(created):
                raise TypeError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise DamagedError(f"{path} is damaged") from None
        return cls(directory.name, fields, created)

    def found_in(self, directory: Path) -> Manifest:
        """Return what a generation of these fields says of itself; where that is damaged, it is
        written anew.
        """
        with contextlib.suppress(DamagedError):
            found = Manifest.read(directory)
            if found.fields == self.fields:
                return found
        logger.warning("the description of %s is damaged; it is written anew", directory)
        self.write(directory)
        return self

    def write(self, directory: Path) -> None:
        """Replace the manifest in one step."""
        write_json(directory / MANIFEST_NAME, self.content())

    def content(self) -> dict[str, Any]:
        """Return what stands in the file."""
        created, fields = self.created, dict(self.fields)
        return {"format": FORMAT, "name": self.name, "created": created, "fields": fields}


def generation_name(fields: Mapping[str, Any]) -> str:
    """Return "gen-" and 12 hexadecimal digits of the SHA-256 of format and fields."""
    text = json.dumps([FORMAT, fields], sort_keys=True, separators=(",", ":"))
    return "gen-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def read_json(path: Path, newest: int) -> dict[str, Any]:
    """Read one of our JSON files.

    Args:
        path: The file.
        newest: Format that this release knows.

    Raises:
        StoreError: Missing, damaged, too large, or written by a newer release.
    """
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            text = file.read(min(os.fstat(file.fileno()).st_size, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:  # of now: nothing is wrong with it
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return parsed(text, newest, path)


def parsed(text: bytes, newest: int, name: object) -> dict[str, Any]:
    """Undo `dumped`; raises as `read_json`, of what has this name."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError(f"{name} is damaged: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise DamagedError(f"{name} was not written by Egeria")
    if content.pop("sum", (known := _sum_of(content))) != known:  # others may leave it out
        raise DamagedError(f"{name} is damaged: its checksum does not match")
    if content["format"] > newest:
        raise StoreError(
            f"{name} has format {content['format']}, this release knows up to {newest}; use the "
            "release that wrote it, or another directory"
        )
    return content


def dumped(content: Mapping[str, Any], indent: int | None = 2) -> str:
    """Return a description as JSON, with a checksum."""
    return json.dumps({**content, "sum": _sum_of(content)}, indent=indent, sort_keys=True)


def _sum_of(content: Mapping[str, Any]) -> str:
    content = {name: value for name, value in content.items() if name != "sum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write beside, and rename over: a reader sees the old or the new one. Nobody waits for a disk:
    what a power cut takes, its opener writes anew.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(open_own(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            file.write(dumped(content))
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def open_own(path: Path, flags: int) -> int:
    """Open a plain file of ours; made with mode 0600 if the flags say so.

    Raises:
        ForeignError: It is a link, no plain file, or of another user who is not root.
        OSError: It cannot be opened; nothing is wrong with it then.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ForeignError(f"{path} is no plain file; it is left alone") from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0):
        return descriptor
    os.close(descriptor)
    raise ForeignError(
        f"{path} is no plain file of this user (owner {found.st_uid}); it is left alone"
    )
