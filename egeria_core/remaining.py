"""How much learning rate is left: the sum over the steps to come of a schedule.

A scheduler is asked by stepping a copy of it to the end, which has no parameters and no connection
to the real one. So whatever it is made of (warm-up, step decay, cosine, one-cycle, chains and
sequences of these), the sum is exact, and the real schedule never notices.
"""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Remaining", "Schedule", "ScheduleError", "find_length", "mean_rate", "simulate"]

log = logging.getLogger("egeria")

CLOSE = 1e-3
"""Relative difference between the rate that was foretold and the one in use that passes."""
TRIES = 8
"""How often a schedule that did something else is simulated anew."""


def mean_rate(groups: Sequence[dict[str, Any]], rates: Sequence[float] | None = None) -> float:
    """Return the learning rate of the groups, each weighed by its number of scalars.

    Args:
        groups: An optimizer's `param_groups`.
        rates: Instead of those that the groups have now.
    """
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    if rates is None:
        rates = [float(group["lr"]) for group in groups]
    total = sum(size * rate for size, rate in zip(sizes, rates, strict=True))
    return float(total / max(1, sum(sizes)))


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


@dataclass(slots=True)
class _Stand:
    """Stands for the optimizer of a copied scheduler: its groups without their parameters."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any] = field(default_factory=dict)
    _opt_called: bool = True

    def step(self) -> None:
        """Taken by nobody."""


def unwrap(scheduler: Any) -> Any:
    """Return the scheduler inside of wrappers such as Accelerate's."""
    while not isinstance(scheduler, LRScheduler | ReduceLROnPlateau) and hasattr(
        scheduler, "scheduler"
    ):
        scheduler = scheduler.scheduler
    return scheduler


def _parts(scheduler: Any) -> list[Any]:
    return list(getattr(scheduler, "_schedulers", []))


def progress_of(scheduler: Any) -> int:
    """Return how often the scheduler has been stepped."""
    own = getattr(scheduler, "last_epoch", None)
    return int(own) if own is not None else progress_of(_parts(scheduler)[0])


def find_length(scheduler: Any) -> int | None:
    """Return the number of scheduler steps after which it says that it ends; None: it does not."""
    scheduler = unwrap(scheduler)
    parts = _parts(scheduler)
    milestones = getattr(scheduler, "_milestones", None)
    if parts and milestones:
        last = find_length(parts[-1])
        return None if last is None else int(milestones[-1]) + last
    if parts:
        return max((n for n in map(find_length, parts) if n is not None), default=None)
    kind = type(scheduler).__name__
    names = {
        "OneCycleLR": "total_steps",
        "CosineAnnealingLR": "T_max",
        "PolynomialLR": "total_iters",
    }
    return int(getattr(scheduler, names[kind])) if kind in names else None


def simulate(scheduler: Any, count: int) -> list[float]:
    """Return the mean learning rates of now and of the next `count - 1` scheduler steps.

    Raises:
        ScheduleError: It depends on what training brings, or cannot be copied.
    """
    scheduler = unwrap(scheduler)
    if isinstance(scheduler, ReduceLROnPlateau) or not callable(getattr(scheduler, "step", None)):
        raise ScheduleError(f"{type(scheduler).__name__} follows no schedule")
    groups = _optimizer_of(scheduler).param_groups
    sizes = [{"params": [_Size(sum(p.numel() for p in group["params"]))]} for group in groups]
    stand = _Stand([{k: _value(v) for k, v in group.items() if k != "params"} for group in groups])
    memo: dict[int, Any] = {id(_optimizer_of(s)): stand for s in _family(scheduler)}
    for part in _family(scheduler):
        for function in getattr(part, "lr_lambdas", []):
            # A method would bring its object along, which may hold anything.
            memo[id(function)] = function
    try:
        twin = copy.deepcopy(scheduler, memo)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(count - 1):
                found.append(_rate(stand, sizes))
                twin.step()
        found.append(_rate(stand, sizes))
    except ScheduleError:
        raise
    except ValueError:
        # OneCycleLR past its end: what is left is nothing.
        found.extend([0.0] * (count - len(found)))
    except Exception as error:
        raise ScheduleError(f"{type(scheduler).__name__} cannot be copied ({error})") from error
    return found


class _Size:
    """Number of scalars in a group."""

    def __init__(self, count: int) -> None:
        self._count = count

    def numel(self) -> int:
        return self._count


def _rate(stand: _Stand, sizes: list[dict[str, Any]]) -> float:
    return mean_rate(sizes, [float(group["lr"]) for group in stand.param_groups])


def _value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _optimizer_of(scheduler: Any) -> Any:
    own = getattr(scheduler, "optimizer", None)
    return own if own is not None else _optimizer_of(_parts(scheduler)[0])


def _family(scheduler: Any) -> list[Any]:
    """Return the scheduler and all that it is made of."""
    return [scheduler, *itertools.chain.from_iterable(map(_family, _parts(scheduler)))]


