"""Names of modules and classes that two runs agree on."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

LIBRARIES = tuple({sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")})
"""Folders of what is installed."""

_MAIN = ("__main__", "__mp_main__")
"""The script that runs, and the same in a process that it has spawned."""


Result = TypeVar("Result")


def once_per_class(function: Callable[[type], Result]) -> Callable[[type], Result]:
    """Remember what a function says of a class, which cannot change: the same few are asked for
    again and again.
    """
    return lru_cache(1024)(function)


def home(module: str) -> str:
    """Return the name of a Python module; of the script that runs, what importing it would give.

    So what `python train.py` stores is found by whoever imports `train`, and the other way round.
    """
    main = sys.modules.get(module) if module in _MAIN else None
    if main is None:
        return module
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return module if file is None else Path(file).stem


@once_per_class
def kind_name(kind: type) -> str:
    """Return the qualified name of a class; of one that `fully_shard` has made, what it was."""
    if kind.__module__.startswith("torch.distributed.fsdp") and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return f"{home(kind.__module__)}.{kind.__qualname__}"


@once_per_class
def is_installed(kind: type) -> bool:
    """Whether a class comes with Python or a library."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file.startswith(LIBRARIES)
