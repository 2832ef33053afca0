"""What `train.py` asks of a task."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from training.settings import Settings

# The paper's models live with the benchmarks that measure them.
_ROOT = str(Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

__all__ = ["Task", "TaskError", "falling", "warm_up"]

Batches = Iterable[Any]


class TaskError(Exception):
    """A setting does not fit the task: says which, and what fits."""


class Task(ABC):
    """Data, model, optimizer, learning rate, loss and metric."""

    metric: ClassVar[str]
    """Name of what `score` returns."""
    lr: ClassVar[float]
    unfreeze_rule: ClassVar[str] = "warm_restart"
    """A learning rate that falls without steps asks for no unfreezing before it rises again."""
    train_set: Any
    test_set: Any
    """None where the data set has no part to test on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return the models by name; the first is the default, a small one."""

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return the task's usual optimizer."""

    @abstractmethod
    def rate(self, step: int, total: int) -> float:
        """Return the factor of the learning rate at a step of so many."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch, a scalar."""

    @abstractmethod
    def score(self, model: nn.Module, batches: Batches) -> float:
        """Return the metric over the test set; `batches` are in its order."""

    def model(self) -> nn.Module:
        """Return the model that was asked for.

        Raises:
            TaskError: The task has no such model, or the weights do not fit it.
        """
        known, name = self.models(), self.settings.model
        if name and name not in known:
            raise TaskError(
                f"--model {name} is unknown to {self.settings.task}; it has {', '.join(known)}"
            )
        model = known[name or next(iter(known))]()
        if self.settings.weights is not None:
            _load_matching(model, self.settings.weights)
        return model


def _load_matching(model: nn.Module, path: Path) -> None:
    """Load the weights whose names and shapes fit: a new head keeps its random ones."""
    if not path.is_file():
        raise TaskError(f"--weights {path}: there is no such file")
    try:
        given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TaskError(
            f"--weights {path} holds no plain state_dict ({error}); save it by "
            "torch.save(model.state_dict(), path)"
        ) from None
    own = model.state_dict()
    fitting = {
        k: v for k, v in given.items() if k in own and getattr(v, "shape", None) == own[k].shape
    }
    if not fitting:
        names = f"{next(iter(given), 'nothing')!r} where the model has {next(iter(own))!r}"
        raise TaskError(f"--weights {path}: no weight fits the model; it has {names}")
    model.load_state_dict(fitting, strict=False)


def falling(step: int, total: int, *, at: tuple[float, ...] = (0.5, 0.75)) -> float:
    """A tenth after each of these parts of the schedule (He et al. 2016)."""
    factor: float = 0.1 ** sum(step >= part * total for part in at)
    return factor


def warm_up(step: int, total: int, *, part: float = 0.1) -> float:
    """Rise linearly over a part of the schedule; 1 afterwards."""
    return min(1.0, (step + 1) / max(1, math.ceil(part * total)))
