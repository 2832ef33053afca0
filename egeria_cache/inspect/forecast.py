"""What a cache would bring at each boundary of a model, measured before any training.

The engine itself is asked. At each candidate the model is frozen up to there and a cache is
attached in a scratch directory; a few batches of the real data are computed, stored and served, and
trained on without the cache in between. What is refused here would be refused in training, and is
refused with the same words.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from egeria_cache.arguments import Codec
from egeria_cache.cache import ActivationCache
from egeria_cache.device import synchronize
from egeria_cache.errors import EgeriaError
from egeria_cache.gate import Costs, choose
from egeria_cache.inspect.factories import where_raised
from egeria_cache.inspect.ordinary import Step, StepError, ordinary_step
from egeria_cache.inspect.pairs import Share
from egeria_cache.inspect.prospect import Forecast, Prospect, in_order
from egeria_cache.inspect.typical import scale
from egeria_cache.loader import EgeriaLoader
from egeria_cache.prefetch import LENGTHS
from egeria_cache.samples import DEFAULT_REUSE, Task
from egeria_cache.skip import Candidate, candidates
from egeria_cache.store import ActivationStore, Generation, survey

__all__ = ["Settings", "forecast"]

MIN_ROUNDS, MAX_ROUNDS = 3, 60
CLOSE_ENOUGH, ENOUGH_S, AT_MOST_S = 0.03, 1.0, 8.0
"""The batches are trained on, with and without the cache in turn, for `ENOUGH_S`; and further,
until the share of a step that a hit takes is known to `CLOSE_ENOUGH`, for `AT_MOST_S`."""
NUM_WRITES = 4
MAX_LOOKED, LOOKING_S = 1000, 2.0
"""How many samples of a data set are measured for their lengths, and how long that may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure."""

    batch_size: int = 32
    num_samples: int = 64
    """To measure with, spread evenly over the data set; at least two batches are taken."""
    step: Step = ordinary_step
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    autocast: torch.dtype | None = None
    boundaries: str | None = None
    """Regular expression of the modules to try; None: the model's blocks."""
    codec: Codec = "auto"
    variants: int = 1
    reuse: int | None = DEFAULT_REUSE
    """Of random draws, as `EgeriaLoader` takes it."""
    limit_bytes: int | None = None
    scratch: Path | None = None
    """On the disk that the cache will use; None: where temporary files go."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_samples", "variants", "reuse"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def forecast(
    model: nn.Module,
    data: Any,
    settings: Settings,
    progress: Callable[[str, int, int], None] | None = None,
) -> Forecast:
    """Measure every candidate boundary of `model` on samples of `data`.

    Args:
        model: As it would be trained; its weights stay as they are.
        data: A map-style data set, or a DataLoader, whose data set and collate function are taken.
        settings: How to measure.
        progress: Called with (boundary, how many are done, how many there are).

    Raises:
        ValueError: Data or model cannot be used like this; the message says what to do.
    """
    trial = _Trial(model, data, settings)
    with _quiet():
        places = trial.candidates()
        prospects = []
        for done, place in enumerate(places):
            if progress is not None:
                progress(place.boundary, done, len(places))
            prospects.append(trial.measure(place))
    return Forecast(
        model=type(model).__name__,
        device=str(settings.device),
        batch_size=trial.batch_size,
        num_measured=len(trial.indices),
        num_samples=len(trial.dataset),
        variants=settings.variants,
        reuse=settings.reuse if trial.is_random else None,
        limit_bytes=settings.limit_bytes,
        load_s=trial.load_s,
        mean_lengths=None if trial.mean_lengths is None else tuple(trial.mean_lengths.tolist()),
        prospects=tuple(in_order(prospects)),
    )


class _Trial:
    """One model, and a few batches of its data."""

    def __init__(self, model: nn.Module, data: Any, settings: Settings) -> None:
        self.settings = settings
        self.dataset, self.collate = _sized(data)
        self.batch_size = min(settings.batch_size, len(self.dataset))
        count = min(max(settings.num_samples, 2 * self.batch_size), len(self.dataset))
        count -= count % self.batch_size
        self.indices = [int(one) for one in np.linspace(0, len(self.dataset) - 1, count)]
        started = time.perf_counter()
        batches = list(
            DataLoader(self.dataset, self.batch_size, sampler=self.indices, **self.collate)
        )
        self.load_s = (time.perf_counter() - started) / count
        self.batches = [self._moved(batch) for batch in batches]
        self.mean_lengths: np.ndarray | None = None
        """Of the data set's samples, where they are padded."""
        self.is_random = False
        """Whether samples were seen to draw random numbers."""
        self.model = model.to(settings.device).train()

    def candidates(self) -> list[Candidate]:
        """Where to try; one forward shows it, and whether the model takes such a batch at all."""

        def run() -> None:
            try:
                self._loss(self.batches[0])
            except StepError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{type(self.model).__name__} cannot be trained on a batch of "
                    f"{_described(self.batches[0])}: {type(error).__name__}: {error} "
                    f"({where_raised(error)}); --step package.module:callable, called with "
                    "(model, batch), can say how"
                ) from error

        return candidates(self.model, run, self.settings.boundaries)

    def measure(self, place: Candidate) -> Prospect:
        """Compute, store and serve the batches at one boundary."""
        with (
            tempfile.TemporaryDirectory(
                prefix="egeria-plan-", dir=self.settings.scratch, ignore_cleanup_errors=True
            ) as scratch,
            _frozen(self.model, place),
        ):
            try:
                with ActivationCache(
                    self.model, f"{scratch}/cache", place.boundary,
                    codec=self.settings.codec, gate="always", audit_rate=0,
                ) as cache:  # fmt: skip
                    return self._measure(place, cache, Path(scratch))
            except EgeriaError as error:
                return Prospect(boundary=place.boundary, refused=str(error))

    def _measure(self, place: Candidate, cache: ActivationCache, scratch: Path) -> Prospect:
        loader = EgeriaLoader(
            self.dataset, self.batch_size, sampler=self.indices, cache=cache, reuse=None,
            **self.collate,
        )  # fmt: skip
        # A rate of 0: the weights stay, the work is done.
        optimizer = torch.optim.SGD((p for p in self.model.parameters() if p.requires_grad), lr=0.0)
        first_s = self._train(map(self._moved, loader), optimizer)[0][1]
        cache.flush()
        self.is_random |= loader.source.is_random
        views = cache.port.views(loader.source.key)
        if not views or cache.stats().num_samples < len(self.indices):
            return Prospect(boundary=place.boundary, refused=_why_not(cache, "stored"))
        generation, ids = views[0].generation, loader.source.identify(self.indices)
        plain: list[tuple[float, float]] = []
        served: list[tuple[float, float]] = []
        read: list[float] = []
        started = time.perf_counter()
        for number in range(MAX_ROUNDS):
            spent_s = time.perf_counter() - started
            if number >= MIN_ROUNDS and spent_s > ENOUGH_S:
                share = _share(served, plain, _STEP)
                if share.error <= CLOSE_ENOUGH or spent_s > AT_MOST_S:
                    break
            plain += self._train(self.batches, optimizer)
            hits = cache.stats().hits
            served += self._train(map(self._moved, loader), optimizer)
            if cache.stats().hits - hits < len(self.indices):
                return Prospect(boundary=place.boundary, refused=_why_not(cache, "served"))
            read += self._read(generation, ids)
        forward_s, step_s = self._medians(plain)
        forward, step = _share(served, plain, _FORWARD), _share(served, plain, _STEP)
        (kept,) = survey(scratch / "cache").generations
        rows, _ = generation.get_batch(ids[: self.batch_size])
        factor = 1.0 if views[0].padding is None else self._scale(loader, generation, ids)
        read_s = step_s * Share.of(read, [times[_STEP] for times in plain]).value
        costs = Costs(fetch_s_per_byte=read_s * kept.num_samples / max(kept.raw_bytes, 1))
        return Prospect(
            boundary=place.boundary,
            raw_bytes=factor * kept.raw_bytes / kept.num_samples,
            stored_bytes=factor * kept.stored_bytes / kept.num_samples,
            codec=kept.codec or self.settings.codec,
            forward_s=forward_s,
            served_forward_s=forward_s * forward.value,
            step_s=step_s,
            served_step_s=step_s * step.value,
            forward_error=forward.error,
            step_error=step.error,
            read_s=read_s,
            write_s=self._write_s(rows, kept.codec or self.settings.codec, scratch / "again"),
            prove_s=max(first_s - step_s * self.batch_size, 0.0),
            cut_at=choose(views[0].cut.profile, costs),
        )

    def _scale(self, loader: Any, generation: Generation, ids: Any) -> float:
        """Return how much larger the data set's samples are than those that were measured with."""
        rows, found = generation.get_batch(ids)
        if not found.all():
            return 1.0
        if self.mean_lengths is None:
            affordable = int(LOOKING_S / max(self.load_s, 1e-6))
            count = min(max(affordable, len(ids)), MAX_LOOKED, len(self.dataset))
            looked = np.linspace(0, len(self.dataset) - 1, count).astype(int).tolist()
            source = loader.source
            task = Task(-1, looked, source.identify(looked), [0] * count, source.seed)
            lengths = source.measure(task).lengths
            if lengths is None:  # the data set gives no list of samples
                return 1.0
            self.mean_lengths = lengths.mean(0)
        return scale(rows, rows[LENGTHS], self.mean_lengths)

    def _train(self, batches: Any, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
        """Return, per batch, the seconds of its forward and of its whole step."""
        times = []
        for batch in batches:
            started = self._now()
            loss = self._loss(batch)
            computed = self._now()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append((computed - started, self._now() - started))
        return times

    def _loss(self, batch: Any) -> Tensor:
        dtype = self.settings.autocast
        with nullcontext() if dtype is None else torch.autocast(self.settings.device.type, dtype):
            return self.settings.step(self.model, batch)

    def _now(self) -> float:
        synchronize(self.settings.device)
        return time.perf_counter()

    def _medians(self, times: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the medians per sample."""
        forward_s, step_s = map(statistics.median, zip(*times, strict=True))
        return forward_s / self.batch_size, step_s / self.batch_size

    def _read(self, generation: Generation, ids: Any) -> list[float]:
        """Return the seconds of reading each batch, as `_train` does of training on it."""
        times = []
        for start in range(0, len(ids), self.batch_size):
            started = time.perf_counter()
            generation.get_batch(ids[start : start + self.batch_size])
            times.append(time.perf_counter() - started)
        return times

    def _write_s(self, rows: Any, codec: str, directory: Path) -> float:
        """Write a batch of what was stored again, with nothing else going on."""
        ids, times = list(range(self.batch_size)), []
        with ActivationStore(directory, codec=codec) as store:
            for variant in range(1 + NUM_WRITES):  # the first one opens files
                started = time.perf_counter()
                store.put_batch(ids, rows, variant=variant)
                store.flush()
                times.append(time.perf_counter() - started)
        return statistics.median(times[1:]) / self.batch_size

    def _moved(self, batch: Any) -> Any:
        """Bring a batch to the device; its tensors go on knowing their samples."""
        if isinstance(batch, Mapping):
            batch = dict(batch)
        device = self.settings.device
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


_FORWARD, _STEP = 0, 1


def _share(served: list[tuple[float, float]], plain: list[tuple[float, float]], of: int) -> Share:
    return Share.of([times[of] for times in served], [times[of] for times in plain])


def _sized(data: Any) -> tuple[Any, dict[str, Any]]:
    """Return the data set and the arguments of a loader that come with it."""
    dataset, more = data, {}
    if isinstance(data, DataLoader):
        dataset, more = data.dataset, {"collate_fn": data.collate_fn}
    kind = type(dataset).__name__
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map:
        raise ValueError(
            f"the data, of type {kind}, cannot be cached: its samples have no addresses; give a "
            "map-style data set, with __getitem__ and __len__"
        )
    if len(dataset) < 2:
        raise ValueError(f"the data set, a {kind}, holds {len(dataset)} samples; 2 are needed")
    return dataset, more


@contextmanager
def _frozen(model: nn.Module, place: Candidate) -> Iterator[None]:
    """Freeze what a boundary freezes, and thaw it again."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for name in place.parameters:
            parameters[name].requires_grad_(False).grad = None
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name]).grad = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Refusals go into the forecast, not to the log as well."""
    logs = [logging.getLogger(name) for name in ("egeria", "egeria_cache.store")]
    before = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def _why_not(cache: ActivationCache, verb: str) -> str:
    stats = cache.stats()
    return (
        stats.why_not or f"its batches could not be {verb} ({stats.gate or 'no reason is known'})"
    )


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_described(leaf)}" for name, leaf in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(_described, batch[:8])) + ")"
    return type(batch).__name__
