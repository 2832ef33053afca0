"""Measures gradients per layer, for the policies that judge by them (AutoFreeze, SmartPipe)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from egeria_cache.skip import is_sharded
from egeria_core.history import Verdict
from egeria_core.ranks import global_sums, local_part
from egeria_core.watch import Meter, Watched

__all__ = ["GradientMeter"]


class GradientMeter(Meter):
    """Reads gradients right before each `optimizer.step()`, when they are whole and unscaled.

    `gradient_sum`: every step's gradients are added up; a reading is, per layer, the sum over its
    parameters of the L1 norm of what has added up since the last one.
    `gradient_change`: two gradients are kept per reading, the previous reading's and this one's; a
    reading is |g' - g| / |g'| per layer, L2 over all its parameters.
    A frozen layer, and one that has nothing to compare with yet, reads None.
    """

    def __init__(
        self, watched: Watched, measure: Literal["gradient_sum", "gradient_change"]
    ) -> None:
        self._model, self._layers, self._measure = watched.model, watched.layers, measure
        self._kept: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        self._parameters: list[dict[str, Tensor]] = []
        self._wanted = measure == "gradient_sum"
        self._ready: list[Verdict] = []
        self._handle: RemovableHandle | None = watched.optimizer.register_step_pre_hook(
            self._before_step
        )
        self.bind()

    def bind(self) -> None:
        """Learn which parameters belong to which layer."""
        self._parameters = []
        known: set[int] = set()
        for layer in self._layers.layers:
            own: dict[str, Tensor] = {}
            for name in layer.modules:
                for inner, parameter in self._model.get_submodule(name).named_parameters(name):
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        own[inner] = parameter
            self._parameters.append(own)

    def prepare(self, frozen: int) -> None:
        """Take the next step's gradients."""
        self._wanted = True

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._wanted:
            return
        adding = self._measure == "gradient_sum"
        for own in self._parameters:
            for name, parameter in own.items():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.detach()
                if adding and name in self._now:
                    self._now[name].add_(gradient)
                else:
                    self._now[name] = gradient.clone()

    @torch.no_grad()
    def measure(self, step: int, frozen: int) -> None:
        """Reduce what was taken to one number per layer.

        Where the model is sharded all ranks do, each its part, and add up.
        """
        if not self._now:
            return  # nothing since the last reading: the interval has just begun
        parts = [
            None if index < frozen else self._sums(own)
            for index, own in enumerate(self._parameters)
        ]
        # One transfer for all layers: the host waits once per evaluation.
        present = [part for part in parts if part is not None]
        numbers: list[list[float]] = []
        if present:
            sums = torch.stack(present)
            sharded = next((g for g in self._now.values() if is_sharded(g)), None)
            numbers = (sums if sharded is None else global_sums(sums, sharded)).tolist()
        left = iter(numbers)
        result = tuple(None if part is None else self._finished(*next(left)) for part in parts)
        if self._measure == "gradient_change":
            self._kept, self._wanted = self._now, False
        self._now = {}
        self._ready.append(Verdict(step, frozen, None, result))

    def _sums(self, own: dict[str, Tensor]) -> Tensor | None:
        """Return what a layer's number is made of, shape (2,), of this rank's part."""
        now = {name: local_part(self._now[name]) for name in own if name in self._now}
        if not now:
            return None
        if self._measure == "gradient_sum":
            total = torch.stack([gradient.abs().sum() for gradient in now.values()]).sum()
            return torch.stack([total, total])
        old = {name: local_part(self._kept[name]) for name in now if name in self._kept}
        if not old:
            return None
        change = torch.stack([(old[name] - now[name]).square().sum() for name in old]).sum()
        return torch.stack([change, torch.stack([g.square().sum() for g in old.values()]).sum()])

    def _finished(self, first: float, second: float) -> float:
        if self._measure == "gradient_sum":
            return first
        # As tensors divide: 0 / 0 is no number, and 1 / 0 is infinite.
        return float((torch.tensor(first) / torch.tensor(second)).sqrt())

    def collect(self) -> list[Verdict]:
        """Return the readings taken since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def state_dict(self) -> dict[str, Any]:
        """Return gradients kept for the next reading, whole; of a sharded model on all ranks."""
        return {
            name: {key: value.full_tensor() if is_sharded(value) else value for key, value in of}  # type: ignore[attr-defined]
            for name, of in (("kept", self._kept.items()), ("now", self._now.items()))
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        parameters = dict(self._model.named_parameters())
        for name in ("kept", "now"):
            values = {k: part_like(v, parameters[k]) for k, v in state[name].items()}
            setattr(self, f"_{name}", values)

    def close(self) -> None:
        """Take the hook off; idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def part_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of a whole tensor on the device of a parameter, sharded as it is."""
    tensor = tensor.to(parameter.device).clone()
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements)
