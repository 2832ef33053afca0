"""Training loops made to be served wrongly: each is run four ways, and judged.

A *try* is a training script: a function of a `Run`, which hands out models, loaders and caches. It
is run as

- plain: the same frozen schedule without any cache, under torch's own DataLoader; the reference;
- never: with a cache that computes everything (`gate="never"`);
- always: served whatever can be served, with no audit behind it;
- default: all defaults.

Everything that the script records (losses, parameters, whatever it looks at) must be that of the
plain run, and the three global random generators must end where they ended there. No audit may find
anything, unless the try is one of a limit that is documented: it would be luck. Where nothing is
served, the user must have been told by the third call after the last `turn()`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import random
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader, FrozenPrefix
from egeria_cache.batch import unwrap

TOLERANCE = 1e-5
TOLD_BY = 4
"""Calls of the model after which the user must know why nothing is served."""
LOGGERS = ("egeria", "egeria_cache.store")
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "never": {"gate": "never"},
    "always": {"gate": "always", "audit_rate": 0},
    "default": {},
    "audited": {"gate": "always"},
}
ROW = "given"
FEW = "EGERIA_FEW_WAYS"
"""Set where not all is to be run: a try then leaves out one way."""
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the caches lie: in memory if that can be had, for a disk takes longer than the training."""
DOCUMENTS = Path(__file__).parents[2] / "docs" / "correctness.md"


class Finding(AssertionError):  # noqa: N818
    """What a try showed; each class is an outcome that must not be."""


class ForeignError(Finding):
    """An error that plain PyTorch does not have."""


class SilentlyWrong(Finding):
    """Other numbers than those of the plain run."""


class WithoutAWord(Finding):
    """Left uncached, and nobody was told in time."""


class NeedlesslyUncached(Finding):
    """Left uncached, though it can be served."""


class FalseAlarm(Finding):
    """Served, and something was said all the same."""


class NotFound(Finding):
    """A documented limit that the default audit did not find within an epoch."""


SEVERITY = (ForeignError, SilentlyWrong, NotFound, WithoutAWord, NeedlesslyUncached, FalseAlarm)


