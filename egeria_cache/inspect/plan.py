"""`cache-inspect plan`: per boundary, what a cache would hold and save, before training.

The engine itself is asked. At each candidate the model is frozen up to there and a cache is
attached in a scratch directory; a few batches of the real data are computed, stored and served, and
trained on without the cache in between. What is refused here would be refused in training, and is
refused with the same words.
"""

from __future__ import annotations

import argparse
import logging
import os
import pkgutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from egeria_cache.cache import ActivationCache
from egeria_cache.device import synchronize
from egeria_cache.errors import EgeriaError
from egeria_cache.inspect.words import print_json, table
from egeria_cache.loader import EgeriaLoader
from egeria_cache.skip import Candidate, candidates
from egeria_cache.tables import size

Step = Callable[[nn.Module, Any], Tensor]
"""step(model, batch) -> the loss, a scalar."""
NUM_SAMPLES = 64
"""To measure with, spread evenly over the data set; at least two batches are taken."""
MIN_ROUNDS, MAX_ROUNDS, ENOUGH_S = 3, 60, 2.0
"""The batches are trained on, with and without the cache in turn, for so long at each boundary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """One boundary. Seconds and bytes are per sample."""

    boundary: str
    refused: str | None = None
    """Why the engine would not cut here; everything else is nought then."""
    stored_bytes: float = 0.0
    """With the leaves that a hit needs besides (labels, masks)."""
    step_s: float = 0.0
    """Forward, loss, backward and optimizer step with the prefix frozen, without a cache."""
    served_step_s: float = 0.0
    """The same with the cache, from one request for a batch to the next: reading included."""
    step_error: float = 0.0
    """How far `step_skipped` scatters: half the distance between its quartiles."""

    @property
    def step_skipped(self) -> float:
        """Share of the whole step with a frozen prefix that a hit saves; below 0 if it costs."""
        return 1 - self.served_step_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """All boundaries of a model, front first."""

    model: str
    device: str
    batch_size: int
    num_measured: int
    """Samples that were measured with."""
    num_samples: int
    """Of the whole data set."""
    prospects: tuple[Prospect, ...]

    def set_bytes(self, one: Prospect) -> float:
        """Bytes on disk of all samples."""
        return one.stored_bytes * self.num_samples

    def recommended(self) -> Prospect | None:
        """Return the boundary whose hits save most of a step; None if no cut saves any.

        Of boundaries that differ by less than they are known, the one that stores least.
        """
        best = max(self.prospects, key=lambda one: one.step_skipped, default=None)
        if best is None or best.step_skipped <= 0:
            return None
        least = max(0.0, best.step_skipped - best.step_error)
        alike = [one for one in self.prospects if one.step_skipped > least or one is best]
        return min(alike, key=self.set_bytes)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, those that follow included."""
        best = self.recommended()
        content = asdict(self) | {"recommended": None if best is None else best.boundary}
        content["prospects"] = [
            {**asdict(one), "step_skipped": one.step_skipped, "set_bytes": self.set_bytes(one)}
            for one in self.prospects
        ]
        return content


def forecast(
    model: nn.Module, loader: DataLoader[Any], step: Step, *, boundaries: str | None = None
) -> Forecast:
    """Measure every candidate boundary of `model` on samples of a loader.

    Args:
        model: As it would be trained, on its device; its weights stay as they are.
        loader: Its data set, its batch size and its collate function are taken.
        step: Called with (model, batch), returns the loss.
        boundaries: Regular expression of the modules to try; None: the model's blocks.

    Raises:
        ValueError: Data or model cannot be used like this; the message says what to do.
    """
    trial = _Trial(model.train(), loader, step)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # refusals go into the forecast, not to the log as well
    try:
        prospects = tuple(map(trial.measure, trial.candidates(boundaries)))
    finally:
        logging.disable(disabled)
    return Forecast(
        model=type(model).__name__,
        device=str(trial.device),
        batch_size=trial.batch_size,
        num_measured=len(trial.indices),
        num_samples=len(trial.dataset),
        prospects=prospects,
    )


