"""Compute and store every sample once, before training begins."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import SubsetRandomSampler

from egeria_cache.cache.loader_api import LoaderApi
from egeria_cache.errors import EgeriaError
from egeria_cache.skip import (
    CallError,
    Filled,
    RandomState,
    SkipEngine,
    ordinary_arguments,
    what_code_keeps,
)

log = logging.getLogger("egeria")
_CHUNK = 256
"""Samples that are looked up at a time; between two chunks another process may have stored some."""
_FLUSH_EVERY = 8
"""Batches that may wait for the writer: what does not fit in its queue would be dropped."""
_MAX_TURNS = 3


@dataclass(frozen=True, slots=True)
class FillReport:
    """What filling has brought."""

    num_samples: int
    """Of the data set, times the random draws that are kept for ever."""
    num_stored: int
    """Of them in the cache now."""
    why_not: str | None
    """Why not all of them, if so."""

    def __str__(self) -> str:
        rest = f": {self.why_not}" if self.why_not else ""
        return f"{self.num_stored:,} of {self.num_samples:,} samples are stored{rest}"


def fill(
    model: nn.Module,
    engine: SkipEngine,
    api: LoaderApi,
    loader: Any,
    flush: Callable[[], None],
    forward: Callable[[Any], Any] | None = None,
    *,
    progress: bool = True,
) -> FillReport:
    """Run the frozen prefix on whatever is not stored yet; see `ActivationCache.fill`."""
    if api.boundary is None:
        raise EgeriaError("nothing is frozen: set a boundary before filling the cache")
    call = forward or (lambda batch: _ordinary_call(model, batch))
    generators = RandomState.now()
    todo = _Missing(_indices(loader), loader.source, api)
    generators.restore()  # a sampler that shuffles draws a seed when it is asked
    part = todo.loader = loader._over(todo)
    start = copy.deepcopy(part.state_dict())
    total, stored = len(todo.indices), 0

    def tell(done: int) -> None:
        if progress and sys.stderr.isatty():
            print(f"filling {loader.name!r}: {done:,} of {total:,}", end="\r", file=sys.stderr)

    with _undisturbed(model), engine.filling():
        for turn in range(_MAX_TURNS):  # what was dropped or displaced meanwhile comes once more
            part.load_state_dict(start)
            before, stored = stored, 0
            for _ in range(loader.augmentation_variants):
                for number, batch in enumerate(part):
                    with suppress(Filled):
                        call(batch)
                    if number % _FLUSH_EVERY == _FLUSH_EVERY - 1:
                        flush()
                    tell(stored + todo.num_passed)
                flush()
                stored += todo.num_stored()
                tell(stored)
                if not (loader.source.is_random and loader.reuse is None):
                    break  # the draws to come are made in their turns
                total = len(todo.indices) * loader.augmentation_variants
            if stored == total or (turn and stored <= before) or api.refusal(loader.source.key):
                break
    why_not = None
    if stored < total:
        why_not = api.refusal(loader.source.key) or "the limit of the directory is reached"
    return FillReport(total, stored, why_not)


class _Missing:
    """Sampler of the samples that are not stored, looked up as it goes."""

    def __init__(self, indices: Sequence[Any], source: Any, api: LoaderApi) -> None:
        # Each process begins elsewhere, so that several share the work.
        first = os.getpid() * 7919 % max(1, len(indices))
        self.indices = [*indices[first:], *indices[:first]]
        self.loader: Any = None
        """Whose sampler this is."""
        self.num_passed = 0
        self._source = source
        self._api = api

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        self.num_passed = 0
        for start in range(0, len(self.indices), _CHUNK):
            chunk = self.indices[start : start + _CHUNK]
            for index, is_stored in zip(chunk, self._stored(chunk), strict=True):
                self.num_passed += 1
                if not is_stored:
                    yield index

    def num_stored(self) -> int:
        """Return how many of all samples are stored, in the random draws of this pass."""
        return sum(map(bool, self._stored(self.indices)))

    def _stored(self, indices: Sequence[Any]) -> Sequence[bool]:
        views = self._api.views(self._source.key)
        if not views:
            return [False] * len(indices)
        views[0].refresh()
        ids = self._source.identify(indices)
        draws = self._source.stored_as(self.loader._draws_of(ids))
        found: Sequence[bool] = views[0].contains(ids, draws).tolist()
        return found


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave the model, and the random generators, as if it had not been called.

    The first batch of a kind runs the whole model: what its code counts or keeps is put back.
    """
    generators, was_training, kept = RandomState.now(), model.training, what_code_keeps(model)
    with torch.no_grad():
        before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        model.train(was_training)
        for each in kept:
            each.put_back()
        generators.restore()
        with torch.no_grad():
            for buffer, content in before:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)


def _indices(loader: Any) -> Sequence[Any]:
    """Return what the loader's sampler may draw, each once."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        return list(sampler.indices)
    first: Sequence[Any] = next(iter(copy.deepcopy(loader.batch_sampler)), [])
    if all(isinstance(index, int) for index in first):
        return range(len(loader.dataset))
    drawn = (index for batch in copy.deepcopy(loader.batch_sampler) for index in batch)
    return list(dict.fromkeys(drawn))


def _ordinary_call(model: nn.Module, batch: Any) -> Any:
    try:
        arguments, by_name = ordinary_arguments(model, batch)
    except CallError as error:
        raise EgeriaError(
            f"{error}; give fill() a `forward`, which is called with a batch and calls the model"
        ) from None
    return model(*arguments, **by_name)