class Schedule:
    """The learning rates of a run, as far as they can be known.

    Args:
        source: A torch scheduler, stepped once per optimizer step or once per epoch (which of the
            two is observed); a function of the optimizer step, counted from 0, that gives the rate;
            or None.
        total_steps: Optimizer steps in the whole schedule; None where the source knows its end.
    """

    def __init__(
        self, source: LRScheduler | Callable[[int], float] | None, total_steps: int | None
    ) -> None:
        self._function: Callable[[int], float] | None = None
        self._scheduler: Any = None
        if source is not None and callable(getattr(unwrap(source), "step", None)):
            self._scheduler = unwrap(source)
        elif callable(source):
            self._function = source
        elif source is not None:
            raise TypeError(
                f"schedule must be a torch scheduler or a function of the step that returns the "
                f"learning rate, got {type(source).__name__}"
            )
        self._total = total_steps
        self._first: int | None = None
        self._changes: list[tuple[int, int]] = []
        self._rates: list[float] = []
        self._left: list[float] = []
        self._highest: list[float] = []
        self._start = 0
        self._forecast_pace: Fraction | None = None
        self._known_pace: tuple[list[tuple[int, int]], Fraction | None] | None = None
        self._tries = 0
        self._refused = False
        if self._scheduler is not None:
            self._first = progress_of(self._scheduler)

    @property
    def has_end(self) -> bool:
        """Whether it is known, or will be, how many steps there are."""
        return self._total is not None or (
            self._scheduler is not None and find_length(self._scheduler) is not None
        )

    def look(self, step: int) -> None:
        """Note after each optimizer step how far the scheduler has come."""
        if self._scheduler is None or self._first is None:
            return
        now = progress_of(self._scheduler)
        if now != (self._changes[-1][1] if self._changes else self._first):
            self._changes = [*self._changes[:1], (step, now)]

    def _pace(self) -> Fraction | None:
        """Return scheduler steps per optimizer step; None: none was seen yet."""
        if self._known_pace is None or self._known_pace[0] != self._changes:
            self._known_pace = (self._changes, self._find_pace())
        return self._known_pace[1]

    def _find_pace(self) -> Fraction | None:
        if not self._changes or self._first is None:
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
        if self._refused or (self._scheduler is None and self._function is None):
            return self._without_rates(step)
        pace = Fraction(1) if self._function is not None else self._pace()
        total = None if pace is None else self._length(pace)
        if pace is None or total is None:
            return None
        if step >= total:
            return Remaining(0, 0.0)
        try:
            if not self._rates or pace != self._forecast_pace or not self._agrees(step, rate):
                self._forecast(step, total, pace)
        except ScheduleError as error:
            self._refuse(str(error))
            return self._without_rates(step)
        done = step - self._start
        return Remaining(total - step, self._left[done], self._highest[done])

    def _without_rates(self, step: int) -> Remaining | None:
        return None if self._total is None else Remaining(max(0, self._total - step), None)

    def _length(self, pace: Fraction) -> int | None:
        if self._total is not None:
            return self._total
        length = find_length(self._scheduler)
        return None if length is None else round((length - (self._first or 0)) / pace)

    def _forecast(self, step: int, total: int, pace: Fraction) -> None:
        """Sum the rates of the steps from here to the end."""
        if self._tries >= TRIES:
            raise ScheduleError("the rates in use are others than those of the schedule given")
        self._tries += 1
        self._start, self._forecast_pace = step, pace
        if self._function is not None:
            rates = [float(self._function(n)) for n in range(step, total)]
        else:
            # Step n, counted from 0, has the rate of the scheduler's step floor(n pace), whether it
            # is stepped before the controller or after it.
            now = progress_of(self._scheduler) - (self._first or 0)
            places = [
                max(0, n * pace.numerator // pace.denominator - now) for n in range(step, total)
            ]
            known = simulate(self._scheduler, places[-1] + 1)
            rates = [known[place] for place in places]
        # Summed from the end, so that a forecast made later says the same to the bit.
        self._left = [*itertools.accumulate(reversed(rates), initial=0.0)][::-1]
        self._rates = rates
        self._highest = [*itertools.accumulate(reversed(rates), max)][::-1]

    def _agrees(self, step: int, rate: float) -> bool:
        """Compare with the rate of the last step; one step to either side is no difference."""
        last = step - 1 - self._start
        near = self._rates[max(0, last - 1) : last + 2]
        if last < 1 or not near:
            return True
        slack = CLOSE * max(abs(rate), *near)
        return min(near) - slack <= rate <= max(near) + slack

    def _refuse(self, why: str) -> None:
        self._refused = True
        log.warning(
            "egeria: the learning rates to come cannot be foretold: %s; they are taken to stay, or "
            "to go on falling, as they have lately",
            why,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was observed; the forecast is made again."""
        return {
            "first": self._first,
            "changes": [list(change) for change in self._changes],
            "refused": self._refused,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the scheduler's own state may be loaded before or after."""
        self._first = state["first"]
        self._changes = [(step, at) for step, at in state["changes"]]
        self._refused = state["refused"]
        self._rates = []
