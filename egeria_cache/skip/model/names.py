"""Names of modules, as a wrapped model and the model inside of it have them; where it is called."""

from __future__ import annotations

import os
import sys

from torch import nn

from egeria_cache.errors import BoundaryError

__all__ = ["module_named", "user_line"]

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Attributes under which wrappers (of PyTorch, Lightning, Accelerate) keep what they wrap."""
_NOT_USERS = ("torch.", "egeria_cache.")


def module_named(model: nn.Module, name: str) -> str:
    """Return the qualified name that `model` has for a module.

    Args:
        model: The model, without its wrappers.
        name: Of one of its modules, perhaps as a wrapper of it, or a compiled block, names it.

    Raises:
        BoundaryError: It has no such module.
    """
    known: list[str] = [other for other, _ in model.named_modules() if other]
    if name in known:
        return name
    wanted = _without_wrappers(name)
    for other in known:
        if wanted and _without_wrappers(other) == wanted:
            return other
    raise BoundaryError.unknown(name, known)


def user_line() -> str:
    """Name the line of the user's that is running: neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_USERS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


def _without_wrappers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part not in _WRAPPERS)
