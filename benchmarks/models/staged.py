"""A model as a row of layers, so that its last part can also be run alone."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import nn


class Staged(nn.Module):
    """`forward` is `enter`, every layer, `leave`; a state goes from one to the next.

    The state is whatever the later part needs: a tensor, or several of them.
    """

    layers: list[str]
    """Qualified names of the layers that a boundary may name, in forward order."""
    front: list[str]
    """Qualified names of what runs before the first layer."""

    @abstractmethod
    def enter(self, *inputs: Any) -> Any:
        """Return the state before the first layer."""

    @abstractmethod
    def advance(self, state: Any, number: int, layer: nn.Module) -> Any:
        """Run one layer."""

    @abstractmethod
    def leave(self, state: Any) -> Any:
        """Return the model's output."""

    def prefix(self, inputs: tuple[Any, ...], stop: int) -> Any:
        """Run the first `stop` layers."""
        return self._run(self.enter(*inputs), 0, stop)

    def suffix(self, state: Any, start: int) -> Any:
        """Run from layer `start` to the end."""
        return self.leave(self._run(state, start, len(self.layers)))

    def forward(self, *inputs: Any) -> Any:
        """Run the model."""
        return self.suffix(self.enter(*inputs), 0)

    def freeze(self, stop: int | None) -> None:
        """Freeze the front and the first `stop` layers, and train all else; None: train all."""
        self.requires_grad_(True)
        self.train()
        for name in [] if stop is None else [*self.front, *self.layers[:stop]]:
            self.get_submodule(name).requires_grad_(False).eval()

    def _run(self, state: Any, start: int, stop: int) -> Any:
        for number, name in enumerate(self.layers[start:stop], start):
            state = self.advance(state, number, self.get_submodule(name))
        return state


def init_convolutions(model: nn.Module) -> None:
    """He's initialisation (2015), as the published networks have it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
