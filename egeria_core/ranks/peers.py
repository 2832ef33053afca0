"""Who of the ranks is still there: an error of a collective names those that are not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch.distributed as dist

from egeria_cache import EgeriaError

_WAIT_S = 5.0
"""A connection is closed a moment before its process is gone."""
_OF_THE_NETWORK = ("gloo", "connection", "socket", "broken pipe", "timed out")


class Peers:
    """The processes of a group. Made on all of its ranks at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        own = socket.gethostname(), os.getpid(), psutil.Process().create_time()
        self._everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(self._everyone, own, group=group)
        self._host = own[0]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the ranks on this machine that are gone, where a collective inside the block fails.

        Raises:
            EgeriaError: Some are. Otherwise what was raised goes out as it is.
        """
        try:
            yield
        except RuntimeError as error:  # those of `torch.distributed`, and gloo's own
            is_typed = type(error).__name__.startswith("Dist")  # a backend's, or the store's
            if not is_typed and not any(word in str(error).lower() for word in _OF_THE_NETWORK):
                raise
            gone = self._gone()
            if not gone:
                raise
            raise EgeriaError(
                f"of {len(self._everyone)} ranks, rank {_first(gone)} has ended, and the others "
                "cannot go on: start all of them again, from their last checkpoint"
            ) from error

    def _gone(self) -> list[int]:
        deadline = time.monotonic() + _WAIT_S
        while True:
            gone = [
                rank
                for rank, (host, *process) in enumerate(self._everyone)
                if host == self._host and not _runs(*process)
            ]
            if gone or time.monotonic() > deadline:
                return gone
            time.sleep(0.05)


def _first(gone: list[int]) -> str:
    """Return the ranks that whoever saw it first found gone: others may have ended for that."""
    ranks = ", ".join(map(str, gone))
    with suppress(RuntimeError):  # who keeps the store may be gone as well
        store = dist.distributed_c10d._get_default_store()
        return str(store.compare_set("egeria.gone", "", ranks).decode())
    return ranks


def _runs(number: int, created: float) -> bool:
    with suppress(psutil.Error):
        process = psutil.Process(number)
        return bool(process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE)
    return False
