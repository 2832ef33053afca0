"""Loading raw samples, each under its own seed: what runs inside DataLoader's workers.

The inner DataLoader gets one `Task` per batch: the samples to load, which may be none. The dataset
and the collate function are wrapped so that the user's own see exactly what they would see under a
plain DataLoader; only the global random generators are seeded before each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from egeria_cache.seeds import SampleId, preserved_rng, sample_seed, seed_rngs

__all__ = ["CollateLoaded", "Loaded", "SeededDataset", "SeededWorkerInit", "Task", "load_samples"]


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
    """Return the task's raw samples, each loaded under its own stateless seed.

    The global generators are restored afterwards only in the main process: a worker's are its own.
    """
    if task.seed is None:
        return _get_batch(dataset, list(task.indices))
    if get_worker_info() is not None:
        return _load_seeded(dataset, task, task.seed)
    with preserved_rng():
        return _load_seeded(dataset, task, task.seed)


def _load_seeded(dataset: Any, task: Task, seed: int) -> list[Any]:
    samples = []
    transforms = list(_seedable(dataset))
    for index, sample_id in zip(task.indices, task.ids, strict=True):
        own = sample_seed(seed, sample_id, task.variant)
        seed_rngs(own)
        for transform in transforms:
            transform.set_random_seed(own & 0xFFFFFFFF)
        samples.extend(_get_batch(dataset, [index]))
    return samples


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

    def __init__(self, dataset: Any) -> None:
        """Wrap `dataset`."""
        self.dataset = dataset

    def __getitems__(self, task: Task) -> tuple[int, list[Any]]:
        return task.number, load_samples(self.dataset, task)


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
