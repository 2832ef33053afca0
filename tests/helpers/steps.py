"""One step of an ordinary loop."""

from __future__ import annotations

import torch
from torch import Tensor


def take_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train on a loss, and return it."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
