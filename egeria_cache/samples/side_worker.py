"""A worker of its own for samples that are asked for out of turn: checks, audits, repairs.

Where a loader has workers, no sample is ever loaded in the training process: a file or a database
that the data set opens lazily would then be shared by the workers that are forked later, offset and
all, and some data sets work in a worker alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from egeria_cache.samples.loading import Loaded, SampleLoader, Task, task_loader


class SideWorker:
    """Answers tasks one by one in one DataLoader worker, started with the first."""

    def __init__(self, samples: SampleLoader, options: Mapping[str, Any]) -> None:
        """Load by `samples`.

        Args:
            samples: The data set and the collate function.
            options: DataLoader's `timeout`, `worker_init_fn` and `multiprocessing_context`.
        """
        self._samples = samples
        self._options = dict(options)
        self._tasks: list[Task] = []
        self._loader: DataLoader[Loaded] | None = None
        self._lock = threading.Lock()

    def ask(self, task: Task) -> Loaded:
        """Return what a worker gives for the task.

        Raises:
            Exception: What the data set or the collate function raised.
        """
        with self._lock:
            loader = self._loader = self._loader or self._start()
            self._tasks[:] = [task]
            loaded: Loaded = next(iter(loader))
            return loaded

    def close(self) -> None:
        """Stop the worker; the next task starts another.

        Takes no lock: the garbage collector may end a pass in the middle of `ask`.
        """
        self._loader = None

    def _start(self) -> DataLoader[Loaded]:
        # Its own generator: DataLoader draws a base seed whenever it begins to iterate.
        return task_loader(
            self._samples, self._tasks, num_workers=1, prefetch_factor=1, persistent_workers=True,
            generator=torch.Generator(), **self._options,
        )  # fmt: skip
