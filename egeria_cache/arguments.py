"""What arguments may be: choices by name, and a word for a name that is misspelt."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, ParamSpec, TypeVar, get_args

Codec = Literal["auto", "raw", "zstd", "split+zstd", "bitmap+split"]
"""How records are compressed: docs/format.md."""
StorageDtype = Literal["float16", "bfloat16", "int8"]
"""Lossy number formats on disk."""
Gate = Literal["auto", "always", "never"]
"""When batches are served from the cache."""
Padding = Literal["proved", "unread"]
"""How it is known that a loop reads no padding of the model's output."""

GONE = {
    "batch_dim": "samples come first",
    "calibration": "a layer's first three readings set its tolerance",
    "cpu_load_limit": "the evaluator process takes what others leave of the CPUs",
    "dropout": "dropout layers of a frozen front pass their input on",
    "evaluator_threads": "the evaluator process has a quarter of the CPUs",
    "probe_rows": "32 samples of a batch are compared",
    "ragged": "what leaves are padded with is found out",
    "refresh_every": "it is refreshed at every evaluation, or every W where it quantises",
    "tensorboard_dir": "functions in controller.history.listeners get every record",
    "train_output": "both sides of a reading are run in inference mode",
    "verify": "every read of a stored sample is verified",
}
"""Options that do nothing any more, and why. They are accepted for one release."""

P = ParamSpec("P")
T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'gate'?" for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: object, kind: Any) -> None:
    """Check an argument against the strings of a `Literal`.

    Raises:
        ValueError: It is none of them.
    """
    known: tuple[str, ...] = get_args(kind)
    if value not in known:
        *first, last = map(repr, known)
        near = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}{near}")


def check_fraction(name: str, value: object) -> None:
    """Check that an argument is a number between 0 and 1.

    Raises:
        TypeError: It is no number.
        ValueError: It is outside.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number in [0, 1], got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def check_whole_number(name: str, value: object, least: int = 1) -> None:
    """Check that an argument is a whole number, and no less than `least`.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value.__index__() < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def names_known(call: Callable[P, T]) -> Callable[P, T]:
    """Have a function name the nearest of its options where one is misspelt."""
    known = list(inspect.signature(call).parameters)

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in [name for name in kwargs if name not in known]:
            of = call.__qualname__.removesuffix(".__init__")
            if name in GONE:
                del kwargs[name]
                what = f"{of}: {name}= does nothing any more: {GONE[name]}"
                warnings.warn(what, FutureWarning, stacklevel=2)
            else:
                near = did_you_mean(name, known)
                raise TypeError(f"{of} has no option {name!r}{near}")
        return call(*args, **kwargs)

    return checked
