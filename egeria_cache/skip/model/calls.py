"""See, or take over, the calls of some modules while one forward of the model runs.

Nothing stays on the model between two forwards: `state_dict`, `copy.deepcopy`, pickling and
`torch.compile` never meet us. Rejected: hooks on every module (each call pays for them, and a hook
cannot keep the module from running).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import nn

Handler = Callable[..., Any]
"""handler(module, original, *args, **kwargs) -> the module's output"""

_MISSING = object()


@contextmanager
def intercept(modules: Iterable[nn.Module], handler: Handler) -> Iterator[None]:
    """Route this thread's calls of `modules` through `handler` until the block ends."""
    replaced: _Replaced = []
    thread = get_ident()
    try:
        _active().append(replaced)
        for module in modules:
            own = module.__dict__
            key = "forward" if own.get("_compiled_call_impl") is None else "_compiled_call_impl"
            before = own.get(key, _MISSING)
            original = module.forward if before is _MISSING else before
            replaced.append((own, key, before))
            own[key] = functools.partial(_route, thread, handler, module, original)
        yield
    finally:
        _put_back(replaced)


def depth() -> int:
    """Return how many blocks of `intercept` this thread is in."""
    return len(_active())


def heal(depth: int) -> None:
    """Undo what blocks of `intercept` beyond so many have left, whatever has ended them.

    An interrupt (Ctrl-C) is raised between any two calls, also in the middle of a clean-up; who
    then goes on in the same process would compute with modules that are still taken over.
    """
    active = _active()
    if len(active) > depth:
        _put_back(active[depth])


_Replaced = list[tuple[dict[str, Any], str, Any]]
_LOCAL = threading.local()


def _active() -> list[_Replaced]:
    """Return what the blocks that are running in this thread have replaced, outermost first."""
    active: list[_Replaced] | None = getattr(_LOCAL, "active", None)
    if active is None:
        active = _LOCAL.active = []
    return active


def _put_back(replaced: _Replaced) -> None:
    """Undo this block, and first the blocks within it whose own undoing was interrupted.

    One of those, undone later, would put back what this block had put there.
    """
    active = _active()
    begin = len(active)
    for place, one in enumerate(active):
        if one is replaced:
            begin = place
            break
    for one in reversed(active[begin:]):
        while one:
            own, key, before = one[-1]
            if before is _MISSING:
                own.pop(key, None)
            else:
                own[key] = before
            one.pop()
    del active[begin:]


def _route(
    thread: int, handler: Handler, module: nn.Module, original: Handler, *args: Any, **kwargs: Any
) -> Any:
    """Another thread that runs the model at the same time (an evaluation) must not notice."""
    if get_ident() != thread:
        return original(*args, **kwargs)
    return handler(module, original, *args, **kwargs)


@dataclass(slots=True)
class CallRecord:
    """One call of one module."""

    module: nn.Module
    parent: int
    """Index of the call that made this one; -1 for the model itself."""
    stack: tuple[int, ...]
    """Indices of the calls open around it, outermost first."""
    end: int = -1
    """Position in the order of returns; -1 while open."""
    output: Any = None


@dataclass(slots=True)
class Recorder:
    """Write down the order in which modules are called and return."""

    keep_outputs: bool = False
    watch: Callable[[], Any] | None = None
    """Gives the state of the random generators, to find whose own code draws."""
    returned: Callable[[nn.Module], None] = lambda module: None
    """Is told of a module that has returned."""
    drew: dict[int, int] = field(default_factory=dict)
    """Call -> how many calls had returned when its own code first drew; -1 is the model itself."""
    calls: list[CallRecord] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    _num_ended: int = 0
    _random: Any = None

    def __call__(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Handle one call."""
        index = len(self.calls)
        parent = self._open[-1] if self._open else -1
        self._look(parent)
        record = CallRecord(module, parent, tuple(self._open))
        self.calls.append(record)
        self._open.append(index)
        try:
            output = original(*args, **kwargs)
        finally:
            self._look(index)
            self._open.pop()
        record.end, self._num_ended = self._num_ended, self._num_ended + 1
        self.returned(module)
        if self.keep_outputs:
            record.output = output
        return output

    def begin(self) -> None:
        """Note the random state before the model's own code runs."""
        self._look(-1)

    def _look(self, running: int) -> None:
        """Compare the random state with that at the last call or return."""
        if self.watch is None:
            return
        before, self._random = self._random, self.watch()
        if before is not None and not before.equals(self._random):
            self.drew.setdefault(running, self._num_ended)

    def before(self, last: int) -> tuple[list[CallRecord], list[CallRecord]]:
        """Split what ran before call `last` returned: (whole steps in order, the calls around it).

        A step is a call that had returned, made directly by the model or by one of the calls
        around `last`; `last` itself is the final step.
        """
        around = set(self.calls[last].stack)
        end = self.calls[last].end
        steps = [
            call
            for call in self.calls
            if 0 <= call.end <= end and (call.parent == -1 or call.parent in around)
        ]
        return steps, [self.calls[i] for i in sorted(around)]

    def drawing_around(self, last: int, model: nn.Module) -> list[nn.Module]:
        """Return the modules around call `last` whose own code draws before it returns.

        Those that are called more than once are left out: where are they frozen?
        """
        end = self.calls[last].end
        calls = [(-1, model), *((i, self.calls[i].module) for i in self.calls[last].stack)]
        return [
            module
            for i, module in calls
            if self.drew.get(i, end + 1) <= end
            and sum(call.module is module for call in self.calls) <= (i >= 0)
        ]
