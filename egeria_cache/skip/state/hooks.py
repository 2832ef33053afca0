"""Hooks of the user on modules of the prefix: they read features, count, or edit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch.nn.modules.module as registry
from torch import nn

from egeria_cache.pystate import is_library
from egeria_cache.skip.model.fsdp import is_fsdps

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = registry._global_forward_hooks, registry._global_forward_pre_hooks
"""Those that PyTorch calls for every module."""


def hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the forward hooks of these modules, and those that PyTorch calls for every module."""
    return [*global_hooks(), *chain.from_iterable(map(own_hooks, modules))]


def own_hooks(module: nn.Module) -> list[Any]:
    """Return the forward hooks of one module, but FSDP's."""
    hooks = (hook for slot in HOOKS for hook in vars(module)[slot].values())
    return [hook for hook in hooks if not is_fsdps(hook)]


def global_hooks() -> list[Any]:
    """Return those that PyTorch calls for every module, but its own, which look on."""
    hooks = (hook for hooks in GLOBAL_HOOKS for hook in hooks.values())
    return [hook for hook in hooks if not is_library(getattr(hook, "__module__", ""))]


def has_user_hooks(module: nn.Module) -> bool:
    """Whether calls of this module fire hooks that are no library's own, nor ours."""
    return any(map(_is_users, own_hooks(module)))


def has_user_hooks_inside(module: nn.Module) -> bool:
    """Whether one below it has such hooks: they fire only if the module runs."""
    return any(has_user_hooks(m) for m in module.modules() if m is not module)


def hook_of_training(module: nn.Module) -> str | None:
    """Return the name of a forward hook whose code asks whether the module trains.

    What it does in training alone (NEFTune's noise) would be off in a module held in inference
    mode. PyTorch's own hooks are meant for both modes.
    """
    for hook in own_hooks(module):
        function = _bare(hook)
        if not isinstance(function, FunctionType | MethodType):
            function = vars(type(function)).get("__call__")
        if _asks_for_training(function):
            return str(getattr(function, "__qualname__", function))
    return None


def _asks_for_training(function: Any, depth: int = 2) -> bool:
    """Whether its code does, or that of a function that it names."""
    code = getattr(function, "__code__", None)
    is_torchs = (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"
    if code is None or is_torchs or not isinstance(function, FunctionType | MethodType):
        return False
    if "training" in code.co_names:
        return True
    with suppress(ValueError):  # what it closes over is not there yet
        named = inspect.getclosurevars(function)
        helpers = (*named.nonlocals.values(), *named.globals.values()) if depth else ()
        return any(_asks_for_training(one, depth - 1) for one in helpers)
    return False


def _bare(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _is_users(hook: Any) -> bool:
    hook = _bare(hook)
    owner = getattr(hook, "__self__", None)
    kind = type(owner) if owner is not None else hook if hasattr(hook, "__code__") else type(hook)
    return not is_library(getattr(kind, "__module__", None))
