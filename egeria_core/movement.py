"""Measures how far each layer moves in an optimizer step, and what that brings: two numbers each.

At one optimizer step one layer is looked at: its parameters are copied before the step and
compared after it, d = theta' - theta. So d holds whatever the optimizer did (momentum, decay,
adaptive rates, orthogonalised updates), and gradients are read as the optimizer gets them: summed
over micro-batches, reduced over ranks, clipped, unscaled. No more than a copy of that one layer is
held, and between two steps nothing is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria_core.judge import Verdict
from egeria_core.pace import Pace
from egeria_core.pieces import Piece, layer_parameters, pieces_of
from egeria_core.prefix import LayerMap
from egeria_core.sharded import global_sums, is_sharded, local_part

__all__ = ["MovementMeter", "bare_optimizer", "can_be_read"]

log = logging.getLogger("egeria")


@dataclass(slots=True)
class Old:
    """A copy of some parameters."""

    parts: list[Tensor]
    whole: Tensor | None
    """All of them as one vector, of which `parts` are views; None where their types differ."""

    @classmethod
    def of(cls, parameters: list[Tensor], gradients: list[Tensor]) -> Old:
        """Copy them as they are now."""
        now = [p.detach() for p in parameters]
        kinds = {(t.dtype, t.device, t.layout) for t in (*now, *gradients)}
        first = now[0]
        if len(kinds) > 1 or first.dtype not in (torch.float32, torch.float64):
            return cls([p.clone() for p in now], None)
        sizes = [p.numel() for p in now]
        whole = first.new_empty(sum(sizes))
        flat = whole.split(sizes)
        parts = [part.view(p.shape) for part, p in zip(flat, now, strict=True)]
        torch._foreach_copy_(parts, now)
        return cls(parts, whole)


SILENT_TO_WARN = 10
"""Readings in a row without an optimizer step of which the meter was told."""


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers such as Accelerate's, whose hooks never fire."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def can_be_read(optimizer: Any) -> bool:
    """Whether the steps of an optimizer can be watched: those of any `torch.optim.Optimizer`."""
    return callable(getattr(bare_optimizer(optimizer), "register_step_post_hook", None))


class MovementMeter:
    """Reads one piece of the model at every `spacing`-th optimizer step, round and round.

    A verdict's values are: the mean loss of the steps since the last one, the sum of the learning
    rate up to their middle, and then, per layer, how much of the loss its step took away to
    first order (-g . d) and its speed |d| / |theta|. None: the layer was not read. Zero:
    nothing of it trains.

    Args:
        model: The bare model.
        optimizer: Its optimizer.
        layers: Its layers.
        every: Training steps between two verdicts.
        most: Part of the training's time that reading may take; where it takes more, fewer of the
            layers are read in a round. None: all are.

    Raises:
        TypeError: The optimizer's steps cannot be watched.
    """

    immediate = True
    """Everything is at hand."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: LayerMap,
        every: int,
        *,
        most: float | None = None,
    ) -> None:
        if not can_be_read(optimizer):
            raise TypeError(
                f"the steps of {type(optimizer).__name__} cannot be watched: it is no "
                "torch.optim.Optimizer; use policy='plasticity'"
            )
        self._model, self._layers, self._every = model, layers, every
        self._optimizer = bare_optimizer(optimizer)
        self._halves = False
        # A sharded layer is read by all ranks together, which must not go by their own clocks.
        together = any(map(is_sharded, model.parameters()))
        self._pace = Pace(None if together else most)
        self._counts: list[int] = []
        self._sizes: list[int] = []
        self._next = 0
        self._steps = 0
        self._spacing = 1
        self._rate = self._rate_before = 0.0
        self._losses: Tensor | float = 0.0
        self._num_losses = 0
        self._read: list[tuple[int, Tensor]] = []
        self._open: tuple[Piece, Old, list[Tensor], list[int], Tensor | None] | None = None
        self._ready: list[Verdict] = []
        self._silent = 0
        self._handles: list[RemovableHandle] = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self.bind()

    def bind(self) -> None:
        """Learn which parameters belong to which layer."""
        self._parameters = layer_parameters(self._model, self._layers)
        self._cut()

    def _cut(self) -> None:
        self._pieces = pieces_of(self._parameters, halves=self._halves)
        # Evenly over the steps between two verdicts; in several rounds where these are too few.
        self._spacing = max(1, self._every // max(1, len(self._pieces)))
        self._next, self._read, self._idle = 0, [], set[int]()

    def note(self, loss: Tensor | float) -> None:
        """Take the loss of one step; summed where it lies, so that nobody waits for the device."""
        value = loss.detach().float() if isinstance(loss, Tensor) else float(loss)
        self._losses = self._losses + value
        self._num_losses += 1

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._open = None
        self._rate += self._mean_rate()
        self._steps += 1
        start = self._pace.step()
        if self._steps % (self._spacing * self._pace.rarer) == 0:
            self._begin(self._following())
            self._pace.begun(start)

    def _mean_rate(self) -> float:
        """Return the groups' mean rate; their sizes are counted once."""
        groups = self._optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        if counts != self._counts:
            self._counts = counts
            self._sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        rates = [float(group["lr"]) for group in groups]
        total = sum(size * rate for size, rate in zip(self._sizes, rates, strict=True))
        return total / max(1, sum(self._sizes))

    def _following(self) -> Piece | None:
        """Return the next piece that trains."""
        for _ in self._pieces:
            number, self._next = self._next, (self._next + 1) % len(self._pieces)
            piece = self._pieces[number]
            if any(p.requires_grad and p.grad is not None for p in piece.parameters):
                self._idle.discard(number)
                return piece
            self._idle.add(number)
        return None

    @torch.no_grad()
    def _begin(self, piece: Piece | None) -> None:
        if piece is None:
            return
        own = [p for p in piece.parameters if p.requires_grad and p.grad is not None]
        gradients = [p.grad for p in own if p.grad is not None]
        if self._halves:
            gradients = [g.clone() for g in gradients]
        found = getattr(self._optimizer, "found_inf", None)
        scale = getattr(self._optimizer, "grad_scale", None)
        if isinstance(scale, Tensor) and self._halves:
            # A fused optimizer under a GradScaler unscales by itself.
            gradients = [g.mul_(1 / scale.to(g.device)) for g in gradients]
        elif isinstance(scale, Tensor):
            self._keep_gradients()
            return
        versions = [g._version for g in gradients]
        part = Piece(piece.layer, own)
        flag = found.detach().clone() if isinstance(found, Tensor) else None
        old = Old.of(list(map(local_part, own)), list(map(local_part, gradients)))
        self._open = (part, old, gradients, versions, flag)

    def _keep_gradients(self) -> None:
        """Read by halves from now on, weights and gradients: together no more than one layer."""
        self._halves = True
        self._cut()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        with self._pace.ending():
            self._finish(*opened)

    @torch.no_grad()
    def _finish(
        self,
        piece: Piece,
        old: Old,
        gradients: list[Tensor],
        versions: list[int],
        found: Tensor | None,
    ) -> None:
        """Compare with what was copied before the step."""
        if not self._halves and any(
            p.grad is not g or g._version != v
            for p, g, v in zip(piece.parameters, gradients, versions, strict=True)
        ):
            # This optimizer writes into the gradients (Nesterov momentum does): they must be
            # copied before the step.
            self._keep_gradients()
            return
        now, local = (list(map(local_part, tensors)) for tensors in (piece.parameters, gradients))
        row = _numbers(now, old, local, found)
        sharded = next(filter(is_sharded, piece.parameters), None)
        self._read.append((piece.layer, row if sharded is None else global_sums(row, sharded)))

    def begin(self) -> None:
        """Nothing: what was read before is told of too."""

    def prepare(self, frozen: int) -> None:
        """Nothing: every step is watched."""

    def measure(self, step: int, frozen: int) -> None:
        """Reduce what was read since the last verdict to numbers: one transfer for all."""
        self._heed_silence()
        if not self._num_losses:
            return
        loss = self._losses
        parts = self._parts()
        read = [layer for layer, _ in self._read]
        whole = {layer for layer in read if read.count(layer) >= parts[layer] > 0}
        taken = [entry for entry in self._read if entry[0] in whole]
        # A layer of which only one half was read so far is told of with the next verdict.
        self._read = [e for e in self._read if e[0] not in whole and parts[e[0]] > 0]
        rows = [row for _, row in taken]
        if isinstance(loss, Tensor):
            target = rows[0].device if rows else loss.device
            rows.append(torch.stack([loss.reshape(()).to(target)] * 3))
        numbers = torch.stack([row.to(rows[0].device) for row in rows]).tolist() if rows else []
        mean = (numbers.pop()[0] if isinstance(loss, Tensor) else loss) / self._num_losses
        values = _by_layer([layer for layer, _ in taken], numbers, parts)
        middle = (self._rate_before + self._rate) / 2
        self._rate_before = self._rate
        self._losses, self._num_losses = 0.0, 0
        self._ready.append(Verdict(step, frozen, None, (mean, middle, *values)))

    def _parts(self) -> list[int]:
        """Return of how many pieces that train each layer consists, as far as was seen."""
        parts = [0] * len(self._parameters)
        for number, piece in enumerate(self._pieces):
            trains = number not in self._idle and any(p.requires_grad for p in piece.parameters)
            parts[piece.layer] += trains
        return parts

    def _heed_silence(self) -> None:
        self._silent = 0 if self._steps else self._silent + 1
        if self._silent == SILENT_TO_WARN:
            log.warning(
                "egeria: none of the optimizer's steps was seen, so nothing can be predicted and "
                "nothing will freeze; give the controller the optimizer whose step() is called",
            )

    def collect(self) -> list[Verdict]:
        """Return the readings taken since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def state_dict(self) -> dict[str, Any]:
        """Return what was summed since the last reading, and whose turn it is."""
        return {
            "halves": self._halves,
            "rarer": self._pace.rarer,
            "next": self._next,
            "idle": sorted(self._idle),
            "steps": self._steps,
            "rate": [self._rate, self._rate_before],
            "losses": [float(self._losses), self._num_losses],
            "read": [[layer, *row.tolist()] for layer, row in self._read],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._halves = state["halves"]
        self._cut()
        self._pace.rarer, self._idle = state["rarer"], set(state["idle"])
        self._next, self._steps = state["next"], state["steps"]
        self._rate, self._rate_before = state["rate"]
        self._losses, self._num_losses = state["losses"]
        self._read = [(int(layer), torch.tensor(row)) for layer, *row in state["read"]]

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _by_layer(
    layers: Sequence[int], numbers: Sequence[Sequence[float]], parts: Sequence[int]
) -> list[float | None]:
    """Return -g . d and |d| / |theta| per layer, from the numbers of the pieces that were read."""
    own: list[list[Sequence[float]]] = [[] for _ in parts]
    for layer, row in zip(layers, numbers, strict=True):
        own[layer].append(row)
    # What does not train stands still, and brings nothing.
    decrease: list[float | None] = [None if count else 0.0 for count in parts]
    speed = list(decrease)
    for layer, rows in enumerate(own):
        # Not finite: the optimizer skipped the step.
        size = sum(row[2] for row in rows)
        if rows and all(math.isfinite(sum(row)) for row in rows) and size > 0:
            # Several rounds, since the last verdict, are averaged.
            decrease[layer] = sum(row[0] for row in rows) * parts[layer] / len(rows)
            speed[layer] = math.sqrt(sum(row[1] for row in rows) / size)
    return [*decrease, *speed]


def _numbers(
    parameters: list[Tensor], old: Old, gradients: list[Tensor], found_inf: Tensor | None
) -> Tensor:
    """Return (-g . d, |d|^2, |theta|^2), float32; not finite where the step was skipped.

    `old` is written to, so that no second copy is needed.
    """
    new = [p.detach() for p in parameters]
    if old.whole is not None:
        # One call for all tensors where there is one: small layers cost calls, not arithmetic.
        torch._foreach_sub_(old.parts, new)
        moved = old.whole.norm()
        sizes = torch.stack(torch._foreach_norm(new)).norm()
        torch._foreach_mul_(old.parts, gradients)
        total = torch.stack([old.whole.sum(), moved.square_(), sizes.square_()]).float()
    else:
        each = zip(new, old.parts, gradients, strict=True)
        sums = [_tensor_numbers(*three) for three in each]
        total = torch.stack([row.to(sums[0].device) for row in sums]).sum(0)
    if found_inf is not None:
        skipped = found_inf.to(total.device).reshape(()) > 0
        total = torch.where(skipped, total.new_tensor(math.nan), total)
    return total


def _tensor_numbers(new: Tensor, old: Tensor, gradient: Tensor) -> Tensor:
    """The same for one tensor of any type; halves are multiplied as floats, lest they underflow."""
    if new.is_complex():
        new, old, gradient = (torch.view_as_real(t) for t in (new, old, gradient))
    back = old.sub_(new)
    moved = back.float().square().sum()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        back, gradient = back[gradient.indices().unbind()], gradient.values()
    brought = (back.float() * gradient.float()).sum()
    return torch.stack([brought, moved, new.float().square().sum()])