@dataclass
class Trace:
    """What one way of running a try gave."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    calls: int = 0
    turned_at: int = 0
    """Calls of the model before the last `turn()`."""
    hits: int = 0
    """Since the last `turn()`."""
    last_hits: int = 0
    """In the last pass over a loader."""
    words: list[tuple[int, str]] = field(default_factory=list)
    """Warnings since the last `turn()`: after how many calls, and what was said."""
    audits_failed: int = 0
    why_not: str | None = None
    voided: int = 0
    """How often what was stored was given up: that is told by then, and is tried again."""


class Run:
    """One way of running a try: what its script gets instead of bare classes."""

    def __init__(self, way: str, directory: Path) -> None:
        self.way = way
        self.directory = directory
        self.trace = Trace()
        self.cache: ActivationCache | None = None
        self._hold: FrozenPrefix | None = None
        self._past_hits = 0
        """Of caches that were closed or dropped."""
        self._hits_at_turn = self._hits_at_pass = 0

    # ---- what a script uses -------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        return self.way == "plain"

    def freeze(
        self, model: nn.Module, boundary: str | None = "middle", frozen: tuple[str, ...] = ()
    ) -> Any:
        """Freeze a model's front, put a cache behind it (or hold it, if plain), and return it."""
        names = frozen or _front(model, boundary)
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        self.close()
        arguments = WAYS[self.way]
        if arguments is None:
            self._hold = FrozenPrefix(model.get_submodule(name) for name in names)
        else:
            self.cache = ActivationCache(model, self.directory, boundary, **arguments)
        return model

    def move(self, model: nn.Module, boundary: str | None) -> None:
        """Say that everything up to here is frozen, and the rest is not."""
        names = _front(model, boundary)
        for name, child in model.named_children():
            child.requires_grad_(name not in names)
            if name in names:
                child.zero_grad(set_to_none=True)
        if self.cache is not None:
            self.cache.set_boundary(boundary)
        else:
            assert self._hold is not None
            self._hold.release()
            self._hold = FrozenPrefix(model.get_submodule(name) for name in names)

    def let_go(self) -> None:
        """All that was frozen is trained again: plainly it is then in the mode of the model."""
        if self._hold is not None:
            self._hold.release()

    def loader(self, dataset: Any, batch_size: int = 8, *, ours: Any = None, **kwargs: Any) -> Any:
        """Return DataLoader, or the cache's; `ours` are arguments that only the latter has."""
        if "batch_sampler" not in kwargs:
            kwargs["batch_size"] = batch_size
        if self.is_plain:
            return DataLoader(dataset, **kwargs)
        loader = PassingLoader(dataset, cache=self.cache, **kwargs, **(ours or {}))
        loader.run = self
        return loader

    def fit(
        self,
        model: nn.Module,
        loader: Any,
        epochs: int = 3,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        optimizer: Any = None,
        each_epoch: Callable[[int], Any] | None = None,
        each_step: Callable[[int], Any] | None = None,
        catching: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Train as anybody does, record each loss and the final weights; return the optimizer."""
        optimizer = optimizer or sgd(model)
        for epoch in range(epochs):
            if each_epoch is not None:
                each_epoch(epoch)
            model.train()
            for number, batch in enumerate(loader):
                if each_step is not None:
                    each_step(epoch * len(loader) + number)
                with contextlib.suppress(*catching):
                    self.step((loss or cross_entropy)(model, batch), optimizer)
        self.see(model)
        return optimizer

    def step(self, loss: Tensor, optimizer: Any) -> None:
        """Record a loss, and train on it."""
        self.record(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def record(self, loss: Any) -> None:
        """Record a loss; it counts as one call of the model.

        What was stored is waited for: else what a later batch finds would hang on the writer.
        """
        self.flush()
        self.trace.calls += 1
        self.see(loss)

    def see(self, value: Any) -> None:
        """Record anything that must be as in the plain run: a tensor, a number, a model's state."""
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict().items():
                self.trace.values.append((name, _copy(tensor)))
        else:
            self.trace.values.append((f"after call {self.trace.calls}", _copy(value)))

    def turn(self) -> None:
        """From here on something is another: from now on it is served again, or told."""
        self.flush()
        self.trace.turned_at = self.trace.calls
        self.trace.words.clear()
        self._hits_at_turn = self.hits

    @property
    def hits(self) -> int:
        return self._past_hits + (0 if self.cache is None else self.cache.stats().hits)

    def flush(self) -> None:
        if self.cache is not None:
            self.cache.flush()

    def close(self) -> None:
        """End this training run; the directory stays for the next `freeze`."""
        if self._hold is not None:
            self._hold.release()
        if self.cache is not None:
            stats = self.cache.stats()
            self._past_hits += stats.hits
            self.trace.why_not = stats.why_not
            self.trace.voided += stats.voided
            self.cache.close()
        self.cache = self._hold = None

    # ---- for the harness ----------------------------------------------------------------------

    def begin_pass(self) -> None:
        self.flush()
        self._hits_at_pass = self.hits

    def run(self, script: Callable[..., None]) -> Trace:
        """Run the script from the same seeds as every other way."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        with self._listening():
            try:
                script(self)
            except Exception as error:
                self.trace.error = error
            try:
                hits = self.hits
                self.trace.hits = hits - self._hits_at_turn
                self.trace.last_hits = hits - self._hits_at_pass
                self.close()
            except Exception as error:
                self.trace.error = self.trace.error or error
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        self.trace.values.append(("the random generators", torch.tensor(draws)))
        return self.trace

    @contextmanager
    def _listening(self) -> Iterator[None]:
        handler = _Listener(self.trace)
        loggers = [logging.getLogger(name) for name in LOGGERS]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)


class PassingLoader(EgeriaLoader):
    """Waits for the writer before each pass, so that what is served does not depend on time."""

    run: Run | None = None

    def __iter__(self) -> Any:
        if self.run is not None:
            self.run.begin_pass()
        return super().__iter__()


class _Listener(logging.Handler):
    def __init__(self, trace: Trace) -> None:
        super().__init__(logging.WARNING)
        self.trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        self.trace.words.append((self.trace.calls, record.getMessage()))
        self.trace.audits_failed += record.getMessage().startswith("AUDIT FAILED")


def hostile(
    script: Any = None,
    *,
    over: dict[str, Any] | None = None,
    cases: int | None = None,
    **claims: Any,
) -> Any:
    """Make a pytest test of a script; its name is a claim.

    Args:
        script: Takes a `Run`, what a row of `over` holds, and what `pytest.mark.parametrize` gives.
        over: Rows by their names; each is one try. Tuples are several arguments.
        cases: How many tries are run by default, if not two.
        claims: `judge`'s.
    """
    if script is None:
        return functools.partial(hostile, over=over, cases=cases, **claims)

    def test(**arguments: Any) -> None:
        __tracebackhide__ = True
        row = arguments.pop(ROW, ())
        given = row if isinstance(row, tuple) else (row,)
        bound = functools.partial(script, **arguments)
        judge(functools.wraps(script)(lambda run: bound(run, *given)), **claims)

    parameters = list(inspect.signature(script).parameters.values())[1:]
    marks = list(getattr(script, "pytestmark", ()))
    if cases is not None:
        marks.append(pytest.mark.cases(cases).mark)
    if over is not None:
        marks = [pytest.mark.parametrize(ROW, over.values(), ids=list(over)).mark, *marks]
        size = max(len(row) if isinstance(row, tuple) else 1 for row in over.values())
        row = inspect.Parameter(ROW, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [row, *parameters[size:]]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__ = test.__qualname__ = script.__name__
    test.__module__, test.__doc__ = script.__module__, script.__doc__
    test.pytestmark = marks  # type: ignore[attr-defined]
    return test


def judge(
    script: Callable[..., None],
    *,
    served: bool = False,
    limit: str | None = None,
    error: str | None = None,
    told: str | None = None,
    silent: bool = False,
) -> None:
    """Run a script in all ways, and raise the worst of what was found.

    Args:
        script: A try.
        served: It can be served: the last pass must have hits.
        limit: The row of the table in `docs/correctness.md` that says what cannot be seen here.
            What is served may then be wrong; but served with the default audit it must be noticed.
            The script ends an epoch after its `turn()`.
        error: The sentence of `docs/correctness.md` that says why this is not as in plain PyTorch.
        told: It is served, or what is said must name this; and it is said once, not every time.
        silent: It is served, and nothing is said.
    """
    __tracebackhide__ = True
    documented = " ".join(DOCUMENTS.read_text().split())
    for claim in (limit, error):
        assert claim is None or claim in documented, f"{claim!r} is not a limit that is documented"
    ways = [way for way in WAYS if way != "audited" or limit is not None]
    if FEW in os.environ:
        # The plain run, the one that is served most, and one of the others in turns.
        ways.remove(("never", "default")[zlib.crc32(script.__name__.encode()) % 2])
    traces = {}
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="egeria-hostile-", dir=MEMORY) as directory:
            traces[way] = Run(way, Path(directory) / "cache").run(script)
    reference = traces["plain"]
    if reference.error is not None:
        raise RuntimeError("the try itself is broken") from reference.error
    findings: list[Finding] = []
    for way in ways[1:]:
        trace = traces[way]
        if way == "audited":
            if not trace.words:
                findings.append(NotFound(f"{way}: {limit} was not noticed within an epoch"))
            continue
        if isinstance(trace.error, BoundaryError) and not trace.calls and not served:
            continue  # refused by name at the very first call: the first documented error
        if trace.error is not None:
            shown = "".join(traceback.format_exception(trace.error)[-6:])
            findings.append(ForeignError(f"{way}: {trace.error!r}\n{shown}"))
            continue
        wrong = first_difference(reference, trace)
        if wrong is not None and (limit is None or way == "never"):
            said = "; ".join(text for _, text in trace.words) or "nothing"
            findings.append(SilentlyWrong(f"{way}: {wrong} ({trace.hits} hits; said: {said})"))
        if trace.audits_failed and limit is None:
            findings.append(SilentlyWrong(f"{way}: an audit saw what no guard had seen"))
    if error is not None:
        assert findings, f"it is as in plain PyTorch by now: {error!r} need not be documented"
        return
    findings += _account(traces["always"], served or silent, told)
    if silent:
        findings += [FalseAlarm(f"{w}: said {traces[w].words}") for w in ways if traces[w].words]
    if findings:
        findings.sort(key=lambda finding: SEVERITY.index(type(finding)))
        raise type(findings[0])("\n".join(map(str, findings)))


def _account(trace: Trace, served: bool, told: str | None) -> list[Finding]:
    """Whether what was not served was told."""
    if trace.error is not None:
        return []
    said = "; ".join(f"after {calls} calls: {text}" for calls, text in trace.words) or "nothing"
    if served and not trace.last_hits:
        return [NeedlesslyUncached(f"always: no hits in the last pass; said: {said}")]
    if trace.hits:
        return []
    in_time = [text for calls, text in trace.words if calls - trace.turned_at <= TOLD_BY]
    if not in_time or (trace.why_not is None and not trace.voided):
        return [WithoutAWord(f"always: no hits; said: {said}; why_not: {trace.why_not}")]
    if told is not None and not (
        any(told in text for text in in_time) and told in str(trace.why_not)
    ):
        return [WithoutAWord(f"always: {told!r} is not named: {said}; why_not: {trace.why_not}")]
    if told is not None and len(trace.words) > 2:
        return [WithoutAWord(f"always: said {len(trace.words)} times: {said}")]
    return []


def first_difference(reference: Trace, trace: Trace) -> str | None:
    """Say where a run went apart from the reference; None if it did not."""
    if len(reference.values) != len(trace.values):
        return f"{len(trace.values)} values were recorded, not {len(reference.values)}"
    for (name, expected), (_, value) in zip(reference.values, trace.values, strict=True):
        if isinstance(expected, Tensor) and isinstance(value, Tensor):
            if expected.shape != value.shape or expected.dtype != value.dtype:
                shapes = [*value.shape], [*expected.shape]
                return f"{name}: {value.dtype}{shapes[0]}, not {expected.dtype}{shapes[1]}"
            left, right = expected.double(), value.double()
            if torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                continue
            return f"{name}: off by {(left - right).abs().max():.3g}"
        if expected != value:
            return f"{name}: {value!r}, not {expected!r}"
    return None


def _copy(value: Any) -> Any:
    value = unwrap(value)
    if isinstance(value, float | np.floating):
        return torch.tensor(float(value))
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _front(model: nn.Module, boundary: str | None) -> list[str]:
    """Return the model's children up to the one that holds the boundary."""
    if boundary is None:
        return []
    names = [name for name, _ in model.named_children()]
    return names[: names.index(boundary.partition(".")[0]) + 1]


def sgd(model: nn.Module, lr: float = 0.2) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def cross_entropy(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)
