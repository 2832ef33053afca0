"""What a move saves over the steps that are left, for a policy to weigh; how long a run goes on.

Both are counted in steps and nothing is timed, so that runs and ranks answer alike.

The learning rate that is left is summed over the steps to come: a scheduler is asked by stepping a
copy of it to the end, which has no parameters and no connection to the real one. So whatever it is
made of (warm-up, step decay, cosine, one-cycle, chains and sequences of these), the sum is exact,
and the real schedule never notices.
"""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from egeria_core.rules import MeanRate, Remembered

log = logging.getLogger("egeria")

BACKWARD_SHARE = 2 / 3
"""A backward computes two products for each one of the forward."""
CLOSE = 1e-3
"""Relative difference between the rate that was foretold and the one in use that passes."""
TRIES = 8
"""How often a schedule that did something else is simulated anew."""
LENGTHS = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max", "PolynomialLR": "total_iters"}
"""The schedulers that say where they end, and how they call it."""


def saved_parts(parts: Sequence[float] | None, sizes: Sequence[int]) -> list[float]:
    """Return, for k = 0 to L - 1, the part of a step that freezing the first k layers saves.

    Their backward; a cache that spares their forward as well is not counted on.

    Args:
        parts: Part of the forward's arithmetic in front of each boundary. None: it is taken to go
            with the number of parameters.
        sizes: Parameters of each layer.
    """
    if parts is None:
        parts = [size / max(1, sum(sizes)) for size in itertools.accumulate(sizes)]
    return [*itertools.accumulate((BACKWARD_SHARE * part for part in parts[:-1]), max, initial=0.0)]


class ScheduleError(Exception):
    """This schedule cannot be foretold."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a schedule."""

    steps: int
    """Optimizer steps."""
    rate: float | None
    """Sum of their learning rates; None: not known, only how many steps there are."""
    highest: float = 0.0
    """Of these rates."""


