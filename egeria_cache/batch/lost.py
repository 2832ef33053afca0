"""The first operation on a new batch after which its rows are no longer known: for explanations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from egeria_cache.batch.structure import is_rows

_LOCAL = threading.local()


def note_lost(func: Callable[..., Any], leaf: str, result: Any) -> None:
    """Note that `func` took a leaf of a batch and gave an ordinary tensor."""
    parts = result if isinstance(result, tuple | list) else (result,)
    if _seen("lost") is None and any(isinstance(part, Tensor) for part in parts):
        name = getattr(func, "__name__", str(func))
        of = f"of the leaf {leaf!r}" if leaf else "of the batch"
        _LOCAL.lost = f"the rows were lost in {name!r} {of}"


def forget_lost(leaves: Mapping[str, Any] = MappingProxyType({}), size: int = 0) -> None:
    """Another batch is given out in this thread, of so many samples."""
    _LOCAL.lost = _LOCAL.has_none = None
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and not is_rows(leaf, size):
            _LOCAL.has_none = (
                f"the batch's leaf {path!r}, of shape {list(leaf.shape)}, has no row for each of "
                f"its {size} samples; stack samples in the collate_fn"
            )
            return


def lost_by() -> str | None:
    """Say where the rows of the last batch were lost, or why it has none; None if they were not."""
    return _seen("lost") or _seen("has_none")


def _seen(name: str) -> str | None:
    found: str | None = getattr(_LOCAL, name, None)
    return found
