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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from egeria_cache.cache import ActivationCache
from egeria_cache.device import default_device, synchronize
from egeria_cache.errors import EgeriaError
from egeria_cache.inspect.words import print_json, table
from egeria_cache.loader import EgeriaLoader
from egeria_cache.skip import CallError, Candidate, candidates, ordinary_arguments
from egeria_cache.tables import size

Step = Callable[[nn.Module, Any], Tensor]
"""step(model, batch) -> the loss, a scalar."""
NUM_SAMPLES = 64
"""To measure with, spread evenly over the data set; at least two batches are taken."""
MIN_ROUNDS, MAX_ROUNDS, ENOUGH_S = 3, 60, 2.0
"""The batches are trained on, with and without the cache in turn, for so long at each boundary."""


class StepError(ValueError):
    """A batch does not fit the model, as far as can be told; says what to do."""


def ordinary_step(model: nn.Module, batch: Any) -> Tensor:
    """Call the model with what its forward requires of the batch, and return a loss.

    The loss is the model's own (`output.loss`), else the mean square of its outputs: what a step
    costs hardly depends on it.

    Raises:
        StepError: The batch does not fit, or nothing in the output can be differentiated.
    """
    try:
        arguments, by_name = ordinary_arguments(model, batch)
    except CallError as error:
        raise StepError(
            f"{error}; pass --step package.module:callable, called with (model, batch)"
        ) from None
    output = model(*arguments, **by_name)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own.mean()
    terms = [
        leaf.float().square().mean()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not terms:
        raise StepError(
            f"nothing that {type(model).__name__} returns can be differentiated; pass --step "
            "package.module:callable, called with (model, batch), which returns the loss"
        )
    return torch.stack(terms).sum()


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
    model: nn.Module,
    data: Any,
    *,
    batch_size: int = 32,
    step: Step = ordinary_step,
    device: torch.device | None = None,
    boundaries: str | None = None,
) -> Forecast:
    """Measure every candidate boundary of `model` on samples of `data`.

    Args:
        model: As it would be trained; its weights stay as they are.
        data: A map-style data set, or a DataLoader, whose data set and collate function are taken.
        batch_size: Of the training.
        step: Called with (model, batch), returns the loss.
        device: Where to measure; None: where the training would run.
        boundaries: Regular expression of the modules to try; None: the model's blocks.

    Raises:
        ValueError: Data or model cannot be used like this; the message says what to do.
    """
    device = default_device() if device is None else device
    trial = _Trial(model, data, batch_size, step, device)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # refusals go into the forecast, not to the log as well
    try:
        prospects = tuple(map(trial.measure, trial.candidates(boundaries)))
    finally:
        logging.disable(disabled)
    return Forecast(
        model=type(model).__name__,
        device=str(device),
        batch_size=trial.batch_size,
        num_measured=len(trial.indices),
        num_samples=len(trial.dataset),
        prospects=prospects,
    )


class _Trial:
    """One model, and a few batches of its data."""

    def __init__(
        self, model: nn.Module, data: Any, batch_size: int, step: Step, device: torch.device
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {batch_size}")
        self.step, self.device = step, device
        self.dataset, self.collate = _sized(data)
        self.batch_size = min(batch_size, len(self.dataset))
        count = min(max(NUM_SAMPLES, 2 * self.batch_size), len(self.dataset))
        count -= count % self.batch_size
        self.indices = [int(one) for one in np.linspace(0, len(self.dataset) - 1, count)]
        loader = DataLoader(self.dataset, self.batch_size, sampler=self.indices, **self.collate)
        self.batches = [self._moved(batch) for batch in loader]
        self.model = model.to(device).train()

    def _moved(self, batch: Any) -> Any:
        """Bring a batch to the device; its tensors go on knowing their samples."""
        if isinstance(batch, Mapping):
            batch = dict(batch)
        to = self.device
        return tree_map(lambda leaf: leaf.to(to) if isinstance(leaf, Tensor) else leaf, batch)

    def candidates(self, boundaries: str | None) -> list[Candidate]:
        """Where to try; one forward shows it, and whether the model takes such a batch at all."""

        def run() -> None:
            try:
                self.step(self.model, self.batches[0])
            except StepError:
                raise
            except Exception as error:
                leaves = tree_leaves(self.batches[0])
                shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
                raise ValueError(
                    f"{type(self.model).__name__} cannot be trained on a batch of shapes {shapes}: "
                    f"{_named(error)}; --step package.module:callable, called with (model, batch), "
                    "can say how"
                ) from error

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
            self.dataset, self.batch_size, sampler=self.indices, cache=cache, reuse=None,
            **self.collate,
        )  # fmt: skip
        # A rate of 0: the weights stay, the work is done.
        optimizer = torch.optim.SGD((p for p in self.model.parameters() if p.requires_grad), lr=0.0)
        self._train(map(self._moved, loader), optimizer)
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
            served += self._train(map(self._moved, loader), optimizer)
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


