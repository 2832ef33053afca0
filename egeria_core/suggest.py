"""Which front can stay frozen from the first step on: asked by short trainings of copies.

What freezing a front costs a fine-tuned model's validation cannot be read off its training loss or
its gradients (docs/controller.md). So it is tried: for each boundary a copy is trained for some
dozens of steps with the front frozen, on the same batches in the same order as a copy with nothing
frozen, and the two are compared.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from egeria_cache.device import runs_late, synchronize
from egeria_cache.tables import as_text
from egeria_core.controller import FreezeController
from egeria_core.policies import StaticPolicy
from egeria_core.ranks import unwrap
from egeria_core.reference import without_hooks

__all__ = ["Suggestion", "Trial", "suggest_boundary"]

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

HELD_OUT = 8
"""Batches that the trials are compared on, at most a fifth of all."""


class _Tried:
    """What one trial measured."""

    def __init__(self, boundary: str | None) -> None:
        self.boundary = boundary
        self.scores: list[float] = []
        """Of each held-out batch; one, of `validate`."""
        self.steps_s: list[float] = []
        self.fronts_s: list[float] = []
        self.bytes_per_sample = 0.0
        self.frozen = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A short training with everything up to `boundary` frozen from its first step on."""

    boundary: str | None
    """None: nothing frozen, what the others are compared with."""
    score: float
    """At the end of the probe: the held-out loss, or what `validate` returned."""
    harm: float
    """By how much the score is worse than with nothing frozen; below 0: it is better."""
    harm_error: float | None
    """One standard error of `harm` over the held-out batches; None where `validate` is asked."""
    step_s: float
    """Seconds of a training step, the front frozen but computed; the median. Of the processor, all
    threads together, where it trains on the CPU, so that a busy machine changes nothing."""
    front_s: float
    """Seconds of it that the front's forward takes, which a cache skips."""
    plain_step_s: float
    """Seconds of a training step with nothing frozen."""
    bytes_per_sample: float
    """Of the boundary's output: what a cache keeps of a sample, before encoding."""
    frozen_parameters: float
    """Part of the parameters that is frozen."""

    @classmethod
    def of(cls, one: _Tried, plain: _Tried, sign: float) -> Trial:
        """Compare; `sign` is 1 where a lower score is better."""
        worse = [sign * (a - b) for a, b in zip(one.scores, plain.scores, strict=True)]
        many = len(worse) > 1
        return cls(
            boundary=one.boundary,
            score=statistics.mean(one.scores),
            harm=statistics.mean(worse),
            harm_error=statistics.stdev(worse) / len(worse) ** 0.5 if many else None,
            step_s=statistics.median(one.steps_s),
            front_s=statistics.median(one.fronts_s),
            plain_step_s=statistics.median(plain.steps_s),
            bytes_per_sample=one.bytes_per_sample,
            frozen_parameters=one.frozen,
        )

    @property
    def saved(self) -> float:
        """Part of a plain step that freezing alone saves."""
        return 1 - self.step_s / self.plain_step_s

    @property
    def saved_with_cache(self) -> float:
        """Part of a plain step that is saved where the front is read from a cache for nothing."""
        return 1 - (self.step_s - self.front_s) / self.plain_step_s

    def __str__(self) -> str:
        error = "" if self.harm_error is None else f" ± {self.harm_error:.4f}"
        return (
            f"harm {self.harm:+.4f}{error}, saves {self.saved:.0%} of a step, "
            f"{self.saved_with_cache:.0%} with a cache; {self.bytes_per_sample / 1000:.3g} kB a "
            f"sample, {self.frozen_parameters:.0%} of the parameters"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """What `suggest_boundary` returns."""

    trials: tuple[Trial, ...]
    """One per boundary, front first."""
    boundary: str | None
    """The deepest boundary whose harm, with one standard error, is within the budget; or None."""
    harm_budget: float
    by_validation: bool
    """Whether the scores are `validate`'s; else losses on batches that were held out."""
    steps: int
    """Training steps of each trial."""
    seconds: float
    """What all of it took."""

    def policy(self) -> StaticPolicy:
        """Return a controller's policy that freezes the suggested front from the first step on."""
        return StaticPolicy({0: self.boundary})

    def __getitem__(self, boundary: str) -> Trial:
        """Return the trial of a boundary.

        Raises:
            KeyError: There was none.
        """
        for trial in self.trials:
            if trial.boundary == boundary:
                return trial
        raise KeyError(boundary)

    def __str__(self) -> str:
        """Return a line per boundary, and a sentence."""
        lines = {str(trial.boundary): str(trial) for trial in self.trials}
        return "\n".join(filter(None, [as_text(lines), self._sentence()]))

    def _sentence(self) -> str:
        scale = "the metric of validate()" if self.by_validation else "the held-out loss"
        evidence = f"measured in {scale} after {self.steps} steps each, {self.seconds:.0f} s in all"
        if self.boundary is None:
            return (
                f"freeze nothing from the start: every front costs more than {self.harm_budget:g} "
                f"({evidence})"
            )
        best = self[self.boundary]
        effect = f"{'costs' if best.harm >= 0 else 'gains'} {abs(best.harm):.4f}"
        return (
            f"freeze up to {self.boundary} from the start: it {effect} where {self.harm_budget:g} "
            f"are allowed, and saves {best.saved:.0%} of a step, "
            f"{best.saved_with_cache:.0%} with a cache ({evidence})"
        )


def suggest_boundary(
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer,
    steps: int = 200,
    validate: Callable[[nn.Module], float] | None = None,
    higher_is_better: bool = True,
    harm_budget: float = 0.01,
    layers: str | Sequence[str] | None = None,
    num_layers: int = 7,
    progress: Callable[[str, int, int], None] | None = None,
) -> Suggestion:
    """Measure which front of `model` can be static from step 0, what that costs and what it saves.

    Args:
        model: As training would begin with it. Copies of it are trained; it stays as it is, and so
            do the random generators. One copy lives at a time, with its optimizer. Where several
            ranks train together ask on one, and tell the others what it says.
        data: Batches as the training loop gets them, on the model's device; iterated again where
            it is short. The batches of the probe are held in memory.
        loss: Called with (model, batch), returns the scalar to be minimised. None: the batch is a
            mapping and the model returns its own loss, `model(**batch).loss`.
        optimizer: The training's, which is copied, or a callable that makes one of an iterable of
            parameters. Its rate falls linearly to zero over the probe, so that each trial is a
            whole schedule in small.
        steps: Of each trial; there is one per boundary, and one with nothing frozen. The longer
            the probe, the more the trials are like the training itself.
        validate: Called with a trained copy in inference mode, returns the metric that counts.
            None: the mean loss on batches that were held out of `data`.
        higher_is_better: Whether `validate` grows as the model learns.
        harm_budget: By how much the score may be worse, in its own unit. A boundary is within it
            if its harm and one standard error of it are.
        layers: As the controller's option: the boundaries to try are its layers' ends.
        num_layers: As the controller's option.
        progress: Called with (boundary about to be tried, how many are done, how many there are),
            after the trial with nothing frozen.

    Returns:
        The trials, and the deepest boundary whose harm is within the budget. `print` shows both;
        `FreezeController(..., policy=suggestion.policy())` follows it.

    Raises:
        ValueError: There are too few batches, no loss can be found, or the model cannot be copied.
        LayerError: The model has fewer than two layers.
    """
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}")
    started = time.perf_counter()
    bare, _ = unwrap(model)
    with _generators_kept(), _quiet():
        batches, held_out = _take(data, steps, hold_out=validate is None)
        options = {"layers": layers, "num_layers": num_layers}
        probe = _Probe(bare, loss or _own_loss, optimizer, batches, held_out, validate, options)
        plain, names = probe.train(None)
        sign = -1.0 if validate is not None and higher_is_better else 1.0
        trials: list[Trial] = []
        for done, name in enumerate(names):
            if progress is not None:
                progress(name, done, len(names))
            trials.append(Trial.of(probe.train(name)[0], plain, sign))
    allowed = [t.boundary for t in trials if t.harm + (t.harm_error or 0.0) <= harm_budget]
    return Suggestion(
        trials=tuple(trials),
        boundary=allowed[-1] if allowed else None,
        harm_budget=harm_budget,
        by_validation=validate is not None,
        steps=steps,
        seconds=time.perf_counter() - started,
    )


