"""Hooks of the user on modules of the prefix: they read features, count, or edit."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from egeria_cache.skip.state.foreign import is_library

__all__ = ["has_user_hooks", "has_user_hooks_inside"]

_SLOTS = ("_forward_hooks", "_forward_pre_hooks")


def has_user_hooks(module: nn.Module) -> bool:
    """Whether calls of this module fire hooks that are no library's own, nor ours."""
    return any(_is_users(hook) for slot in _SLOTS for hook in getattr(module, slot).values())


def has_user_hooks_inside(module: nn.Module) -> bool:
    """Whether one below it has such hooks: they fire only if the module runs."""
    return any(has_user_hooks(m) for m in module.modules() if m is not module)


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    kind = type(owner) if owner is not None else hook if hasattr(hook, "__code__") else type(hook)
    return not is_library(getattr(kind, "__module__", None))
