"""`cache-inspect plan`: per boundary, what a cache would hold, save and cost, before training.

The engine itself is asked. At each candidate the model is frozen up to there and a cache is
attached in a scratch directory; a few batches of the real data are computed, stored and served, and
trained on without the cache in between. What is refused here would be refused in training, and is
refused with the same words.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import JustifyMethod
from rich.text import Text
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from egeria_cache.arguments import Codec
from egeria_cache.cache import ActivationCache
from egeria_cache.config import parse_size
from egeria_cache.device import synchronize
from egeria_cache.errors import EgeriaError
from egeria_cache.inspect.census import survey
from egeria_cache.inspect.fill import (
    add_common,
    device_of_name,
    find,
    make,
    make_model,
    where_raised,
)
from egeria_cache.inspect.words import console, fitting, print_json, progress_bar, share
from egeria_cache.loader import EgeriaLoader
from egeria_cache.samples import DEFAULT_REUSE
from egeria_cache.skip import CallError, Candidate, candidates, ordinary_arguments
from egeria_cache.store import ActivationStore, Generation
from egeria_cache.tables import size

Step = Callable[[nn.Module, Any], Tensor]
"""step(model, batch) -> the loss, a scalar."""


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


_SIGMAS = 1.96


@dataclass(frozen=True, slots=True)
class Share:
    """A quotient of two times, and how well it is known."""

    value: float
    """The median of the quotients."""
    error: float
    """Half of the width of its 95 % interval; infinite for less than six quotients."""

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Share:
        """Return that of neighbours in time; both sequences are equally long and not empty."""
        quotients = sorted(a / max(b, 1e-12) for a, b in zip(numerators, denominators, strict=True))
        count, value = len(quotients), statistics.median(quotients)
        # Ranks between which the median of the distribution lies in 19 of 20 samples.
        reach = _SIGMAS * math.sqrt(count) / 2
        low, high = math.floor(count / 2 - reach) - 1, math.ceil(count / 2 + reach)
        if low < 0 or high >= count:
            return cls(value, math.inf if count < 6 else (quotients[-1] - quotients[0]) / 2)
        return cls(value, (quotients[high] - quotients[low]) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """One boundary. Seconds and bytes are per sample, except for `prove_s`."""

    boundary: str
    refused: str | None = None
    """Why the engine would not cut here; everything else is nought then."""
    raw_bytes: float = 0.0
    """Decoded, with the leaves that a hit needs besides (labels, masks)."""
    stored_bytes: float = 0.0
    codec: str | None = None
    forward_s: float = 0.0
    """Forward and loss with the prefix frozen, without a cache."""
    served_forward_s: float = 0.0
    step_s: float = 0.0
    """Forward, loss, backward and optimizer step with the prefix frozen, without a cache."""
    served_step_s: float = 0.0
    forward_error: float = 0.0
    """How far `forward_skipped` may be off (95 %)."""
    step_error: float = 0.0
    """How far `step_skipped` may be off (95 %)."""
    read_s: float = 0.0
    """Reading and decoding, which threads do beside the training."""
    write_s: float = 0.0
    """Encoding and writing, likewise."""
    prove_s: float = 0.0
    """Once: by how much the first batch takes longer."""

    @property
    def forward_skipped(self) -> float:
        """Share of the forward that a hit saves; below 0 if it costs."""
        return 1 - self.served_forward_s / self.forward_s if self.forward_s else 0.0

    @property
    def step_skipped(self) -> float:
        """Share of the whole step with a frozen prefix that a hit saves."""
        return 1 - self.served_step_s / self.step_s if self.step_s else 0.0

    @property
    def saved_s(self) -> float:
        """What serving a sample saves, with its reading counted in full."""
        return self.step_s - self.served_step_s - self.read_s

    @property
    def epoch_ratio(self) -> float:
        """Time of an epoch of hits over one with the same prefix frozen and no cache; reading is
        counted in full."""
        return 1 - self.saved_s / self.step_s if self.step_s else 1.0


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
    limit_bytes: int | None
    """Of the planned cache."""
    load_s: float
    """Time to load a sample in one process. A hit saves that, too; it is not counted, since
    workers may hide it."""
    prospects: tuple[Prospect, ...]
    reuse: int | None = None
    """For how many epochs a random draw of a sample would be used; None: for ever, or samples draw
    nothing."""

    def set_bytes(self, one: Prospect) -> float:
        """Bytes on disk of all samples."""
        return one.stored_bytes * self.num_samples

    def fits(self, one: Prospect) -> float:
        """Part of them that the limit has room for: the others are computed in every epoch."""
        size = self.set_bytes(one)
        return 1.0 if self.limit_bytes is None or not size else min(1.0, self.limit_bytes / size)

    @property
    def fresh(self) -> float:
        """Part of the samples that each epoch after the first draws, computes and writes anew."""
        return 0.0 if self.reuse is None else 1 / self.reuse

    def later_epochs(self, one: Prospect) -> float:
        """Time of an epoch after the first over one with the same prefix frozen and no cache;
        reading is counted in full."""
        served = self.fits(one) * (1 - self.fresh)
        return served * one.epoch_ratio + (1 - served)

    def break_even_epoch(self, one: Prospect) -> int | None:
        """Return the epoch, from 1, at whose end the cache has paid for itself; None: never.

        Proving, writing and reading count in full, as if nothing of them were hidden behind the
        training. The first epoch computes and writes; the later ones read, except for what they
        draw anew.
        """
        stored = self.num_samples * self.fits(one)
        gain_s = stored * ((1 - self.fresh) * one.saved_s - self.fresh * one.write_s)
        if one.refused is not None or gain_s <= 0:
            return None
        spent_s = one.prove_s + stored * one.write_s
        return 1 + max(1, math.ceil(spent_s / gain_s))

    def recommended(self) -> Prospect | None:
        """Return the boundary whose later epochs are shortest; None if no cut pays.

        Of boundaries that differ by less than they are known, the one that stores least.
        """
        paying = [one for one in self.prospects if self.break_even_epoch(one) is not None]
        if not paying:
            return None
        best = min(paying, key=self.later_epochs)
        reach = self.later_epochs(best) + best.step_error
        alike = [one for one in paying if self.later_epochs(one) <= reach]
        return min(alike, key=self.set_bytes)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, those that follow included."""
        best = self.recommended()
        content = asdict(self) | {"recommended": None if best is None else best.boundary}
        content["prospects"] = [
            {
                **asdict(one),
                "forward_skipped": one.forward_skipped,
                "step_skipped": one.step_skipped,
                "epoch_ratio": one.epoch_ratio,
                "later_epochs": self.later_epochs(one),
                "set_bytes": self.set_bytes(one),
                "fits": self.fits(one),
                "break_even_epoch": self.break_even_epoch(one),
            }
            for one in self.prospects
        ]
        return content


