"""What two ways of doing the same take, measured in turns on a machine that does other things, too.

What else runs slows both alike for a while, so the quotient of neighbours says more than either
time. The median of quotients has an interval that needs no assumption about their distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Share", "falling"]

_SIGMAS = 1.96


@dataclass(frozen=True, slots=True)
class Share:
    """A quotient of two times, and how well it is known."""

    value: float
    """The median of the quotients."""
    error: float
    """Half of the width of its 95 % interval; infinite for less than six quotients."""

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Share:
        """Return that of neighbours in time; both sequences are equally long and not empty."""
        quotients = sorted(a / max(b, 1e-12) for a, b in zip(numerators, denominators, strict=True))
        count, value = len(quotients), statistics.median(quotients)
        # Ranks between which the median of the distribution lies in 19 of 20 samples.
        reach = _SIGMAS * math.sqrt(count) / 2
        low, high = math.floor(count / 2 - reach) - 1, math.ceil(count / 2 + reach)
        if low < 0 or high >= count:
            return cls(value, math.inf if count < 6 else (quotients[-1] - quotients[0]) / 2)
        return cls(value, (quotients[high] - quotients[low]) / 2)


def falling(shares: Sequence[Share]) -> list[Share]:
    """Return the shares as a sequence that never rises, where their errors allow it.

    Neighbours in the wrong order are pooled, weighted by their precision (isotonic regression). A
    pool whose mean lies outside the interval of one of its members is left as it was measured: then
    the rise is real.
    """
    pools: list[list[Share]] = []
    for share in shares:
        pools.append([share])
        while len(pools) > 1 and _mean(pools[-2]) < _mean(pools[-1]):
            last = pools.pop()
            pools[-1] = pools[-1] + last
    result: list[Share] = []
    for pool in pools:
        mean = _mean(pool)
        agrees = all(abs(share.value - mean) <= share.error for share in pool)
        result += [Share(mean, share.error) for share in pool] if agrees else pool
    return result


def _mean(pool: Sequence[Share]) -> float:
    weights = [1 / max(min(share.error, 1e3), 1e-6) ** 2 for share in pool]
    total = sum(weight * share.value for weight, share in zip(weights, pool, strict=True))
    return total / sum(weights)
