"""What freezing would cost, beside what a cache would bring: asked of an adviser, found by name.

A cache knows nothing of what freezing does to a model. Whoever does is named on the command line;
by default it is `egeria_core.suggest_boundary`, which trains copies for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from egeria_cache.inspect.forecast import Settings

__all__ = ["ADVISER", "Advice", "Wish", "advice_as_json", "ask"]

ADVISER = "egeria_core:suggest_boundary"


class Tried(Protocol):
    """A row of an advice: a boundary from which on everything before it stayed frozen."""

    @property
    def boundary(self) -> str | None:
        """Name of the last frozen module."""

    @property
    def harm(self) -> float:
        """By how much training ended worse than with nothing frozen."""

    @property
    def harm_error(self) -> float | None:
        """One standard error of it, where that is known."""


class Advice(Protocol):
    """All that is shown of what an adviser says; `str` of it ends with a sentence."""

    @property
    def trials(self) -> Sequence[Tried]:
        """A row per boundary that was tried."""

    @property
    def boundary(self) -> str | None:
        """The one to take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """How to ask."""

    adviser: Callable[..., Advice]
    steps: int
    """Training steps of each trial."""
    optimizer: Callable[..., torch.optim.Optimizer]
    """Makes the training's optimizer of an iterable of parameters."""
    validate: Callable[[nn.Module], float] | None = None
    """The metric that counts, the higher the better."""


def ask(model: nn.Module, data: Any, settings: Settings, wish: Wish) -> Advice:
    """Have copies of `model` trained on `data`, and return what that shows.

    Args:
        model: On the settings' device; it stays as it is.
        data: A map-style data set, or a DataLoader.
        settings: Batch size, step, device and autocast of the training.
        wish: Whom to ask, and for how long a trial.
    """
    if not isinstance(data, DataLoader):
        data = DataLoader(data, settings.batch_size, shuffle=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            batch = dict(batch)
        device, dtype = settings.device, settings.autocast
        batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
        with nullcontext() if dtype is None else torch.autocast(device.type, dtype):
            return settings.step(model, batch)

    return wish.adviser(
        model, data, loss, optimizer=wish.optimizer, steps=wish.steps, validate=wish.validate
    )


def advice_as_json(advice: Advice) -> dict[str, Any]:
    """Return plain values."""
    return {
        "boundary": advice.boundary,
        "trials": [
            {"boundary": one.boundary, "harm": one.harm, "harm_error": one.harm_error}
            for one in advice.trials
        ],
    }