class _Probe:
    """The same short training again and again, with more and more of the model frozen."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer | MakeOptimizer,
        batches: Sequence[Any],
        held_out: Sequence[Any],
        validate: Callable[[nn.Module], float] | None,
        options: dict[str, Any],
    ) -> None:
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._batches, self._held_out, self._validate = batches, held_out, validate
        self._options = options
        self._device = next(model.parameters()).device

    def _copies(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        given = self._optimizer if isinstance(self._optimizer, torch.optim.Optimizer) else None
        try:
            with without_hooks([self._model]):
                # Together, so that the optimizer's parameters are those of the copy.
                model, optimizer = copy.deepcopy((self._model, given))
        except Exception as error:
            raise ValueError(
                f"{type(self._model).__name__} cannot be copied for the probe "
                f"({type(error).__name__}: {error}); call suggest_boundary before the first "
                "forward, on a model without tensors that autograd has made"
            ) from error
        if optimizer is None:
            assert not isinstance(self._optimizer, torch.optim.Optimizer)
            optimizer = self._optimizer(model.parameters())
        return model, optimizer

    def train(self, boundary: str | None) -> tuple[_Tried, list[str]]:
        """Train one copy with everything up to `boundary` frozen, and look at what it learned.

        Returns:
            That, and the boundaries that the controller knows of.
        """
        tried = _Tried(boundary)
        torch.manual_seed(0)  # dropout is the same in all trials, as far as their forwards are
        model, optimizer = self._copies()
        model.train()
        rates = [_full_rate(group) for group in optimizer.param_groups]
        with ExitStack() as stack:
            policy = StaticPolicy(() if boundary is None else {0: boundary})
            controller = FreezeController(model, optimizer, policy=policy, **self._options)
            stack.enter_context(controller)
            if boundary is not None:
                stack.enter_context(_watched(model, boundary, tried, self._now))
            for number, batch in enumerate(self._batches):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (1 - number / len(self._batches))
                started = self._now()
                optimizer.zero_grad()
                self._loss(model, batch).backward()
                optimizer.step()
                tried.steps_s.append(self._now() - started)
                controller.step()
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        tried.frozen = 1 - sum(n for n, trains in sizes if trains) / sum(n for n, _ in sizes)
        tried.scores = self._scores(model.eval())
        return tried, controller.boundaries

    @torch.no_grad()
    def _scores(self, model: nn.Module) -> list[float]:
        if self._validate is not None:
            return [float(self._validate(model))]
        return [float(self._loss(model, batch)) for batch in self._held_out]

    def _now(self) -> float:
        """Return seconds: of the processor, which a busy machine hardly changes, or the clock's."""
        synchronize(self._device)
        return time.perf_counter() if runs_late(self._device) else time.process_time()


