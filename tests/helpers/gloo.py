"""Several ranks on this machine: a function run in each of them, with gloo and a time limit."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.forked import nursery

__all__ = ["run_ranks"]


def run_ranks(
    worker: Callable[..., Any],
    num_ranks: int,
    directory: Path,
    *args: Any,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Call `worker(rank, *args)` in every rank of a process group; return what each returned.

    Raises:
        AssertionError: A rank failed, or was not done in time; all of them are stopped then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # A file: a port that is free now may be another test's in a moment.
    meeting = directory / f"meeting-{uuid.uuid4().hex}"
    ranks = [
        nursery().Process(target=_main, args=(rank, num_ranks, meeting, directory, worker, args))
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.start()
        while any(process.exitcode is None for process in ranks):
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            assert not failed, f"ranks {failed} failed: {_errors(directory, failed)}"
            assert time.monotonic() < deadline, f"not done after {timeout_s} s"
            time.sleep(0.02)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
    assert not failed, f"ranks {failed} failed: {_errors(directory, failed)}"
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _errors(directory: Path, failed: list[int]) -> str:
    texts = [directory / f"{rank}.txt" for rank in failed]
    return "\n".join(text.read_text() for text in texts if text.exists())


def _main(
    rank: int,
    num_ranks: int,
    meeting: Path,
    directory: Path,
    worker: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    store = dist.FileStore(str(meeting), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        torch.save(worker(rank, *args), directory / f"{rank}.pt")
    except BaseException:
        import traceback

        (directory / f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # the others may wait for us: they are stopped
    dist.barrier()
    dist.destroy_process_group()
