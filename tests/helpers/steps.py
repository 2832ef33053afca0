"""One step of an ordinary loop, and a controller that notes what it is told of each."""

from __future__ import annotations

import torch
from torch import Tensor


def take_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train on a loss, and return it."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Notes:
    """A controller that only notes what it is told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.loaded: object = None
        self.num_closed = 0

    def step(self, loss: Tensor) -> None:
        self.losses.append(float(loss))

    def state_dict(self) -> dict[str, int]:
        return {"steps": len(self.losses)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state

    def close(self) -> None:
        self.num_closed += 1