def _full_rate(group: Mapping[str, Any]) -> float:
    """Return the rate before a scheduler's warm-up took its part of it."""
    return float(group["max_lr"] if "max_lr" in group else group.get("initial_lr", group["lr"]))


@contextmanager
def _watched(
    model: nn.Module, boundary: str, tried: _Tried, now: Callable[[], float]
) -> Iterator[None]:
    """Note how long the front's forward takes, and how large its output is."""
    began = [0.0]

    def before(module: nn.Module, args: Any) -> None:
        began[0] = now()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        tried.fronts_s.append(now() - began[0])
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()]
        if tensors:
            size = sum(t.numel() * t.element_size() for t in tensors)
            tried.bytes_per_sample = size / max(1, tensors[0].shape[0])

    handles = [
        model.register_forward_pre_hook(before),
        model.get_submodule(boundary).register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take(data: Iterable[Any], steps: int, *, hold_out: bool) -> tuple[list[Any], list[Any]]:
    """Return the batches to train on, and those that are held out of it.

    Whole batches of the first pass are held out, and the rest of that pass is repeated; where none
    are held out, there are as many passes as are needed.
    """
    if not hold_out:
        return _passes(data, steps), []
    first = list(itertools.islice(iter(data), steps + HELD_OUT))
    if len(first) < 3:
        raise ValueError(
            f"the data gives {len(first)} batches; 3 are needed to hold some out, or validate="
        )
    kept = min(HELD_OUT, max(1, len(first) // 5))
    return list(itertools.islice(itertools.cycle(first[:-kept]), steps)), first[-kept:]


def _passes(data: Iterable[Any], count: int) -> list[Any]:
    """Return `count` batches, from as many passes as they need."""
    batches: list[Any] = []
    while len(batches) < count:
        before = len(batches)
        batches += itertools.islice(iter(data), count - before)
        if len(batches) == before:
            raise ValueError(
                f"the data ended after {before} of {count} batches and gives no more; pass "
                "something that can be iterated again, such as a DataLoader"
            )
    return batches


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model computes itself."""
    found = model(**batch) if isinstance(batch, Mapping) else None
    own = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if not isinstance(own, Tensor):
        raise ValueError(
            f"{type(model).__name__} gives no loss of its own for a batch of type "
            f"{type(batch).__name__}; pass loss=, called with (model, batch)"
        )
    return own.mean()


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the trials' controllers say nothing: the training's own will, where it matters."""
    log = logging.getLogger("egeria")
    before = log.level
    try:
        log.setLevel(logging.ERROR)
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave torch's, NumPy's and Python's random generators as they were."""
    state, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        np.random.set_state(state)
        random.setstate(python)
