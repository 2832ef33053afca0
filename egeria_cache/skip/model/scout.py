"""See how a loop enters a model whose `forward` it does not call.

`model.forward_features(x)`, `model.encode_image(x)`, `model.backbone(x)`: what is called is found
when the first part of the model gets a loader's tensor. Looked for from the first batch until then,
or until the model itself is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from egeria_cache.batch import BatchTensor


class Scout:
    """Watches the parts of a model.

    Args:
        model: The model.
        found: Is told what was called: the model, or a part of it, the name of its method, and what
            a part is called with.
    """

    def __init__(self, model: nn.Module, found: Callable[..., None]) -> None:
        look = _Look(model, self._seen)
        self._found = found
        self._handles = [
            child.register_forward_pre_hook(look, with_kwargs=True) for child in model.children()
        ]

    def _seen(self, module: nn.Module, method: str, *given: Any) -> None:
        if self._handles:
            self.close()
            self._found(module, method, *given)

    def close(self) -> None:
        """Look no more; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Look:
    """A forward pre-hook; in copies and pickles of the model it does nothing."""

    def __init__(self, model: nn.Module, seen: Callable[..., None]) -> None:
        self._model, self._seen = model, seen

    def __call__(self, child: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not any(isinstance(one, BatchTensor) for one in (*args, *kwargs.values())):
            return
        frames = list(_frames_of(self._model))
        method = next((name for name in map(_method_given_a_batch, frames) if name), None)
        if method is not None:
            self._seen(self._model, method)
        elif not any(frame.f_code.co_name == "forward" for frame in frames):
            self._seen(child, "forward", args, kwargs)

    def __reduce__(self) -> Any:
        return _nothing_looked_for, ()


def _nothing_looked_for() -> Any:
    return _nothing


def _nothing(*_: Any) -> None:
    """Stand in a copy for what looked in the original."""


def _frames_of(model: nn.Module) -> Iterator[FrameType]:
    """Yield the model's own methods that are running, the outermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if names and frame.f_locals.get(names[0]) is model:
            method = inspect.getattr_static(type(model), frame.f_code.co_name, None)
            method = None if method is None else inspect.unwrap(method)
            if getattr(method, "__code__", None) is frame.f_code:
                found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    yield from reversed(found)


def _method_given_a_batch(frame: FrameType) -> str | None:
    code = frame.f_code
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    given = any(isinstance(frame.f_locals.get(name), BatchTensor) for name in names)
    return code.co_name if given and code.co_name != "forward" else None
