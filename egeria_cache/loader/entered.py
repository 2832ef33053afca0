"""Index samplers for resume: entered in mid-epoch, or noting their state with every batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from egeria_cache.attempt import Attempt
from egeria_cache.loader.progress import Progress

__all__ = ["Noted", "Rest", "is_stateful", "state_of"]


class Rest:
    """An index sampler that was entered in mid-epoch; from its second pass on it is whole."""

    def __init__(self, rest: Iterator[Any], whole: Iterable[Any]) -> None:
        self._once: Iterator[Any] | None = rest
        self._whole = whole

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole) if self._once is None else self._run(self._once)

    def _run(self, rest: Iterator[Any]) -> Iterator[Any]:
        # Only now: DataLoader asks for an iterator twice before it uses one.
        self._once = None
        yield from rest


class Noted:
    """An index sampler that notes its state, and its iterator's, whenever it was drawn from."""

    def __init__(self, whole: Iterable[Any], state: Callable[[], Any], progress: Progress) -> None:
        self._whole, self._state, self._progress = whole, state, progress

    def __len__(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # DataLoader asks a batch sampler now, and what lies in a BatchSampler with the first batch.
        return self._run(None if type(self._whole) is BatchSampler else iter(self._whole))

    def entered(self, state: Any) -> Iterator[Any]:
        """Return an iterator that goes on where another one had this state."""
        batches = self._begun()
        _bearer(batches).load_state_dict(copy.deepcopy(state))
        return self._run(batches)

    def _begun(self) -> Iterator[Any]:
        return _Batches(self._whole) if type(self._whole) is BatchSampler else iter(self._whole)

    def _run(self, batches: Iterator[Any] | None) -> Iterator[Any]:
        batches = self._begun() if batches is None else batches
        again, self._progress.may_be_empty = self._progress.may_be_empty, False
        drawn = self._progress.drawn
        while True:
            for batch in batches:
                again, bearer = False, _bearer(batches)
                own = state = None
                with Attempt():
                    own = copy.deepcopy(bearer.state_dict()) if is_stateful(bearer) else None
                    state = self._state()
                if state is not None or own is not None:
                    drawn.append((state, own))
                yield batch
            if not again:
                return
            again, batches = False, self._begun()


class _Batches:
    """What `BatchSampler` gives, with the sampler's iterator in reach."""

    def __init__(self, whole: BatchSampler) -> None:
        self.indices = iter(whole.sampler)
        self._size, self._drop_last = whole.batch_size, whole.drop_last

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[Any]:
        batch = list(islice(self.indices, self._size))
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch


def _bearer(batches: Any) -> Any:
    """Return the iterator that may have a state."""
    return batches.indices if isinstance(batches, _Batches) else batches


def state_of(stateful: Any) -> Any:
    """Return a copy of the state of what has one; None of None."""
    return None if stateful is None else copy.deepcopy(stateful.state_dict())


def is_stateful(one: Any) -> bool:
    """Return whether it keeps its own place, in torchdata's protocol."""
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
