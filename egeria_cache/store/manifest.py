"""What a generation is: its fields in words, their hash as its name. JSON, written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria_cache.errors import StoreError

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "DamagedError",
    "Manifest",
    "canonical",
    "differing_fields",
    "generation_name",
    "read_json",
    "write_json",
]

FORMAT = 1
"""Version of everything on disk; a directory with a higher one is refused, never guessed at."""
MANIFEST_NAME = "manifest.json"
MAX_JSON_BYTES = 16 * 2**20


class DamagedError(StoreError):
    """A file of the cache is not what was written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation's description."""

    name: str
    fields: Mapping[str, Any]
    created: float
    """Seconds since the epoch."""
    codec: str | None = None
    """What its records were last written with; None before the first."""

    @classmethod
    def new(cls, fields: Mapping[str, Any]) -> Manifest:
        """Describe a generation that begins now."""
        return cls(generation_name(fields), fields, time.time())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check a generation's manifest.

        Raises:
            StoreError: Missing, damaged, or of a newer format.
        """
        content = read_json(directory / MANIFEST_NAME)
        try:
            fields, created, codec = content["fields"], content["created"], content.get("codec")
            if not isinstance(fields, dict) or not isinstance(created, int | float):
                raise TypeError
        except (KeyError, TypeError):
            raise DamagedError(f"{directory / MANIFEST_NAME} is damaged") from None
        return cls(directory.name, fields, float(created), codec)

    def write(self, directory: Path) -> None:
        """Replace the manifest in one step."""
        write_json(
            directory / MANIFEST_NAME,
            {
                "format": FORMAT,
                "name": self.name,
                "created": self.created,
                "codec": self.codec,
                "fields": dict(self.fields),
            },
        )


def canonical(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as they read back from JSON.

    Raises:
        StoreError: A value JSON cannot hold.
    """
    try:
        loaded = json.loads(json.dumps(dict(fields), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the fields of a generation must be plain JSON values: {error}") from None
    assert isinstance(loaded, dict)
    return loaded


def generation_name(fields: Mapping[str, Any]) -> str:
    """Return "gen-" and 12 hexadecimal digits of the SHA-256 of the fields."""
    text = json.dumps(canonical(fields), sort_keys=True, separators=(",", ":"))
    return "gen-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def differing_fields(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return, per field that differs, (our value, their value); None where it is absent.

    Of fields that hold fields, only those inside that differ: "tensors.layer1.shape".
    """
    differing: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*ours, *theirs}):
        one, other = ours.get(name), theirs.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inside = differing_fields(one, other)
            differing.update({f"{name}.{inner}": pair for inner, pair in inside.items()})
        elif (name in ours) != (name in theirs) or one != other:
            differing[name] = one, other
    return differing


def read_json(path: Path) -> dict[str, Any]:
    """Read one of our JSON files.

    Raises:
        StoreError: Missing, damaged, too large, or written by a newer release.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_JSON_BYTES))
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise DamagedError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise DamagedError(f"{path} was not written by Egeria")
    if content["format"] > FORMAT:
        raise StoreError(
            f"{path} has format {content['format']}, this release knows up to {FORMAT}; use the "
            "release that wrote it, or another directory"
        )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write beside, flush to disk, and rename over: a reader sees the old or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