MIN_ROUNDS, MAX_ROUNDS = 3, 60
CLOSE_ENOUGH, ENOUGH_S, AT_MOST_S = 0.03, 1.0, 8.0
"""The batches are trained on, with and without the cache in turn, for `ENOUGH_S`; and further,
until the share of a step that a hit takes is known to `CLOSE_ENOUGH`, for `AT_MOST_S`."""
NUM_WRITES = 4


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
    reuse: int | None = DEFAULT_REUSE
    """Of random draws, as `EgeriaLoader` takes it."""
    limit_bytes: int | None = None
    scratch: Path | None = None
    """On the disk that the cache will use; None: where temporary files go."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_samples", "reuse"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def moved(self, batch: Any) -> Any:
        """Bring a batch to the device; its tensors go on knowing their samples."""
        if isinstance(batch, Mapping):
            batch = dict(batch)
        to = self.device
        return tree_map(lambda leaf: leaf.to(to) if isinstance(leaf, Tensor) else leaf, batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch on the device."""
        dtype = self.autocast
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            return self.step(model, batch)


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
        reuse=settings.reuse if trial.is_random else None,
        limit_bytes=settings.limit_bytes,
        load_s=trial.load_s,
        prospects=tuple(prospects),
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
        self.batches = [settings.moved(batch) for batch in batches]
        self.is_random = False
        """Whether samples were seen to draw random numbers."""
        self.model = model.to(settings.device).train()

    def candidates(self) -> list[Candidate]:
        """Where to try; one forward shows it, and whether the model takes such a batch at all."""

        def run() -> None:
            try:
                self.settings.loss(self.model, self.batches[0])
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
        first_s = self._train(map(self.settings.moved, loader), optimizer)[0][1]
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
            served += self._train(map(self.settings.moved, loader), optimizer)
            if cache.stats().hits - hits < len(self.indices):
                return Prospect(boundary=place.boundary, refused=_why_not(cache, "served"))
            read += self._read(generation, ids)
        forward_s, step_s = self._medians(plain)
        forward, step = _share(served, plain, _FORWARD), _share(served, plain, _STEP)
        (kept,) = survey(scratch / "cache").generations
        rows, _ = generation.get_batch(ids[: self.batch_size])
        read_s = step_s * Share.of(read, [times[_STEP] for times in plain]).value
        return Prospect(
            boundary=place.boundary,
            raw_bytes=kept.raw_bytes / kept.num_samples,
            stored_bytes=kept.stored_bytes / kept.num_samples,
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
        )

    def _train(self, batches: Any, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
        """Return, per batch, the seconds of its forward and of its whole step."""
        times = []
        for batch in batches:
            started = self._now()
            loss = self.settings.loss(self.model, batch)
            computed = self._now()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append((computed - started, self._now() - started))
        return times

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


AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def plan(argv: list[str]) -> int:
    """Run `cache-inspect plan` with the arguments behind that word; return 0.

    Raises:
        ValueError: A factory, the model or the data cannot be used; says what to do.
        SystemExit: argparse has printed help, or a mistake.
    """
    options = _parser().parse_args(argv)
    model = make_model(options.model)
    settings = Settings(
        batch_size=options.batch_size,
        num_samples=options.samples,
        step=ordinary_step if options.step is None else find("--step", options.step),
        device=device_of_name(options.device),
        autocast=AUTOCAST.get(options.autocast),
        boundaries=options.boundaries,
        codec=options.codec,
        reuse=options.reuse or None,
        limit_bytes=None if options.limit is None else parse_size(options.limit),
        scratch=options.scratch,
    )
    data = make("--data", options.data)
    with progress_bar(quiet=options.json) as progress:
        task = progress.add_task("measuring", total=None)

        def advance(boundary: str, done: int, total: int) -> None:
            progress.update(task, description=boundary, completed=done, total=total)

        found = forecast(model, data, settings, advance)
    if options.json:
        print_json(found.as_json())
    else:
        _show(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect plan",
        description="Measure, per possible boundary, what a cache would hold, save and cost.",
        epilog="MODEL_FACTORY and DATASET_FACTORY are package.module:callable, called without "
        "arguments; the current directory is searched first.",
    )
    add_common(parser)
    parser.add_argument(
        "--samples", type=int, default=64, metavar="N",
        help="to measure with, spread over the data set; default 64, at least two batches",
    )  # fmt: skip
    parser.add_argument(
        "--step", metavar="STEP", help="package.module:callable, (model, batch) -> loss; default: "
        "the inputs that the forward requires, and the model's own loss or its mean square",
    )  # fmt: skip
    parser.add_argument("--boundaries", metavar="REGEX", help="try the modules with such names")
    parser.add_argument("--autocast", choices=sorted(AUTOCAST), help="train under autocast")
    parser.add_argument(
        "--reuse", type=int, default=DEFAULT_REUSE, metavar="EPOCHS",
        help="for how many epochs a random draw of a sample would be used, if samples draw; 0: for "
        f"ever; default {DEFAULT_REUSE}",
    )  # fmt: skip
    parser.add_argument("--limit", metavar="SIZE", help="of the planned cache ('100GB')")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR",
        help="an existing directory on the disk that the cache will use; what is written there is "
        "removed; default: where temporary files go",
    )  # fmt: skip
    return parser


