"""Code of the modules around the boundary that belongs to the frozen front.

BART's encoder applies dropout to its embeddings in its own `forward`, wav2vec2's drops whole layers
there: no module of the prefix does it, and yet it happens before the boundary. Such a module is in
inference mode from its entry until the boundary returns, and then in the mode that the user asked
for: only its own flag, not that of its children. It holds for every call of the module, also for
those that gradient checkpointing repeats, with and without a cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from egeria_cache.pystate import StandIn, entries, is_compiled
from egeria_cache.skip.model.calls import intercept


class ForwardSlot(StandIn):
    """A stand-in for a module's `forward`, or another method, with perhaps another beneath it."""

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module = module
        self.name = name
        self.before: Callable[..., Any] | None = module.__dict__.get(name)
        self._own: Callable[..., Any] = MethodType(getattr(type(module), name), module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What is beneath; trainers look at its signature."""
        return self._own if self.before is None else self.before

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = MethodType(getattr(type(self.module), self.name), self.module)


class AroundForward(ForwardSlot):
    """Keeps one module in inference mode from its entry until a boundary within it returns.

    An ordinary picklable attribute that refers downward only: a copy of the model, or of a part of
    it, is held like the original. `state_dict` never sees it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.boundaries: list[nn.Module] = []
        """One entry for each holder."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; a compiler that traces us sees the plain forward."""
        if torch.compiler.is_compiling() or not self.boundaries or not self.module.training:
            return self.__wrapped__(*args, **kwargs)
        frames = _frames()
        frames[:] = [frame for frame in frames if frame.is_running]  # an interrupted one is not
        watched = {i for frame in frames for i in frame.watched}
        own = {id(b): b for b in self.boundaries}
        unwatched = {i: b for i, b in own.items() if i not in watched}
        frame = _Frame(self.module, set(own), frozenset(unwatched))
        flags = self.module.__dict__
        try:
            frames.append(frame)
            flags["training"] = False
            with intercept(unwatched.values(), _leave) if unwatched else nullcontext():
                return self.__wrapped__(*args, **kwargs)
        finally:
            # No call before the flag is back: an interrupt is raised at calls.
            frame.is_running = False
            if frame.is_held:
                frame.is_held = False
                flags["training"] = True
            frames.remove(frame)


class _Frame:
    """One call of a held module that is running."""

    def __init__(self, module: nn.Module, pending: set[int], watched: frozenset[int]) -> None:
        self.module = module
        self.pending = pending
        """Ids of the boundaries that have not returned yet."""
        self.watched = watched
        """Ids of the boundaries whose calls come to us because of this frame."""
        self.is_running = self.is_held = True

    def restore(self) -> None:
        if self.is_held:
            self.is_held = False
            self.module.__dict__["training"] = True


_LOCAL = threading.local()


def _frames() -> list[_Frame]:
    frames: list[_Frame] | None = getattr(_LOCAL, "frames", None)
    if frames is None:
        frames = _LOCAL.frames = []
    return frames


def _leave(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Handle a call of a boundary: what comes after it is not frozen."""
    output = original(*args, **kwargs)
    for frame in _frames():
        frame.pending.discard(id(module))
        if not frame.pending:
            frame.restore()
    return output


def hold_around(module: nn.Module, boundary: nn.Module) -> AroundForward | None:
    """Hold the own code of `module` until `boundary`, which lies within it, returns.

    Returns None where it cannot be: in compiled code, which goes on as it is.
    """
    if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
        return None
    if all(inner is not boundary for inner in module.modules()) or module is boundary:
        return None
    if len(entries(module)) > 1:
        return None  # its `forward` is not what is called
    around = _found(module)
    if around is None:
        around = AroundForward(module)
        top = module.__dict__.get("forward")
        if isinstance(top, ForwardSlot):  # the cache sees the mode that the user asked for
            around.before, top.before = top.before, around
        else:
            module.__dict__["forward"] = around
    around.boundaries.append(boundary)
    return around


def let_go_around(module: nn.Module, around: AroundForward, boundary: nn.Module) -> None:
    """Undo one `hold_around`."""
    if all(b is not boundary for b in around.boundaries):
        return  # thawed meanwhile
    around.boundaries.remove(boundary)
    if not around.boundaries:
        _take_out(module, around)


def thaw_around(module: nn.Module) -> None:
    """Undo every `hold_around` of this module."""
    around = _found(module)
    if around is not None:
        around.boundaries.clear()
        _take_out(module, around)


def _found(module: nn.Module) -> AroundForward | None:
    top = module.__dict__.get("forward")
    if isinstance(top, ForwardSlot) and not isinstance(top, AroundForward):
        top = top.before
    return top if isinstance(top, AroundForward) else None


def _take_out(module: nn.Module, around: AroundForward) -> None:
    """Remove it from its place; where someone has wrapped it since, it stays and does nothing."""
    top = module.__dict__.get("forward")
    if top is around:
        if around.before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = around.before
    elif isinstance(top, ForwardSlot) and top.before is around:
        top.before = around.before
