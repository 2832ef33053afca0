"""Times of things that are run in turns, so that a busy machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from egeria_cache.device import runs_late, synchronize

__all__ = ["Round", "Times", "Turns", "in_turns", "percentiles_ms", "seconds"]

Round = Mapping[str, Callable[[], object]]
CPU = torch.device("cpu")


class Times(dict[str, list[float]]):
    """Name -> seconds, round by round."""

    def median(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self[name])

    def ratio(self, of: str, to: str) -> float:
        """Return the median over the rounds of one's time to another's of the same round."""
        return statistics.median(a / b for a, b in zip(self[of], self[to], strict=True))

    def difference(self, of: str, to: str) -> float:
        """Return the median over the rounds of what one takes longer than another."""
        return statistics.median(a - b for a, b in zip(self[of], self[to], strict=True))


class Turns(NamedTuple):
    """What `in_turns` measured."""

    wall: Times
    work: Times
    """Processor seconds of all threads, which a busy machine hardly changes."""


def in_turns(rounds: Iterable[Round], *, warm_up: int = 0, device: torch.device = CPU) -> Turns:
    """Run what each round has, forwards in one and backwards in the next.

    Args:
        rounds: What to run, by name: `itertools.repeat(uses, times)`, or a generator that prepares
            each round and clears up after it; that time is not counted.
        warm_up: So many rounds at the beginning are not counted either.
        device: Is waited for before and after each run.
    """
    turns = Turns(Times(), Times())
    for number, uses in enumerate(rounds):
        found = {
            name: _spent(uses[name], device) for name in list(uses)[:: 1 if number % 2 else -1]
        }
        for name in uses if number >= warm_up else ():
            for times, spent in zip(turns, found[name], strict=True):
                times.setdefault(name, []).append(spent)
    return turns


def seconds(use: Callable[[], object], device: torch.device = CPU) -> float:
    """Return how long one call takes, until the device is done."""
    return _spent(use, device)[0]


def _spent(use: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if runs_late(device):
        synchronize()
    worked, started = time.process_time(), time.perf_counter()
    result = use()
    if runs_late(device):
        synchronize()
    spent = time.perf_counter() - started, time.process_time() - worked
    del result  # not earlier: letting go of it is not what is measured
    return spent


def percentiles_ms(times: Sequence[float]) -> dict[str, float]:
    """Return the median, the slowest tenth's and hundredth's bound, and the largest."""
    found = np.percentile(times, (50, 90, 99, 100)) * 1e3
    return dict(zip(("p50", "p90", "p99", "max"), found.round(4).tolist(), strict=True))
