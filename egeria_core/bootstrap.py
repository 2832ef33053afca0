"""The bootstrapping stage: no layer may freeze while the loss still falls fast (section 3).

Networks have a critical period at the start of training; what is frozen then stays bad.
"""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Bootstrap"]


class Bootstrap:
    """Ends when the smoothed training loss changes by less than `change` between two looks.

    Args:
        change: Relative change that ends the stage; the paper's "permissively set" 10 %.
        smoothing: Looks averaged into one value. Single batches differ by more than 10 % from
            each other at any stage of training, in either direction.
    """

    def __init__(self, change: float = 0.1, smoothing: int = 3) -> None:
        if change <= 0 or smoothing < 1:
            raise ValueError(f"change and smoothing must be positive, got {change}, {smoothing}")
        self.change = change
        self.done = False
        self._recent: deque[float] = deque(maxlen=smoothing)
        self._previous: float | None = None

    def observe(self, loss: float) -> bool:
        """Take the mean loss since the last look; return whether the stage is over."""
        if self.done:
            return True
        self._recent.append(loss)
        if len(self._recent) < (self._recent.maxlen or 1):
            return False
        smooth = sum(self._recent) / len(self._recent)
        previous, self._previous = self._previous, smooth
        # NaN and infinity compare false: a diverging run stays in its critical period.
        if previous is not None and abs(smooth - previous) < self.change * abs(previous):
            self.done = True
        return self.done

    def state_dict(self) -> dict[str, Any]:
        """Return the stage and the recent losses."""
        return {"done": self.done, "recent": list(self._recent), "previous": self._previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.done, self._previous = state["done"], state["previous"]
        self._recent.clear()
        self._recent.extend(state["recent"])
