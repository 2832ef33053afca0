"""What a meter is: it watches training steps and gives verdicts; a policy may bring its own.

`MovementMeter` measures how far each layer moves in an optimizer step, and what that brings: two
numbers each. At one optimizer step one layer is looked at: its parameters are copied before the
step and compared after it, d = theta' - theta. So d holds whatever the optimizer did (momentum,
decay, adaptive rates, orthogonalised updates), and gradients are read as the optimizer gets them:
summed over micro-batches, reduced over ranks, clipped, unscaled. No more than a copy of that one
layer and of its gradient, into which some optimizers write, is held; between two steps nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egeria_cache.skip import is_sharded
from egeria_core.config import ControllerConfig
from egeria_core.history import History, Verdict
from egeria_core.ranks import global_sums, local_part
from egeria_core.rules import MeanLoss, MeanRate, Remembered
from egeria_core.watch.forward import LayerMap

log = logging.getLogger("egeria")

SILENT_TO_WARN = 10
"""Readings in a row without an optimizer step of which the meter was told."""


class Watched(NamedTuple):
    """All that a meter is made of."""

    model: nn.Module
    """The bare model."""
    optimizer: torch.optim.Optimizer
    layers: LayerMap
    every: int
    """Training steps between two evaluations."""
    config: ControllerConfig
    history: History
    """Refreshes, drops and fallbacks are written here."""


class Meter(Remembered):
    """Watches nothing, and has a rhythm: `prepare` before the forward of an evaluation step,
    `measure` after its optimizer step, `collect` whenever the controller wants verdicts.

    For the training thread alone.
    """

    per_layer: bool = False
    """Whether every rank measures its part of each layer; else one rank measures the front."""

    @classmethod
    def make_meter(cls, watched: Watched) -> Meter:
        """Return the meter of one run."""
        return cls(watched)

    def __init__(self, watched: Watched) -> None:
        """Take what is watched."""

    def bind(self) -> None:
        """The layers are known, or have changed."""

    def note(self, loss: Tensor | float | None) -> None:
        """Take the training loss of each step, where the user gave it."""

    def prepare(self, frozen: int) -> None:
        """The next forward belongs to an evaluation step."""

    def measure(self, step: int, frozen: int) -> None:
        """Look at the step that has just been taken."""

    def collect(self) -> list[Verdict]:
        """Return verdicts, oldest first."""
        return []

    def close(self) -> None:
        """Take off hooks and stop threads; idempotent."""


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers such as Accelerate's, whose hooks never fire."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def can_be_read(optimizer: Any) -> bool:
    """Whether the steps of an optimizer can be watched: those of any `torch.optim.Optimizer`."""
    return callable(getattr(bare_optimizer(optimizer), "register_step_post_hook", None))


class MovementMeter(Meter):
    """Reads one layer of the model at every `spacing`-th optimizer step, round and round.

    A verdict's values are: the mean loss of the steps since the last one, the sum of the learning
    rate up to their middle, and then, per layer, how much of the loss its step took away to
    first order (-g . d) and its speed |d| / |theta|. None: the layer was not read. Zero:
    nothing of it trains.

    Args:
        watched: What it reads.

    Raises:
        TypeError: The optimizer's steps cannot be watched.
    """

    per_layer = True
    remembers = ("_next", "_idle", "_steps", "_rate", "_rate_before", "_losses", "_read")

    def __init__(self, watched: Watched) -> None:
        optimizer = watched.optimizer
        if not can_be_read(optimizer):
            raise TypeError(
                f"the steps of {type(optimizer).__name__} cannot be watched: it is no "
                "torch.optim.Optimizer; use policy='plasticity'"
            )
        self._layers, self._every = watched.layers, watched.every
        self._optimizer = bare_optimizer(optimizer)
        self._mean_rate = MeanRate(self._optimizer)
        self._steps = 0
        self._rate = self._rate_before = 0.0
        self._losses = MeanLoss()
        self._opened: tuple[int, Callable[[], Tensor]] | None = None
        self._ready: list[Verdict] = []
        self._silent = 0
        self._hooks = ExitStack()
        self._hooks.callback(self._optimizer.register_step_pre_hook(self._before_step).remove)
        self._hooks.callback(self._optimizer.register_step_post_hook(self._after_step).remove)
        self.bind()

    def bind(self) -> None:
        """Learn which parameters belong to which layer."""
        self._parameters = self._layers.parameters_of_layers()
        self._owners = [layer for layer, own in enumerate(self._parameters) if own]
        # Evenly over the steps between two verdicts; of a layer that comes twice the last counts.
        self._spacing = max(1, self._every // max(1, len(self._owners)))
        self._next, self._read, self._idle = 0, dict[int, Tensor](), set[int]()

    def note(self, loss: Tensor | float | None) -> None:
        """Take the loss of one step.

        Raises:
            ValueError: There is none.
        """
        if loss is None:
            raise ValueError("step(loss) needs the training loss of every step to predict from")
        self._losses.add(loss)

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Copy a layer, where it is time."""
        self._opened = None
        self._rate += self._mean_rate()
        self._steps += 1
        found = None if self._steps % self._spacing else self._following()
        if found is None:
            return
        layer, own = found
        old = [local_part(p).detach().clone() for p in own]
        gradients = [p.grad.clone() for p in own if p.grad is not None]
        scale = getattr(self._optimizer, "grad_scale", None)
        if isinstance(scale, Tensor):  # a fused optimizer under a GradScaler unscales by itself
            gradients = [g.mul_(1 / scale.to(g.device)) for g in gradients]
        inf = getattr(self._optimizer, "found_inf", None)
        inf = inf.detach().clone() if isinstance(inf, Tensor) else None
        self._opened = layer, partial(_numbers, own, old, gradients, inf)

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Compare with what was copied before the step."""
        if self._opened is not None:
            layer, numbers = self._opened
            self._read[layer], self._opened = numbers(), None

    def _following(self) -> tuple[int, list[Tensor]] | None:
        """Return the next layer that trains, and what of it does."""
        for _ in self._owners:
            layer = self._owners[self._next % len(self._owners)]
            self._next = (self._next + 1) % len(self._owners)
            own = [p for p in self._parameters[layer] if p.requires_grad and p.grad is not None]
            if own:
                self._idle.discard(layer)
                return layer, own
            self._idle.add(layer)
        return None

    def measure(self, step: int, frozen: int) -> None:
        """Reduce what was read since the last verdict to numbers: one transfer for all layers."""
        self._silent = 0 if self._steps else self._silent + 1
        if self._silent == SILENT_TO_WARN:
            log.warning(
                "egeria: none of the optimizer's steps was seen, so nothing can be predicted and "
                "nothing will freeze; give the controller the optimizer whose step() is called"
            )
        if not self._losses.count:
            return
        rows = _stacked(list(self._read.values())).tolist() if self._read else []
        middle = (self._rate_before + self._rate) / 2
        by_layer = self._by_layer(dict(zip(self._read, rows, strict=True)))
        values = (self._losses.take(), middle, *by_layer)
        self._rate_before, self._read = self._rate, {}
        self._ready.append(Verdict(step, frozen, None, values))

    def _by_layer(self, rows: Mapping[int, Sequence[float]]) -> list[float | None]:
        """Return -g . d and |d| / |theta| per layer, from the rows that were read."""
        decrease = [None if self._trains(i) else 0.0 for i in range(len(self._parameters))]
        speed = list(decrease)
        for layer, (brought, moved, size) in rows.items():
            # Not finite: the optimizer skipped the step.
            if self._trains(layer) and math.isfinite(brought + moved + size) and size > 0:
                decrease[layer], speed[layer] = brought, math.sqrt(moved / size)
        return [*decrease, *speed]

    def _trains(self, layer: int) -> bool:
        """Whether something of a layer trains; what does not stands still, and brings nothing."""
        return layer not in self._idle and any(p.requires_grad for p in self._parameters[layer])

    def collect(self) -> list[Verdict]:
        """Return the readings taken since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def state_dict(self) -> dict[str, Any]:
        """Return what was summed since the last reading, and whose turn it is."""
        self._read = {layer: row.cpu() for layer, row in self._read.items()}
        return super().state_dict()

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        self._hooks.close()