def _show(found: Forecast) -> None:
    out = console()
    out.print(f"[bold]{_recommendation(found)}[/]", soft_wrap=True)
    out.print(
        f"{found.model} on {found.device}, batches of {found.batch_size}, measured with "
        f"{found.num_measured:,} of {found.num_samples:,} samples"
    )
    rows = [_row(found, one) for one in found.prospects]
    out.print(fitting(out, _COLUMNS, rows, drop=("codec", "a sample", "forward", "stored")))
    for line in _notes(found):
        out.print(line, markup=False, soft_wrap=True)


def _recommendation(found: Forecast) -> str:
    best = found.recommended()
    if best is None:
        return "no cut pays: see why below"
    epoch = found.break_even_epoch(best)
    return (
        f"cut at {best.boundary}: epochs after the first take {found.later_epochs(best):.2f} of "
        f"their time, {size(found.set_bytes(best))}, pays from epoch {epoch:,}"
    )


_COLUMNS: dict[str, JustifyMethod] = {
    "boundary": "left", "a sample": "right", "stored": "right", "codec": "left",
    "the set": "right", "forward": "right", "step": "right", "even after": "left",
}  # fmt: skip


def _row(found: Forecast, one: Prospect) -> list[str | Text]:
    if one.refused is not None:
        return [one.boundary, *["-"] * (len(_COLUMNS) - 2), Text("refused", "red")]
    epoch, fits = found.break_even_epoch(one), found.fits(one)
    return [
        one.boundary,
        size(one.raw_bytes),
        size(one.stored_bytes),
        one.codec or "-",
        size(found.set_bytes(one)) + (f" ({share(fits)} fits)" if fits < 1 else ""),
        _known(one.forward_skipped, one.forward_error),
        _known(one.step_skipped, one.step_error),
        Text("never", "yellow") if epoch is None else Text(f"epoch {epoch:,}", "green"),
    ]


def _known(value: float, error: float) -> str:
    """Write a share and its interval."""
    return f"{100 * value:.0f} ± {100 * min(error, 9.99):.0f} %"


def _notes(found: Forecast) -> list[str]:
    notes = [f"{one.boundary} is refused: {one.refused}" for one in found.prospects if one.refused]
    if found.reuse is not None:
        notes.append(
            f"samples draw random numbers, and each draw would be used for {found.reuse} epochs: "
            f"{share(found.fresh)} of every epoch after the first are computed and written anew, "
            "which the times of later epochs and 'even after' count."
        )
    notes.append(
        "forward, step: what a hit skips of them, against the same step with the prefix frozen and "
        "no cache, and how far that may be off. even after: the epoch in which the time for "
        "proving, writing and reading has been won back, all of it counted in full. A hit "
        "also saves loading its sample "
        f"({found.load_s * 1e3:.2g} ms in one process), which is not counted."
    )
    return notes