class _Trial:
    """One model, and a few batches of its data."""

    def __init__(self, model: nn.Module, loader: DataLoader[Any], step: Step) -> None:
        self.model, self.step = model, step
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.dataset: Any = loader.dataset
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise ValueError(
                f"the data, of type {type(self.dataset).__name__}, cannot be cached: its samples "
                "have no addresses; give a map-style data set, with __getitem__ and __len__"
            )
        num_samples = len(self.dataset)
        if num_samples < 2:
            raise ValueError(f"the data set holds {num_samples} samples; 2 are needed")
        own = getattr(loader.batch_sampler, "batch_size", None) or 1
        self.batch_size = min(own, num_samples)
        count = min(max(NUM_SAMPLES, 2 * self.batch_size), num_samples)
        count -= count % self.batch_size
        self.indices = [int(one) for one in np.linspace(0, num_samples - 1, count)]
        self.options: dict[str, Any] = {
            "sampler": self.indices, "collate_fn": loader.collate_fn
        }  # fmt: skip
        self.batches = list(DataLoader(self.dataset, self.batch_size, **self.options))

    def candidates(self, boundaries: str | None) -> list[Candidate]:
        """Where to try; one forward shows it, and whether the step takes such a batch at all."""

        def run() -> None:
            try:
                loss = self.step(self.model, self.batches[0])
            except Exception as error:
                raise ValueError(f"step(model, batch) failed: {_named(error)}") from error
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise ValueError(
                    f"step(model, batch) returned a {type(loss).__name__}; it must return the loss,"
                    " a scalar that can be differentiated"
                )

        return candidates(self.model, run, boundaries)

    def measure(self, place: Candidate) -> Prospect:
        """Compute, store and serve the batches at one boundary."""
        with (
            tempfile.TemporaryDirectory(
                prefix="egeria-plan-", ignore_cleanup_errors=True
            ) as scratch,
            _frozen(self.model, place),
        ):
            try:
                with ActivationCache(
                    self.model, scratch, place.boundary, gate="always", audit_rate=0
                ) as cache:
                    return self._measure(place, cache)
            except EgeriaError as error:
                return Prospect(boundary=place.boundary, refused=str(error))

    def _measure(self, place: Candidate, cache: ActivationCache) -> Prospect:
        loader = EgeriaLoader(
            self.dataset, self.batch_size, cache=cache, reuse=None, **self.options
        )
        # A rate of 0: the weights stay, the work is done.
        optimizer = torch.optim.SGD((p for p in self.model.parameters() if p.requires_grad), lr=0.0)
        self._train(loader, optimizer)
        cache.flush()
        if cache.stats().num_samples < len(self.indices):
            return Prospect(boundary=place.boundary, refused=_why_not(cache, "stored"))
        plain: list[float] = []
        served: list[float] = []
        started = time.perf_counter()
        while len(plain) < MAX_ROUNDS * len(self.batches):
            is_enough = time.perf_counter() - started > ENOUGH_S
            if is_enough and len(plain) >= MIN_ROUNDS * len(self.batches):
                break
            plain += self._train(self.batches, optimizer)
            hits = cache.stats().hits
            served += self._train(loader, optimizer)
            if cache.stats().hits - hits < len(self.indices):
                return Prospect(boundary=place.boundary, refused=_why_not(cache, "served"))
        batch_s = statistics.median(plain)
        # Of neighbours in time: what else runs on the machine slows both alike.
        shares = [a / max(b, 1e-12) for a, b in zip(served, plain, strict=True)]
        low, share, high = statistics.quantiles(shares, n=4)
        stats = cache.stats()
        return Prospect(
            boundary=place.boundary,
            stored_bytes=stats.stored_bytes / stats.num_samples,
            step_s=batch_s / self.batch_size,
            served_step_s=batch_s / self.batch_size * share,
            step_error=(high - low) / 2,
        )

    def _train(self, batches: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        """Return the seconds of each step, from one request for a batch to the next."""
        times, asked = [], self._now()
        for batch in batches:
            self.step(self.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            asked, before = self._now(), asked
            times.append(asked - before)
        return times

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


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


def _why_not(cache: ActivationCache, verb: str) -> str:
    stats = cache.stats()
    return (
        stats.why_not or f"its batches could not be {verb} ({stats.gate or 'no reason is known'})"
    )


def plan(argv: list[str]) -> int:
    """Run `cache-inspect plan` with the arguments behind that word; return 0.

    Raises:
        ValueError: What was made cannot be used; says what to do.
        SystemExit: argparse has printed help, or a mistake.
    """
    options = _parser().parse_args(argv)
    made = _made(options.factory)
    model, loader, step = made if isinstance(made, tuple) and len(made) == 3 else (made, None, None)
    if not (isinstance(model, nn.Module) and isinstance(loader, DataLoader) and callable(step)):
        raise ValueError(
            f"{options.factory!r} returned a {type(made).__name__}; it must return (model, loader, "
            "step): a torch.nn.Module, a DataLoader, and a function of (model, batch) that returns "
            "the loss"
        )
    found = forecast(model, loader, step, boundaries=options.boundaries)
    if options.json:
        print_json(found.as_json())
    else:
        print(_shown(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect plan",
        description="Measure, per possible boundary, what a cache would hold and save.",
    )
    parser.add_argument(
        "factory", metavar="FACTORY", help="package.module:callable, called without arguments; "
        "returns (model, loader, step), and step(model, batch) the loss; the current directory is "
        "searched first",
    )  # fmt: skip
    parser.add_argument("--boundaries", metavar="REGEX", help="try the modules with such names")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    return parser


def _shown(found: Forecast) -> str:
    best = found.recommended()
    lines = ["no cut pays: see why below"]
    if best is not None:
        lines = [
            f"cut at {best.boundary}: a hit saves {best.step_skipped:.0%} of a step; all samples "
            f"take {size(found.set_bytes(best))}"
        ]
    lines.append(
        f"{found.model} on {found.device}, batches of {found.batch_size}, measured with "
        f"{found.num_measured:,} of {found.num_samples:,} samples"
    )
    columns = {"boundary": "<", "the set": ">", "step": ">"}
    rows = [[one.boundary, "-", "refused"] for one in found.prospects]
    for row, one in zip(rows, found.prospects, strict=True):
        if one.refused is None:
            scatter = f"{one.step_skipped:.0%} ± {min(one.step_error, 9.99):.0%}"
            row[1:] = size(found.set_bytes(one)), scatter
    lines.append(table(columns, rows))
    lines += [f"{one.boundary} is refused: {one.refused}" for one in found.prospects if one.refused]
    lines.append(
        "step: what a hit saves of it, reading included, against the same step with the prefix "
        "frozen and no cache, and how far that scatters. Loading a sample, which a hit spares, is "
        "not counted. When proving and writing are won back, gate='auto' sees in the training."
    )
    return "\n".join(lines)


def _made(text: str) -> Any:
    """Return what the callable that `text` names returns; the current directory is searched first.

    Raises:
        ValueError: Not of the form "package.module:callable", or it fails; says why.
    """
    if not all(text.partition(":")):
        raise ValueError(f"{text!r} is not of the form package.module:callable, such as train:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(text)()
    except Exception as error:
        raise ValueError(
            f"{text!r}, called without arguments, failed: {_named(error)}; it is looked for in "
            f"{os.getcwd()} and among the installed packages"
        ) from error


def _named(error: Exception) -> str:
    """Return what an error says, and the file and line of the innermost frame."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if "importlib" not in frame.filename] or frames
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