def unwrap(scheduler: Any) -> Any:
    """Return the scheduler inside of wrappers such as Accelerate's."""
    while not isinstance(scheduler, LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def _family(scheduler: Any) -> list[Any]:
    """Return the scheduler and all that it is made of."""
    parts = map(_family, getattr(scheduler, "_schedulers", []))
    return [scheduler, *itertools.chain.from_iterable(parts)]


def _first_of(scheduler: Any, attribute: str) -> Any:
    """Return what the scheduler, or the first of its parts that does, knows by this name."""
    found = (getattr(part, attribute, None) for part in _family(scheduler))
    return next(value for value in found if value is not None)


def find_length(scheduler: Any) -> int | None:
    """Return the number of scheduler steps after which it says that it ends; None: it does not."""
    parts = getattr(scheduler, "_schedulers", [])
    milestones = getattr(scheduler, "_milestones", None)
    if parts and milestones:
        last = find_length(parts[-1])
        return None if last is None else int(milestones[-1]) + last
    if parts:
        return max((n for n in map(find_length, parts) if n is not None), default=None)
    name = LENGTHS.get(type(scheduler).__name__)
    return None if name is None else int(getattr(scheduler, name))


def simulate(scheduler: Any, count: int) -> list[float]:
    """Return the mean learning rates of now and of the next `count - 1` scheduler steps.

    Raises:
        ScheduleError: It depends on what training brings, or cannot be copied.
    """
    mean = MeanRate(_first_of(scheduler, "optimizer"))
    found: list[float] = []
    try:
        twin, groups = _copied(scheduler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(mean(groups))
            while len(found) < count:
                twin.step()
                found.append(mean(groups))
    except ValueError:
        # OneCycleLR past its end: what is left is nothing.
        found += [0.0] * (count - len(found))
    except Exception as error:
        what = type(scheduler).__name__
        raise ScheduleError(f"no copy of {what} can be stepped to the end ({error})") from error
    return found


def _copied(scheduler: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return a copy of a scheduler, and the groups of the optimizer that it takes for its own."""

    def value(given: Any) -> Any:
        return given.detach().clone() if isinstance(given, Tensor) else copy.copy(given)

    real = _first_of(scheduler, "optimizer").param_groups
    groups = [{k: value(v) for k, v in group.items() if k != "params"} for group in real]
    stand = SimpleNamespace(param_groups=groups, defaults={}, _opt_called=True, step=lambda *_: 0)
    memo: dict[int, Any] = {}
    for part in _family(scheduler):
        if hasattr(part, "optimizer"):
            memo[id(part.optimizer)] = stand
        # A method would bring its object along, which may hold anything.
        memo.update({id(function): function for function in getattr(part, "lr_lambdas", [])})
    return copy.deepcopy(scheduler, memo), groups


class Schedule(Remembered):
    """The learning rates of a run, as far as they can be known.

    Args:
        source: A torch scheduler, stepped once per optimizer step or once per epoch (which of the
            two is observed); a function of the optimizer step, counted from 0, that gives the rate;
            or None.
        total_steps: Optimizer steps in the whole schedule; None where the source knows its end.
    """

    remembers = ("_first", "_changes", "_refused")

    def __init__(
        self, source: LRScheduler | Callable[[int], float] | None, total_steps: int | None
    ) -> None:
        inner = unwrap(source)
        self._scheduler: Any = inner if callable(getattr(inner, "step", None)) else None
        self._function = source if self._scheduler is None else None
        if self._function is not None and not callable(self._function):
            raise TypeError(
                f"schedule must be a torch scheduler or a function of the step that returns the "
                f"learning rate, got {type(source).__name__}"
            )
        self._total = total_steps
        self._refused = source is None
        self._first = 0 if self._scheduler is None else self._progress()
        self._changes: list[list[int]] = []
        """Of the scheduler's own count: the first that was seen, and the last."""
        self._rates: list[float] = []
        self._start, self._pace, self._tries = 0, Fraction(0), 0

    def _progress(self) -> int:
        """How often the scheduler has been stepped."""
        return int(_first_of(self._scheduler, "last_epoch"))

    @property
    def has_end(self) -> bool:
        """Whether it is known, or will be, how many steps there are."""
        return self._total is not None or find_length(self._scheduler) is not None

    def look(self, step: int) -> None:
        """Note after each optimizer step how far the scheduler has come."""
        if self._scheduler is None:
            return
        now = self._progress()
        if now != (self._changes[-1][1] if self._changes else self._first):
            self._changes = [*self._changes[:1], [step, now]]

    def _find_pace(self) -> Fraction | None:
        """Return scheduler steps per optimizer step; None: none was seen yet."""
        if self._scheduler is None:
            return Fraction(1)
        if not self._changes:
            return None
        (first, at_first), (last, at_last) = self._changes[0], self._changes[-1]
        if last > first:
            pace = Fraction(at_last - at_first, last - first)
        elif last > 3:
            pace = Fraction(at_last - self._first, last)
        else:  # its first step or its second: that depends on who is called first
            return None
        # Whole epochs, or whole steps of several processes.
        return Fraction(1, round(1 / pace)) if pace < 1 else Fraction(round(pace))

    def remaining(self, step: int, rate: float) -> Remaining | None:
        """Return what is left after `step` finished optimizer steps; None: not known yet.

        Args:
            step: Finished steps.
            rate: The mean rate of the last one, with which the forecast is checked.
        """
        pace, total = self._find_pace(), self._total
        if pace is not None and total is None:
            length = find_length(self._scheduler)
            total = None if length is None else round((length - self._first) / pace)
        if pace is None or total is None:
            return None
        left, done = max(0, total - step), step - self._start
        if left == 0:
            return Remaining(0, 0.0)
        try:
            if not self._refused and (pace != self._pace or not self._agrees(done, rate)):
                self._forecast(step, total, pace)
                done = 0
        except ScheduleError as error:
            self._refused = True
            log.warning(
                "egeria: the learning rates to come cannot be foretold: %s; they are taken to "
                "stay as they are",
                error,
            )
        if self._refused:
            return Remaining(left, None)
        return Remaining(left, self._left[done], self._highest[done])

    def _forecast(self, step: int, total: int, pace: Fraction) -> None:
        """Sum the rates of the steps from here to the end."""
        if self._tries >= TRIES:
            raise ScheduleError("the rates in use are others than those of the schedule given")
        self._tries += 1
        self._start, self._pace = step, pace
        if self._function is not None:
            self._rates = [float(self._function(n)) for n in range(step, total)]  # type: ignore[operator]
        else:
            # Step n, counted from 0, has the rate of the scheduler's step floor(n pace), whether it
            # is stepped before the controller or after it.
            now = self._progress() - self._first
            places = [max(0, int(n * pace) - now) for n in range(step, total)]
            known = simulate(self._scheduler, places[-1] + 1)
            self._rates = [known[place] for place in places]
        # Summed from the end, so that a forecast made later says the same to the bit.
        back = self._rates[::-1]
        self._left = [*itertools.accumulate(back, initial=0.0)][::-1]
        self._highest = [*itertools.accumulate(back, max)][::-1]

    def _agrees(self, done: int, rate: float) -> bool:
        """Compare with the rate of the last step; one step to either side is no difference."""
        near = self._rates[max(0, done - 2) : done + 1]
        if done < 2:
            return True
        slack = CLOSE * max(abs(rate), *near)
        return min(near) - slack <= rate <= max(near) + slack
