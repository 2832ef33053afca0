"""See how loops enter a model, and what they call its parts.

Modules are named as a wrapped model and the model inside of it have them. `Scout` finds the method
that is called in place of `forward` (`model.encode_image(x)`, `model.backbone(x)`), when the first
part of the model gets a loader's tensor.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from egeria_cache.attempt import Attempt
from egeria_cache.batch import BatchTensor
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.model.calls import same

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Attributes under which wrappers (of PyTorch, Lightning, Accelerate) keep what they wrap."""


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


def _without_wrappers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part not in _WRAPPERS)


def inner_model(model: nn.Module) -> nn.Module:
    """Look through wrappers that call the model as it is."""
    names = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
    while (name := names.get(type(model).__name__)) is not None:
        model = model.get_submodule(name)
    return model


class Scout:
    """Watches the parts of a model; as their hook, it is nothing in copies of the model.

    Args:
        model: The model.
        found: Is told once what was called: the model, or a part of it, the name of its method, and
            what that is called with.
    """

    def __init__(self, model: nn.Module, found: Callable[..., None]) -> None:
        self._model, self._found = model, found
        self._handles: list[Any] = []
        self.is_done = False
        """Whether it is known what the loop calls."""

    def look_out(self) -> None:
        """A batch is given out, with which the model is called in some way."""
        if not (self.is_done or self._handles):
            # One that is scripted can have no hooks.
            parts = (p for p in self._model.children() if not isinstance(p, torch.jit.ScriptModule))
            self._handles = [p.register_forward_pre_hook(self, with_kwargs=True) for p in parts]

    def close(self) -> None:
        """Look no more; may be called twice."""
        self.is_done = True
        while self._handles:
            self._handles.pop().remove()

    def __call__(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part of the model is called."""
        given = (*args, *kwargs.values())
        if self.is_done or torch.compiler.is_compiling() or not _have_batch(given):
            return
        with Attempt():
            called = list(_called_of(self._model))
            for name, of_method in called:
                if not self.is_done and name != "forward" and _have_batch(of_method.values()):
                    self.close()
                    self._found(self._model, name, (), of_method)
            if not self.is_done and all(name != "forward" for name, _ in called):
                self.close()
                self._found(part, "forward", args, kwargs)

    def __reduce__(self) -> Any:
        return same, (_nothing,)


def _nothing(*_: Any) -> None:
    """Stand in a copy for what looks in the original."""


def _called_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the model's own methods that are running, with their arguments, outermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code, local = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_argcount and local.get(names[0]) is model:
            method = inspect.getattr_static(type(model), code.co_name, None)
            method = None if method is None else inspect.unwrap(method)
            if getattr(method, "__code__", None) is code:
                given = {name: local[name] for name in names[1:] if name in local}
                found.append((code.co_name, given))
        frame = frame.f_back  # type: ignore[assignment]
    yield from reversed(found)


def _have_batch(values: Iterable[Any]) -> bool:
    return any(isinstance(value, BatchTensor) for value in values)


def ordinary_arguments(model: nn.Module, batch: Any) -> list[Any]:
    """Return the arguments by place with which a loop would call a model: of a list or tuple the
    first parts, as many as the forward requires; anything else is the only one.
    """
    if not isinstance(batch, tuple | list):
        return [batch]
    # Of the class: the instance's forward may be wrapped while a cache is attached.
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD  # or by that alone
    required = sum(one.default is one.empty for one in parameters if one.kind <= by_place)
    return list(batch[: max(1, required)])
