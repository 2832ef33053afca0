"""Gives every layer a learning rate of its own for the length of one optimizer step.

The user's parameter groups stay as they are: they are replaced right before `optimizer.step()`,
by groups of one layer each, and put back right after it. So schedulers, checkpoints and logs know
nothing of it, and any optimizer that reads its rate from its groups follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from egeria_core.watch import Meter, Watched

__all__ = ["LayerRates"]

Group = dict[str, Any]


class SetsRates(Protocol):
    """A policy that anneals each layer by a schedule of its own, in place of the user's."""

    def learning_rate(self, layer: int, num_layers: int, progress: float, base: float) -> float:
        """Return the layer's rate at this part of the schedule, from the group's full rate."""


class LayerRates(Meter):
    """Owns the exchange of groups; `close()` takes the hooks off. Not thread-safe.

    Args:
        watched: Its optimizer's groups are exchanged. What the step itself changes in a group is
            written back from the first of the groups that stood in for it.
        policy: Says each layer's rate, from the group's full one: `max_lr` where a scheduler has
            set one, else `initial_lr`, else the rate that the group had when this was made.
    """

    def __init__(self, watched: Watched, policy: SetsRates) -> None:
        self._optimizer, self._policy, self._layers = watched.optimizer, policy, watched.layers
        self._total_steps = watched.config.total_steps
        self._steps = 0
        self._layer_of: Mapping[int, int] = {}
        self._num_layers = 1
        self._own: list[Group] | None = None
        self._parts: list[tuple[Group, int]] = []
        self._given = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._handles: list[RemovableHandle] = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        ]
        self.bind()

    def bind(self) -> None:
        """Learn which parameters lie in front of each boundary; the others are the last layer's."""
        layers = self._layers.parameters_of_layers()
        self._num_layers = len(layers)
        self._layer_of = {id(p): index for index, own in enumerate(layers) for p in own}

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._restore()  # after a step that was left by an exception
        own: list[Group] = optimizer.param_groups
        self._parts = [
            (part, number)
            for number, group in enumerate(own)
            for part in self._split(group, number)
        ]
        self._own, optimizer.param_groups = own, [part for part, _ in self._parts]

    def _split(self, group: Group, number: int) -> list[Group]:
        by_layer: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            layer = self._layer_of.get(id(parameter), self._num_layers - 1)
            by_layer.setdefault(layer, []).append(parameter)
        given = self._given[number] if number < len(self._given) else group["lr"]
        base = float(group["max_lr"] if "max_lr" in group else group.get("initial_lr") or given)
        return [{**group, "params": own, "lr": self._rate(i, base)} for i, own in by_layer.items()]

    def _rate(self, layer: int, base: float) -> float:
        progress = 0.0 if self._total_steps is None else self._steps / self._total_steps
        return self._policy.learning_rate(layer, self._num_layers, progress, base)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._restore()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return how far the schedule is."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._steps = state["steps"]

    def _restore(self) -> None:
        if self._own is None:
            return
        own, self._own = self._own, None
        for part, number in reversed(self._parts):
            own[number].update({k: v for k, v in part.items() if k not in ("params", "lr")})
        self._optimizer.param_groups = own

    def close(self) -> None:
        """Take the hooks off and put the groups back; idempotent."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
