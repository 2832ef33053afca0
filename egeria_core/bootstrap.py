"""The bootstrapping stage: no layer may freeze while the loss still falls fast (section 3).

Networks have a critical period at the start of training; what is frozen then stays bad.
"""

from __future__ import annotations

import math

from torch import Tensor

from egeria_core.remembered import Remembered


class MeanLoss:
    """Mean of the training losses since it was last taken; these are summed where they lie.

    Reading each would make the host wait for the device on every step.
    """

    def __init__(self, total: Tensor | float = 0.0, count: int = 0) -> None:
        self._total, self.count = total, count

    def add(self, loss: Tensor | float) -> None:
        """Take the loss of one step, a scalar."""
        value = loss.detach().float() if isinstance(loss, Tensor) else float(loss)
        self._total, self.count = self._total + value, self.count + 1

    def take(self) -> float:
        """Return the mean, and begin anew."""
        total, count = self.state()
        self._total, self.count = 0.0, 0
        return total / count

    def state(self) -> tuple[float, int]:
        """Return sum and number of the losses, as the constructor takes them."""
        return float(self._total), self.count


class Bootstrap(Remembered):
    """Ends when the smoothed training loss changes by less than `change` between two looks.

    Args:
        change: Relative change that ends the stage; the paper's "permissively set" 10 %.
        smoothing: Looks averaged into one value. Single batches differ by more than 10 % from
            each other at any stage of training, in either direction.
        share: Part of the schedule that lies between two looks, where its length is known. Looks
            a few steps apart differ by less than 10 % from the start, whatever there is to learn.
        fall: The smoothed loss must be below its first value by this part. A loss that has not
            begun to fall changes as little as one that has settled. None: not asked for.
    """

    remembers = ("done", "_recent", "_previous", "_first")

    def __init__(
        self,
        change: float = 0.1,
        smoothing: int = 3,
        *,
        share: float = 0.025,
        fall: float | None = 0.2,
    ) -> None:
        if change <= 0 or smoothing < 1:
            raise ValueError(f"change and smoothing must be positive, got {change}, {smoothing}")
        if not 0 <= share < 1 or not 0 <= (fall or 0) < 1:
            raise ValueError(f"share and fall must lie in [0, 1), got {share} and {fall}")
        self.change, self.share, self.fall = change, share, fall
        self.done = False
        self._smoothing = smoothing
        self._recent: list[float] = []
        self._previous: float | None = None
        self._first: float | None = None

    def interval(self, every: int, total_steps: int | None) -> int:
        """Return the steps between two looks: a multiple of `every`, at least `share`."""
        apart = self.share * (total_steps or 0)
        return every * max(1, math.ceil(apart / every))

    def observe(self, loss: float) -> bool:
        """Take the mean loss since the last look; return whether the stage is over."""
        if self.done:
            return True
        if self._first is None and math.isfinite(loss):
            self._first = loss
        self._recent = [*self._recent, loss][-self._smoothing :]
        if len(self._recent) < self._smoothing:
            return False
        smooth = sum(self._recent) / len(self._recent)
        previous, self._previous = self._previous, smooth
        # NaN and infinity compare false: a diverging run stays in its critical period.
        if previous is not None and abs(smooth - previous) < self.change * abs(previous):
            self.done = self._has_fallen(smooth)
        return self.done

    def _has_fallen(self, smooth: float) -> bool:
        if self.fall is None or self._first is None:
            return True
        return smooth <= self._first - self.fall * abs(self._first)
