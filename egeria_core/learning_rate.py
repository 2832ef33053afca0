"""The mean learning rate, and when a change of it asks for frozen layers to be trained again.

Step decay has the paper's rule: unfreeze once the rate is a tenth of what it was at the frontmost
freeze. For cosine and cyclical schedules the paper leaves the rule to the user; `WarmRestart` is a
ready one, and any object with the three methods of `UnfreezeRule` will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from egeria_core.remembered import Remembered

__all__ = ["MeanRate", "TenfoldDrop", "UnfreezeRule", "WarmRestart", "parse_rule"]


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


@runtime_checkable
class UnfreezeRule(Protocol):
    """Decides, from step and learning rates, when everything frozen is trained again."""

    def should_unfreeze(self, step: int, lr: tuple[float, ...], frozen: int) -> bool:
        """Answer for one training step; called on every step, frozen layers or not."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later answers depend on, of JSON types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


class TenfoldDrop(Remembered):
    """Unfreeze when every group's rate has fallen to `factor` of what it was at the first freeze.

    The reference point is the freeze of the *frontmost* layer (section 4.2.2): later freezes do
    not move it, an unfreeze clears it.
    """

    remembers = ("_at_freeze",)

    def __init__(self, factor: float = 0.1) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie between 0 and 1, got {factor}")
        self.factor = factor
        self._at_freeze: list[float] | None = None

    def should_unfreeze(self, step: int, lr: tuple[float, ...], frozen: int) -> bool:
        """Compare with the rates at the frontmost freeze."""
        if frozen == 0 or self._at_freeze is None or len(self._at_freeze) != len(lr):
            # The layer freezes after this answer: the rate of the last step without frozen
            # layers is the rate at the freeze, even if it drops before the next step.
            self._at_freeze = list(lr)
            return False
        # A group that had no rate at the freeze (still warming up) has no drop to measure.
        ratios = [now / then for now, then in zip(lr, self._at_freeze, strict=True) if then > 0]
        # 0.1 * 0.1 is 0.010000000000000002: without the slack the drop would be missed.
        return bool(ratios) and max(ratios) <= self.factor * (1 + 1e-6)


class WarmRestart(Remembered):
    """Unfreeze when the rate jumps up: `rise` times the lowest rate since the last restart.

    For `CosineAnnealingWarmRestarts` and cyclical schedules. The slow rise of a triangular cycle
    counts once, when it has risen that far.
    """

    remembers = ("_lowest", "_falling")

    def __init__(self, rise: float = 2.0) -> None:
        if rise <= 1:
            raise ValueError(f"rise must be above 1, got {rise}")
        self.rise = rise
        self._lowest: float | None = None
        self._falling = False

    def should_unfreeze(self, step: int, lr: tuple[float, ...], frozen: int) -> bool:
        """Follow the largest rate of all groups."""
        now = max(lr)
        if self._lowest is None or now <= self._lowest:
            # Warm-up at the start of training only rises; a restart needs a fall before it.
            self._falling = self._falling or (self._lowest is not None and now < self._lowest)
            self._lowest = now
            return False
        if self._falling and now >= self.rise * self._lowest:
            self._falling, self._lowest = False, now
            return frozen > 0
        if not self._falling:
            self._lowest = now
        return False


def parse_rule(rule: str | UnfreezeRule) -> UnfreezeRule:
    """Return the rule itself, or the one that a short name stands for."""
    if not isinstance(rule, str):
        return rule
    known: dict[str, type[UnfreezeRule]]
    known = {"tenfold_drop": TenfoldDrop, "warm_restart": WarmRestart}
    if rule not in known:
        raise ValueError(f"unknown unfreeze rule {rule!r}; known: {', '.join(sorted(known))}")
    return known[rule]()
