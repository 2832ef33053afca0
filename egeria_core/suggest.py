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
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.skip import RandomState
from egeria_cache.tables import as_text
from egeria_core.controller import FreezeController
from egeria_core.policies import StaticPolicy
from egeria_core.ranks import unwrap
from egeria_core.reference import without_hooks

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

HELD_OUT = 8
"""Batches that the trials are compared on, at most a fifth of all."""


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
    frozen_parameters: float
    """Part of the parameters that is frozen."""

    def __str__(self) -> str:
        error = "" if self.harm_error is None else f" ± {self.harm_error:.4f}"
        return f"harm {self.harm:+.4f}{error}; {self.frozen_parameters:.0%} of the parameters"


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

    def __str__(self) -> str:
        """Return a line per boundary, and a sentence."""
        lines = {str(trial.boundary): str(trial) for trial in self.trials}
        best = next((trial for trial in self.trials if trial.boundary == self.boundary), None)
        if best is None:
            told = (
                f"freeze nothing from the start: every front costs more than {self.harm_budget:g}"
            )
        else:
            told = (
                f"freeze up to {self.boundary} from the start: it "
                f"{'costs' if best.harm >= 0 else 'gains'} {abs(best.harm):.4f} where "
                f"{self.harm_budget:g} are allowed"
            )
        scale = "the metric of validate()" if self.by_validation else "the held-out loss"
        told += f" (measured in {scale} after {self.steps} steps each, {self.seconds:.0f} s in all)"
        return "\n".join(filter(None, [as_text(lines), told]))


def suggest_boundary(
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss,
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
        data: Batches as the training loop gets them, on the model's device; repeated where it is
            short. The batches of the probe are held in memory.
        loss: Called with (model, batch), returns the scalar to be minimised.
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
        ValueError: There are too few batches, or the model cannot be copied.
        LayerError: The model has fewer than two layers.
    """
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}")
    started = time.perf_counter()
    bare, _ = unwrap(model)
    generators, log = RandomState.now(), logging.getLogger("egeria")
    level = log.level
    log.setLevel(logging.ERROR)  # the training's own controller will say it, where it matters
    try:
        batches, held_out = _take(data, steps, hold_out=validate is None)
        probe = _Probe(
            bare, loss, optimizer, batches, held_out, validate,
            {"layers": layers, "num_layers": num_layers},
        )  # fmt: skip
        plain, names, _ = probe.train(None)
        worse = -1.0 if validate is not None and higher_is_better else 1.0
        trials: list[Trial] = []
        for done, name in enumerate(names):
            if progress is not None:
                progress(name, done, len(names))
            scores, _, frozen = probe.train(name)
            harms = [worse * (a - b) for a, b in zip(scores, plain, strict=True)]
            many = len(harms) > 1
            trials.append(
                Trial(
                    boundary=name,
                    score=statistics.mean(scores),
                    harm=statistics.mean(harms),
                    harm_error=statistics.stdev(harms) / len(harms) ** 0.5 if many else None,
                    frozen_parameters=frozen,
                )
            )
    finally:
        log.setLevel(level)
        generators.restore()
    allowed = [t.boundary for t in trials if t.harm + (t.harm_error or 0.0) <= harm_budget]
    return Suggestion(
        trials=tuple(trials),
        boundary=allowed[-1] if allowed else None,
        harm_budget=harm_budget,
        by_validation=validate is not None,
        steps=steps,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """The same short training again and again, with more and more of the model frozen."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer | MakeOptimizer
    batches: Sequence[Any]
    held_out: Sequence[Any]
    validate: Callable[[nn.Module], float] | None
    options: dict[str, Any]
    """Of the controllers: which layers."""

    def _copies(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        given = self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None
        try:
            with without_hooks([self.model]):
                # Together, so that the optimizer's parameters are those of the copy.
                model, optimizer = copy.deepcopy((self.model, given))
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} cannot be copied for the probe "
                f"({type(error).__name__}: {error}); call suggest_boundary before the first "
                "forward, on a model without tensors that autograd has made"
            ) from error
        if optimizer is None:
            assert not isinstance(self.optimizer, torch.optim.Optimizer)
            optimizer = self.optimizer(model.parameters())
        return model, optimizer

    def train(self, boundary: str | None) -> tuple[list[float], list[str], float]:
        """Train one copy with everything up to `boundary` frozen.

        Returns:
            Its score on each held-out batch (one, of `validate`), the boundaries that the
            controller knows of, and the part of the parameters that is frozen.
        """
        torch.manual_seed(0)  # dropout is the same in all trials, as far as their forwards are
        model, optimizer = self._copies()
        model.train()
        rates = [_full_rate(group) for group in optimizer.param_groups]
        policy = StaticPolicy(() if boundary is None else {0: boundary})
        with FreezeController(model, optimizer, policy=policy, **self.options) as controller:
            for number, batch in enumerate(self.batches):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (1 - number / len(self.batches))
                optimizer.zero_grad()
                self.loss(model, batch).backward()
                optimizer.step()
                controller.step()
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        frozen = 1 - sum(n for n, trains in sizes if trains) / sum(n for n, _ in sizes)
        return self._scores(model.eval()), controller.boundaries, frozen

    @torch.no_grad()
    def _scores(self, model: nn.Module) -> list[float]:
        if self.validate is not None:
            return [float(self.validate(model))]
        return [float(self.loss(model, batch)) for batch in self.held_out]


def _full_rate(group: Mapping[str, Any]) -> float:
    """Return the rate before a scheduler's warm-up took its part of it."""
    return float(group["max_lr"] if "max_lr" in group else group.get("initial_lr", group["lr"]))


def _take(data: Iterable[Any], steps: int, *, hold_out: bool) -> tuple[list[Any], list[Any]]:
    """Return the batches to train on, the first ones again and again, and those held out of them.

    Raises:
        ValueError: There are too few.
    """
    first = list(itertools.islice(iter(data), steps + HELD_OUT * hold_out))
    kept = min(HELD_OUT, max(1, len(first) // 5)) if hold_out else 0
    if len(first) < 1 + 2 * hold_out:
        raise ValueError(
            f"the data gives {len(first)} batches; 3 are needed to hold some out, or one and "
            "validate="
        )
    train = first[: len(first) - kept]
    return list(itertools.islice(itertools.cycle(train), steps)), first[len(train) :]
