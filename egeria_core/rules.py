"""The rules of a run: when freezing may begin, and when frozen layers are trained again.

No layer may freeze while the loss still falls fast (section 3): networks have a critical period at
the start of training, and what is frozen then stays bad.

Step decay has the paper's rule: unfreeze once the learning rate is a tenth of what it was at the
frontmost freeze. For cosine and cyclical schedules the paper leaves the rule to the user;
`WarmRestart` is a ready one, and any object with the three methods of `UnfreezeRule` will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar, Protocol

from torch import Tensor

SMOOTHED = 3
"""Looks at the loss that are averaged into one value. Single batches differ by more than 10 % from
each other at any stage of training, in either direction."""
SHARE = 0.025
"""Part of the schedule that lies between two looks, where its length is known. Looks a few steps
apart differ by less than 10 % from the start, whatever there is to learn."""
DROP = 0.1
"""Of the rate at the frontmost freeze is a drop."""
RISE = 2.0
"""A learning rate of so many times another one has risen: what was predicted or frozen at that one
holds no longer."""


class Remembered:
    """Whose state is the attributes that its class names, of JSON types or of this kind too."""

    remembers: ClassVar[tuple[str, ...]] = ()
    """Names of attributes; their leading underscore is not part of the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that later answers depend on."""
        values = {name.lstrip("_"): getattr(self, name) for name in self.remembers}
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else copy(value)
            for name, value in values.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for name in self.remembers:
            value = state[name.lstrip("_")]
            own = getattr(self, name)
            if hasattr(own, "load_state_dict"):
                own.load_state_dict(value)
            else:
                setattr(self, name, copy(value))


class MeanLoss(Remembered):
    """Mean of the training losses since it was last taken; these are summed where they lie.

    Reading each would make the host wait for the device on every step.
    """

    remembers = ("_total", "count")

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self.count = 0

    def add(self, loss: Tensor | float) -> None:
        """Take the loss of one step, a scalar."""
        value = loss.detach().float() if isinstance(loss, Tensor) else float(loss)
        self._total, self.count = self._total + value, self.count + 1

    def take(self) -> float:
        """Return the mean, and begin anew."""
        mean = float(self._total) / self.count
        self._total, self.count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return sum and number of the losses."""
        self._total = float(self._total)
        return super().state_dict()


class Bootstrap(Remembered):
    """Ends when the smoothed training loss changes by less than `change` between two looks.

    Args:
        change: Relative change that ends the stage; the paper's "permissively set" 10 %.
        fall: The smoothed loss must be below its first value by this part. A loss that has not
            begun to fall changes as little as one that has settled. None: not asked for.
    """

    remembers = ("done", "_recent", "_previous", "_first")

    def __init__(self, change: float = 0.1, fall: float | None = 0.2) -> None:
        if change <= 0 or not 0 <= (fall or 0) < 1:
            raise ValueError(f"change must be positive, fall in [0, 1), got {change} and {fall}")
        self.change, self.fall = change, fall
        self.done = False
        self._recent: list[float] = []
        self._previous: float | None = None
        self._first: float | None = None

    def interval(self, every: int, total_steps: int | None) -> int:
        """Return the steps between two looks: a multiple of `every`, at least `SHARE`."""
        apart = SHARE * (total_steps or 0)
        return every * max(1, math.ceil(apart / every))

    def observe(self, loss: float) -> bool:
        """Take the mean loss since the last look; return whether the stage is over."""
        if self._first is None and math.isfinite(loss):
            self._first = loss
        self._recent = [*self._recent, loss][-SMOOTHED:]
        if len(self._recent) < SMOOTHED:
            return False
        smooth = sum(self._recent) / len(self._recent)
        previous, self._previous = self._previous, smooth
        # NaN and infinity compare false: a diverging run stays in its critical period.
        if previous is not None and abs(smooth - previous) < self.change * abs(previous):
            fall, first = self.fall, self._first
            self.done |= fall is None or first is None or smooth <= first - fall * abs(first)
        return self.done


class MeanRate:
    """The learning rate of an optimizer's groups, each weighed by its number of scalars.

    Args:
        optimizer: What its groups hold is counted again when one gets a parameter.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._counts: list[int] = []
        self._sizes: list[int] = []

    def __call__(self, groups: Sequence[dict[str, Any]] | None = None) -> float:
        """Return it as it is now; of other groups, with the sizes of these."""
        own = self._optimizer.param_groups
        counts = [len(group["params"]) for group in own]
        if counts != self._counts:
            self._counts = counts
            self._sizes = [sum(p.numel() for p in group["params"]) for group in own]
        rates = [float(group["lr"]) for group in groups or own]
        total = sum(size * rate for size, rate in zip(self._sizes, rates, strict=True))
        return total / max(1, sum(self._sizes))


class UnfreezeRule(Protocol):
    """Decides, from step and learning rates, when everything frozen is trained again."""

    def should_unfreeze(self, step: int, lr: tuple[float, ...], frozen: int) -> bool:
        """Answer for one training step; called on every step, frozen layers or not."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later answers depend on, of JSON types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


class TenfoldDrop(Remembered):
    """Unfreeze when every group's rate has fallen to a tenth of what it was at the first freeze.

    The reference point is the freeze of the *frontmost* layer (section 4.2.2): later freezes do
    not move it, an unfreeze clears it.
    """

    remembers = ("_at_freeze",)

    def __init__(self) -> None:
        self._at_freeze: list[float] = []

    def should_unfreeze(self, step: int, lr: tuple[float, ...], frozen: int) -> bool:
        """Compare with the rates at the frontmost freeze."""
        if frozen == 0 or len(self._at_freeze) != len(lr):
            # The layer freezes after this answer: the rate of the last step without frozen
            # layers is the rate at the freeze, even if it drops before the next step.
            self._at_freeze = list(lr)
            return False
        # A group that had no rate at the freeze (still warming up) has no drop to measure.
        ratios = [now / then for now, then in zip(lr, self._at_freeze, strict=True) if then > 0]
        # 0.1 * 0.1 is 0.010000000000000002: without the slack the drop would be missed.
        return bool(ratios) and max(ratios) <= DROP * (1 + 1e-6)


class WarmRestart(Remembered):
    """Unfreeze when the rate is twice the lowest that there was while layers were frozen.

    For `CosineAnnealingWarmRestarts` and cyclical schedules.
    """

    remembers = ("_lowest",)

    def __init__(self) -> None:
        self._lowest = math.inf

    def should_unfreeze(self, step: int, lr: tuple[float, ...], frozen: int) -> bool:
        """Follow the largest rate of all groups."""
        self._lowest = min(self._lowest, max(lr)) if frozen else max(lr)
        return max(lr) > 0 and max(lr) >= RISE * self._lowest


def parse_rule(rule: str | UnfreezeRule) -> UnfreezeRule:
    """Return the rule itself, or the one that a short name stands for."""
    if rule == "tenfold_drop":
        return TenfoldDrop()
    if rule == "warm_restart":
        return WarmRestart()
    if isinstance(rule, str):
        raise ValueError(f"unknown unfreeze rule {rule!r}; known: tenfold_drop, warm_restart")
    return rule
