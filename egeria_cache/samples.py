"""Loading raw samples, each under its own seed: what runs inside DataLoader's workers.

The inner DataLoader gets one `Task` per batch: the samples to load, which may be none. The dataset
and the collate function are wrapped so that the user's own see exactly what they would see under a
plain DataLoader; only the global random generators are seeded before each sample.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from egeria_cache.seeds import SampleId, preserved_rng, sample_seed, seed_rngs, seed_torch

__all__ = [
    "CollateLoaded",
    "Loaded",
    "SampleLoader",
    "SeededDataset",
    "SeededWorkerInit",
    "Task",
    "load_samples",
]

_NUM_WATCHED = 8
_MT19937_BYTES = 625 * 4  # 624 words and the position in them


class Task(NamedTuple):
    """Samples to load for one batch."""

    number: int
    """The batch's number in the order of the epoch."""
    indices: Sequence[Any]
    """What the sampler drew, as the dataset's `__getitem__` takes it."""
    ids: Sequence[SampleId]
    variant: int
    seed: int | None
    """The run's augmentation seed; None leaves the random generators alone."""


class Loaded(NamedTuple):
    """What comes back for a task; a named tuple, so that pinning looks inside."""

    number: int
    data: Any
    """The collated batch; None where the task held no samples."""


def load_samples(dataset: Any, task: Task) -> list[Any]:
    """Return the task's raw samples, each loaded under its own stateless seed."""
    return SampleLoader(dataset).load(task)


class SampleLoader:
    """Loads a dataset's samples, each under its own stateless seed.

    Seeding `random` and NumPy takes longer than a cheap sample. So a dataset whose first samples
    did not draw from them is loaded without, and what it draws nevertheless is noticed at the end
    of the batch: the batch is then loaded again, seeded, and so are all that follow. torch's
    generator is always seeded: that is cheap, and its seed can be read without drawing.

    The global generators are restored afterwards only in the main process: a worker's are its own.
    """

    def __init__(self, dataset: Any) -> None:
        """Load from `dataset`, in this process."""
        self.dataset = dataset
        self._draws: bool | None = None  # from `random` or NumPy; None: not known yet

    def load(self, task: Task) -> list[Any]:
        """Return the task's samples in order."""
        if task.seed is None:
            return _get_batch(self.dataset, list(task.indices))
        in_main = get_worker_info() is None
        if self._draws is False and not any(True for _ in _seedable(self.dataset)):
            samples = self._load_undrawn(task, in_main)
            if samples is not None:
                return samples
        if not in_main:
            return self._load_seeded(task)
        with preserved_rng():
            return self._load_seeded(task)

    def _load_undrawn(self, task: Task, in_main: bool) -> list[Any] | None:
        """Load without seeding `random` and NumPy; None, with nothing changed, if it draws."""
        numpy: Any = np.random.get_state()
        python, words = random.getstate(), _numpy_words()
        if words is None or numpy[3]:  # drawing the normal deviate that is kept moves no word
            return None
        torch_state = torch.default_generator.get_state() if in_main else None
        single = getattr(self.dataset, "__getitems__", None) is None
        samples: list[Any] = []
        error = None
        try:
            for index, seed in zip(task.indices, _seeds(task), strict=True):
                seed_torch(seed)
                samples += [self.dataset[index]] if single else _get_batch(self.dataset, [index])
        except Exception as caught:
            error = caught
        finally:
            if torch_state is not None:
                torch.default_generator.set_state(torch_state)
            self._draws = words != _numpy_words() or python != random.getstate()
            if self._draws:
                random.setstate(python)
                np.random.set_state(numpy)
        if self._draws:
            return None
        if error is not None:
            raise error
        return samples

    def _load_seeded(self, task: Task) -> list[Any]:
        samples: list[Any] = []
        transforms = list(_seedable(self.dataset))
        draws, watched = self._draws, 0
        for index, seed in zip(task.indices, _seeds(task), strict=True):
            seed_rngs(seed)
            for transform in transforms:
                transform.set_random_seed(seed & 0xFFFFFFFF)
            watches = not draws and watched < _NUM_WATCHED  # watching costs 50 us a sample
            before = (_numpy_words(), random.getstate()) if watches else None
            samples.extend(_get_batch(self.dataset, [index]))
            if before is not None:
                draws = before[0] is None or before != (_numpy_words(), random.getstate())
                self._draws, watched = draws, watched + 1
        return samples


def _seeds(task: Task) -> Iterator[int]:
    assert task.seed is not None
    for sample_id in task.ids:
        yield sample_seed(task.seed, sample_id, task.variant)


def _numpy_words() -> bytes | None:
    """Return the words of NumPy's global Mersenne twister; None for another generator.

    They are read in place: `np.random.get_state` takes 50 us, this takes one.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _seedable(dataset: Any) -> Iterator[Any]:
    """Find transforms that ignore the global generators and are seeded by `set_random_seed`.

    That is albumentations' way (2.x). They are looked for among the attributes of the data set, and
    of the data sets that it wraps.
    """
    while dataset is not None:
        attributes = getattr(dataset, "__dict__", {})
        for value in attributes.values():
            if callable(getattr(value, "set_random_seed", None)):
                yield value
        dataset = attributes.get("dataset")


def _get_batch(dataset: Any, indices: list[Any]) -> list[Any]:
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


class SeededDataset:
    """The user's dataset as the inner DataLoader sees it: indexed by a whole `Task`."""

    def __init__(self, samples: SampleLoader) -> None:
        """Wrap the dataset of `samples`."""
        self.dataset = samples.dataset
        self._samples = samples

    def __getitems__(self, task: Task) -> tuple[int, list[Any]]:
        return task.number, self._samples.load(task)


class CollateLoaded:
    """The user's collate function, applied to a task's samples if there are any."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        """Wrap `collate`."""
        self.collate = collate

    def __call__(self, loaded: tuple[int, list[Any]]) -> Loaded:
        """Collate what `SeededDataset` gave."""
        number, samples = loaded
        return Loaded(number, self.collate(samples) if samples else None)


class SeededWorkerInit:
    """Shows the user's `worker_init_fn` the user's own dataset in `get_worker_info()`."""

    def __init__(self, worker_init: Callable[[int], None] | None) -> None:
        """Wrap `worker_init`."""
        self.worker_init = worker_init

    def __call__(self, worker_id: int) -> None:
        """Initialise this worker."""
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            # WorkerInfo refuses plain assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.worker_init is not None:
            self.worker_init(worker_id)