def _numbers(
    own: Sequence[Tensor], old: list[Tensor], gradients: Sequence[Tensor], found_inf: Tensor | None
) -> Tensor:
    """Return (-g . d, |d|^2, |theta|^2), float32; not finite where the step was skipped.

    What was copied is written to, so that no second copy is needed.
    """
    new = [local_part(p).detach() for p in own]
    torch._foreach_sub_(old, new)
    brought = [_dot(*pair) for pair in zip(old, map(local_part, gradients), strict=True)]
    lengths = [_stacked(torch._foreach_norm(list(map(_real, part)))) for part in (old, new)]
    total = torch.stack([_stacked(brought).sum(), *(part.square().sum() for part in lengths)])
    if found_inf is not None:
        skipped = found_inf.to(total.device).reshape(()) > 0
        total = torch.where(skipped, total.new_tensor(math.nan), total)
    sharded = next(filter(is_sharded, own), None)
    return total if sharded is None else global_sums(total, sharded)


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack([number.to(numbers[0].device) for number in numbers])


def _real(tensor: Tensor) -> Tensor:
    """Return floats: halves would underflow when they are multiplied."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).float()


def _dot(back: Tensor, gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        back, gradient = back[gradient.indices().unbind()], gradient.values()
    return (_real(back) * _real(gradient)).sum()
