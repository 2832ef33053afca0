"""Measures how busy the machine is with other things than us (section 4.1.2)."""

from __future__ import annotations

from contextlib import suppress

import psutil

__all__ = ["LoadGate"]

MIN_INTERVAL_S = 0.1
"""Shorter samples read the kernel's clock ticks, not the load."""


class LoadGate:
    """Open while the load of the rest of the machine is below a limit.

    Not counted are this process and those in `excluded`: when the training itself runs on the
    CPU, its own load would keep the gate shut for ever. Its DataLoader workers do count.

    Args:
        limit: Part of all CPUs, 0 to 1; at 1 the gate is always open.
        excluded: Process ids whose own use does not count.
    """

    def __init__(self, limit: float, excluded: tuple[int, ...] = ()) -> None:
        self._limit = limit
        self._own = [psutil.Process()]
        for pid in excluded:
            with suppress(psutil.Error):
                self._own.append(psutil.Process(pid))
        self.load = 0.0
        """Last measured load of the others, as a part of all CPUs."""
        self._total, self._others = self._sample()

    def _sample(self) -> tuple[float, float]:
        """Return CPU seconds that have passed on all CPUs, and those that others have used."""
        times = psutil.cpu_times()
        total = float(sum(times))
        # Guest time is counted in user time as well.
        total -= float(getattr(times, "guest", 0.0)) + float(getattr(times, "guest_nice", 0.0))
        busy = total - times.idle - float(getattr(times, "iowait", 0.0))
        for process in self._own:
            try:
                own = process.cpu_times()
            except psutil.Error:
                continue
            busy -= own.user + own.system
        return total, busy

    def is_open(self) -> bool:
        """Return whether the load since the last look is below the limit."""
        if self._limit >= 1:
            return True
        total, others = self._sample()
        if total - self._total >= MIN_INTERVAL_S * (psutil.cpu_count() or 1):
            self.load = max(0.0, (others - self._others) / (total - self._total))
            self._total, self._others = total, others
        return self.load < self._limit
