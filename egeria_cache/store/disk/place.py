"""The directory a cache lives in: made, recognised, or refused with the reason."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from egeria_cache.errors import StoreError
from egeria_cache.store.disk.manifest import ROOT_FORMAT, DamagedError, read_json, write_json
from egeria_cache.store.disk.own import check_private

logger = logging.getLogger("egeria_cache.store")

ROOT_NAME = "cache.json"

OURS = (
    f".{ROOT_NAME}.", "cache.lock", "gen-", "damaged-gen-", ".gone-gen-", "live-", ".live-",
    "note-", ".note-",
)  # fmt: skip
"""What a cache's files begin with: where nothing else is, a root that was lost is written anew."""

FULL = (errno.ENOSPC, errno.EDQUOT)

NETWORK_TYPES = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.gcsfuse", "fuse.glusterfs",
        "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
        "nfs3", "nfs4", "smb3", "smbfs", "wekafs"
    }
)  # fmt: skip
"""Where hosts see different contents of a file, or file locks are not reliable."""


def claim_directory(directory: Path, limit_bytes: int, *, force_network: bool) -> None:
    """Create the directory, or check that it is a cache this release can use.

    Raises:
        StoreError: It cannot be used; the message says why, and what to do.
    """
    kind = filesystem_type(directory)
    if kind in NETWORK_TYPES and not force_network:
        raise StoreError(
            f"{directory} lies on a network filesystem ({kind}), where file locks and "
            "what other hosts see of a file are not reliable; choose a local disk, or pass "
            "force_network=True if only one host at a time will use it"
        )
    root = directory / ROOT_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not force_network:  # a server may give files to another user
            check_private(directory)
        # A beginning by another process, or by one that was killed, is not foreign.
        names = sorted(path.name for path in directory.iterdir())
        if ROOT_NAME in names:
            _join(root, limit_bytes)
            return
        foreign = [name for name in names if not name.startswith(OURS)]
        if foreign:
            raise StoreError(
                f"{directory} is not an Egeria cache: it holds {foreign[0]!r}; choose an empty or "
                "new directory"
            )
        _write_root(root, limit_bytes)
    except (NotADirectoryError, FileExistsError) as error:
        raise StoreError(
            f"{directory} is not a directory; give the path of one, which need not exist yet"
        ) from error
    except OSError as error:
        hint = "; check its owner and mode" if isinstance(error, PermissionError) else ""
        raise StoreError(f"{directory} cannot be written: {error.strerror}{hint}") from error


def filesystem_type(path: Path) -> str | None:
    """Return the type of the filesystem a path lies on, or would lie on; None if unknown."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    real = os.path.realpath(path)
    above = [one for one in mounts if os.path.commonpath((real, one.mountpoint)) == one.mountpoint]
    # Of two mounts at one place, the later one covers the earlier.
    above.sort(key=lambda one: len(one.mountpoint))
    return above[-1].fstype if above else None


def _join(root: Path, limit_bytes: int) -> None:
    """Read the root of an existing cache, and note our limit in it, for `cache-inspect` alone."""
    try:
        content = read_json(root, ROOT_FORMAT)
    except DamagedError as error:  # nothing in it is needed
        logger.warning("%s; it is written anew", error)
        content = {}
    if not os.access(root.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if content.get("limit_bytes") != limit_bytes:
        try:
            _write_root(root, limit_bytes, content)
        except OSError as error:
            if error.errno not in FULL:
                raise


def _write_root(root: Path, limit_bytes: int, known: Mapping[str, Any] | None = None) -> None:
    """Write it; what is not ours to know stays as it was."""
    ours = {"format": ROOT_FORMAT, "created_by": "egeria", "limit_bytes": limit_bytes}
    write_json(root, {**(known or {}), **ours})
