"""DataLoader's own iterators, keeping the loader's `Progress`."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from egeria_cache.loader.progress import Progress

__all__ = ["CountedMulti", "CountedSingle"]


class _Counted:
    """Mixed into DataLoader's own iterators: keeps the loader's `Progress`."""

    progress: Progress

    def __next__(self) -> Any:
        try:
            batch = super().__next__()  # type: ignore[misc]
        except StopIteration:
            self.progress.finished = True
            raise
        self.progress.count()
        return batch


class CountedSingle(_Counted, _SingleProcessDataLoaderIter):
    """Loads in this process."""


class CountedMulti(_Counted, _MultiProcessingDataLoaderIter):
    """Loads in workers."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # Persistent workers serve many passes, and each may have an index sampler of its own.
        self._index_sampler = loader._index_sampler
        super()._reset(loader, first_iter)