def _why_not(cache: ActivationCache, verb: str) -> str:
    stats = cache.stats()
    return (
        stats.why_not or f"its batches could not be {verb} ({stats.gate or 'no reason is known'})"
    )


def plan(argv: list[str]) -> int:
    """Run `cache-inspect plan` with the arguments behind that word; return 0.

    Raises:
        ValueError: A factory, the model or the data cannot be used; says what to do.
        SystemExit: argparse has printed help, or a mistake.
    """
    options = _parser().parse_args(argv)
    model = _make("MODEL_FACTORY", options.model)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"MODEL_FACTORY {options.model!r} returned a {type(model).__name__}; it must return "
            "the model, a torch.nn.Module"
        )
    step = ordinary_step if options.step is None else _find("--step", options.step)
    device = _device_of_name(options.device)
    data = _make("--data", options.data)
    found = forecast(
        model, data, batch_size=options.batch_size, step=step, device=device,
        boundaries=options.boundaries,
    )  # fmt: skip
    if options.json:
        print_json(found.as_json())
    else:
        print(_shown(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect plan",
        description="Measure, per possible boundary, what a cache would hold and save.",
        epilog="MODEL_FACTORY and DATASET_FACTORY are package.module:callable, called without "
        "arguments; the current directory is searched first.",
    )
    parser.add_argument("model", metavar="MODEL_FACTORY", help="returns the model with its weights")
    parser.add_argument(
        "--data", metavar="DATASET_FACTORY", required=True,
        help="returns a map-style data set, or a DataLoader with its collate function",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default 32")
    parser.add_argument(
        "--step", metavar="STEP", help="package.module:callable, (model, batch) -> loss; default: "
        "the inputs that the forward requires, and the model's own loss or its mean square",
    )  # fmt: skip
    parser.add_argument("--boundaries", metavar="REGEX", help="try the modules with such names")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
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


def _find(what: str, text: str) -> Callable[..., Any]:
    """Return the callable that `text` names; the current directory is searched first.

    Raises:
        ValueError: Not of the form "package.module:callable", or it cannot be had; says why.
    """
    if not all(text.partition(":")):
        raise ValueError(
            f"{what} {text!r} is not of the form package.module:callable, such as "
            "models.resnet:make_model"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = pkgutil.resolve_name(text)
    except Exception as error:
        raise ValueError(
            f"{what} {text!r}: {_named(error)}; it is looked for in {os.getcwd()} and among the "
            "installed packages"
        ) from error
    if not callable(found):
        raise ValueError(f"{what} {text!r} is a {type(found).__name__}, which cannot be called")
    return cast(Callable[..., Any], found)


def _make(what: str, text: str) -> Any:
    """Return what the named callable returns, called without arguments."""
    factory = _find(what, text)
    try:
        return factory()
    except Exception as error:
        raise ValueError(
            f"{what} {text!r}, called without arguments, failed: {_named(error)}"
        ) from error


def _named(error: Exception) -> str:
    """Return what an error says, and the file and line of the innermost frame."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if "importlib" not in frame.filename] or frames
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _device_of_name(name: str | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name!r} cannot be used: {error}") from error
    return device
