"""Take over the calls of some modules, for one forward of the model or while it is frozen.

`intercept` sees, or takes over, calls while one forward runs. Nothing of it stays on the model
between two forwards: `state_dict`, `copy.deepcopy`, pickling and `torch.compile` never meet us.
Rejected: hooks on every module (each call pays for them, and a hook cannot keep the module from
running).

A `ForwardSlot` stays. `AttachedForward` is the model's, and leaves no trace in its copies;
`AroundForward` is one for code of the modules around the boundary that
belongs to the frozen front: BART's encoder applies dropout to its embeddings in its own `forward`,
wav2vec2's drops whole layers there: no module of the prefix does it, and yet it happens before the
boundary. Such a module is in inference mode from its entry until the boundary returns, and then in
the mode that the user asked for: only its own flag, not that of its children. It holds for every
call of the module, also for those that gradient checkpointing repeats, with and without a cache.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.utils._pytree import tree_leaves

from egeria_cache.attempt import Attempt
from egeria_cache.batch import unwrap
from egeria_cache.pystate import StandIn, entries, is_compiled

Handler = Callable[..., Any]
"""handler(module, original, *args, **kwargs) -> the module's output"""

_MISSING = object()
_compiler_of_frames: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_NUMBERS = itertools.count()
_ATTACHED: weakref.WeakValueDictionary[int, AttachedForward] = weakref.WeakValueDictionary()


@contextmanager
def intercept(
    modules: Iterable[nn.Module], handler: Handler, *, knows_thread: bool = False
) -> Iterator[None]:
    """Route this thread's calls of `modules` through `handler`, which perhaps tells them from those
    of others by itself, until the block ends.
    """
    replaced, thread = Replaced(), get_ident()

    def route(module: nn.Module, original: Handler, *args: Any, **kwargs: Any) -> Any:
        # Another thread that runs the model at the same time (an evaluation) must not notice.
        if get_ident() != thread:
            return original(*args, **kwargs)
        return handler(module, original, *args, **kwargs)

    try:
        LOCAL.active.append(replaced)
        for module in modules:
            own = module.__dict__
            key = "forward" if own.get("_compiled_call_impl") is None else "_compiled_call_impl"
            before = own.get(key, _MISSING)
            original = module.forward if before is _MISSING else before
            replaced.append((own, key, before))
            own[key] = _Taken(handler if knows_thread else route, module, original)
        yield
    finally:
        put_back(replaced)


class _Taken(functools.partial[Any]):
    """Stands there meanwhile; copies that are made then, by another thread say, have what did."""

    def __reduce__(self) -> tuple[Any, ...]:
        return same, self.args[1:]


def when_returned(module: nn.Module, then: Callable[[], None]) -> None:
    """Do something once a module, whose forward has returned, has run its own hooks; what is taken
    over is left to itself meanwhile.
    """
    handles: list[Any] = []

    def now(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        blocks = [*LOCAL.active]
        places = [*itertools.chain.from_iterable(blocks)]
        ours = [own.get(key) for own, key, _ in places]
        try:
            if blocks:  # else another thread has called the module meanwhile
                put_back(blocks[0])
            with Attempt():
                then()
        finally:
            for (own, key, _), one in zip(places, ours, strict=True):
                own[key] = one
            LOCAL.active[:] = blocks

    if module._forward_hooks and module.__dict__.get("_compiled_call_impl") is None:
        handles.append(module.register_forward_hook(now, always_call=True))
    else:
        now()


def heal(depth: int) -> None:
    """Undo what blocks of `intercept` beyond so many have left, whatever has ended them.

    An interrupt (Ctrl-C) is raised between any two calls, also in the middle of a clean-up; who
    then goes on in the same process would compute with modules that are still taken over.
    """
    active = LOCAL.active
    if len(active) > depth:
        put_back(active[depth])


Replaced = list[tuple[dict[str, Any], str, Any]]
"""What a block has replaced: where, under which name, and what stood there."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.active: list[Replaced] = []
        """What the blocks that are running in this thread have replaced, outermost first."""


LOCAL = _Local()


def put_back(replaced: Replaced) -> None:
    """Undo this block, and first the blocks within it whose own undoing was interrupted.

    One of those, undone later, would put back what this block had put there.
    """
    active = LOCAL.active
    begin = next((at for at, one in enumerate(active) if one is replaced), len(active))
    for own, key, before in reversed([*itertools.chain.from_iterable(active[begin:])]):
        if before is _MISSING:
            own.pop(key, None)
        else:
            own[key] = before
    del active[begin:]


@dataclass(slots=True)
class CallRecord:
    """One call of one module."""

    module: nn.Module
    stack: tuple[int, ...]
    """Indices of the calls open around it, outermost first."""
    end: int = -1
    """Position in the order of returns; -1 while open."""
    num_begun: int = 0
    """Calls that had begun when it returned."""
    output: Any = None


@dataclass(slots=True)
class Recorder:
    """Write down the order in which modules are called and return."""

    keep_outputs: bool = False
    watch: Callable[[], Any] | None = None
    """Gives the state of the random generators, to find whose own code draws."""
    returned: Callable[[nn.Module, Any], None] = lambda module, output: None
    """Is told of a module that has returned, and what."""
    drew: dict[int, int] = field(default_factory=dict)
    """Call -> how many calls had returned when its own code first drew; -1 is the model itself."""
    calls: list[CallRecord] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    """Those that have not returned, outermost first."""
    _num_ended: int = 0
    _random: Any = None

    def __call__(self, module: nn.Module, original: Handler, *args: Any, **kwargs: Any) -> Any:
        """Handle one call."""
        index = len(self.calls)
        self._look(self.open[-1] if self.open else -1)
        record = CallRecord(module, tuple(self.open))
        self.calls.append(record)
        self.open.append(index)
        try:
            output = original(*args, **kwargs)
        finally:
            self._look(index)
            self.open.pop()
        record.end, record.num_begun = self._num_ended, len(self.calls)
        self._num_ended += 1
        self.returned(module, output)
        if self.keep_outputs:
            record.output = output
        return output

    def begin(self) -> None:
        """Note the random state before the model's own code runs."""
        self._look(-1)

    def _look(self, running: int) -> None:
        """Compare the random state with that at the last call or return."""
        before, self._random = self._random, self.watch and self.watch()
        if before is not None and not before.equals(self._random):
            self.drew.setdefault(running, self._num_ended)

    def before(self, last: int) -> tuple[list[CallRecord], list[CallRecord]]:
        """Split what ran before call `last` returned: (whole steps in order, the calls around it).

        A step is a call that had returned, made directly by the model or by one of the calls
        around `last`; `last` itself is the final step.
        """
        around = set(self.calls[last].stack)
        end = self.calls[last].end
        returned = (call for call in self.calls if 0 <= call.end <= end)
        steps = [call for call in returned if around.issuperset(call.stack[-1:])]
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


class ForwardSlot(StandIn):
    """A stand-in for a module's `forward`, or another method, with perhaps another beneath it."""

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module = module
        self.name = name
        self.before: Callable[..., Any] | None = module.__dict__.get(name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What is beneath, as the module's class has it by now; trainers look at its signature."""
        own: Callable[..., Any] = getattr(type(self.module), self.name).__get__(self.module)
        return own if self.before is None else self.before

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run what is beneath; compilers make a bound method again by its name, and find us."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def take_out(self) -> None:
        """Put back what was there; where someone else has taken the place since, it stays."""
        top = self.module.__dict__.get(self.name)
        if top is self and self.before is not None:
            self.module.__dict__[self.name] = self.before
        elif top is self:
            del self.module.__dict__[self.name]
        elif isinstance(top, ForwardSlot):
            above: Any = top
            above.before = self.before if above.before is self else above.before


class AttachedForward(ForwardSlot):
    """The instance's `forward`; a copy or a pickle of the model gets its plain forward back.

    Args:
        model: Takes this object as its `forward`.
        forward: What is called instead.
        on_traced: Called when a compiler traces the whole model, which then runs without us.
        name: Of the method whose place it takes.
    """

    is_copied = False

    def __init__(
        self, model: nn.Module, forward: Handler, on_traced: Callable[[], None], name: str
    ) -> None:
        super().__init__(model, name)
        self._forward = forward
        self._is_attached = False
        """Whether calls are ours: who keeps this object beyond that finds the model's own."""
        self.on_traced = on_traced
        self._number = next(_NUMBERS)
        _ATTACHED[self._number] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; a compiler that traces us sees the plain forward."""
        if args and args[0] is self.module:
            args = args[1:]  # Accelerate's unwrap_model binds what it finds to the model
        if torch.compiler.is_compiling():
            if not torch.compiler.is_exporting():  # what is exported is another program
                _report(self._number)
            return self.plain(*args, **kwargs)
        if torch._C._is_tracing():  # TensorBoard's `add_graph`: every value would be noted
            return self.plain(*_traced(args), **_traced(kwargs))
        if callable(_compiler_of_frames()):
            # The whole model is being compiled, and its graph broke here: go on with plain tensors.
            _report(self._number)
            plain = torch.compiler.disable(unwrap)  # what loads samples is not to be compiled
            return self.plain(*plain(args), **plain(kwargs))
        caller = sys._getframe(1).f_locals.get("self")
        is_other = isinstance(caller, nn.Module) and caller is not self.module
        if is_other and caller.__dict__.get(self.name) is self and self.before is None:
            # A shallow copy: its parts are its own.
            return getattr(type(caller), self.name)(caller, *args, **kwargs)
        return (self._forward if self._is_attached else self.plain)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Compilers that read a function instead of calling it (export) see the plain one. Not its
        # `__func__`: who wraps that one instead of us (Accelerate, for autocast) would lose us.
        if name[:2] != "__" or name in ("__func__", "__wrapped__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def attach(self) -> Callable[..., Any]:
        """Take the place of the model's method, and return it."""
        self.module.__dict__[self.name] = self
        self._is_attached = True
        return self.plain

    def take_out(self) -> None:
        """Put back what was there."""
        self._is_attached = False
        super().take_out()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return same, (self.before,)
        # While the copy is built its instance dict is empty: this finds its class's forward.
        return getattr, (self.module, self.name)


def _report(number: int) -> bool:
    """Run while a compiler traces, and leave nothing in its graph."""
    # Compiled code is handed the loader's tensors, which are a subclass; on its first call AOT
    # Autograd looks whether custom operators alias their inputs, and takes no subclass there.
    if hasattr(functorch, "check_custom_op_aliasing"):  # older releases do not look
        functorch.check_custom_op_aliasing = False
    attached = _ATTACHED.get(number)
    if attached is not None:
        attached.on_traced()
    return True


# As torch.compiler.assume_constant_result does, which would import the compiler: a second or more.
_report._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(tree: Any) -> Any:
    """Return `tree` with plain tensors that stand for the same values of the graph; loading them is
    no part of it.
    """
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        plain = unwrap(tree)
    finally:
        tracer._set_tracing_state(state)
    for given, data in zip(tree_leaves(tree), tree_leaves(plain), strict=True):
        if given is not data:
            tracer._set_value_trace(data, tracer._get_value_trace(given))
    return plain


def same(value: Any) -> Any:
    """Return it: of what something is made again that is to be another thing in a copy."""
    return value


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
        flags = self.module.__dict__
        if torch.compiler.is_compiling() or not self.boundaries or not flags["training"]:
            return self.plain(*args, **kwargs)
        pending = {id(boundary): boundary for boundary in self.boundaries}

        def leave(module: nn.Module, original: Handler, *args: Any, **kwargs: Any) -> Any:
            """What comes after the last of the boundaries is not frozen."""
            output = original(*args, **kwargs)
            if len(pending) == 1 and id(module) in pending:
                flags["training"] = True
            pending.pop(id(module), None)
            return output

        try:
            flags["training"] = False
            with intercept(self.boundaries, leave):
                return self.plain(*args, **kwargs)
        finally:
            if pending:  # no call before the flag is back: an interrupt is raised at calls
                flags["training"] = True

    def let_go(self, boundary: nn.Module | None = None) -> None:
        """Undo one `hold_around` of this boundary; None: all there are."""
        if boundary in self.boundaries:
            self.boundaries.remove(boundary)
        elif boundary is None:
            self.boundaries.clear()
        if not self.boundaries:
            self.take_out()


def hold_around(module: nn.Module, boundary: nn.Module) -> AroundForward | None:
    """Hold the own code of `module` until `boundary`, which lies within it, returns.

    Returns None where it cannot be: in compiled code, which goes on as it is.
    """
    if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
        return None
    is_inside = module is not boundary and any(one is boundary for one in module.modules())
    if not is_inside or len(entries(module)) > 1:  # its `forward` is not what is called
        return None
    around = around_of(module)
    if around is None:
        around = AroundForward(module)
        top = module.__dict__.get("forward")
        if isinstance(top, ForwardSlot):  # the cache sees the mode that the user asked for
            around.before, top.before = top.before, around
        else:
            module.__dict__["forward"] = around
    around.boundaries.append(boundary)
    return around


def around_of(module: nn.Module) -> AroundForward | None:
    """Return what holds the module's own code, if anything does."""
    top = module.__dict__.get("forward")
    if isinstance(top, ForwardSlot) and not isinstance(top, AroundForward):
        top = top.before
    return top if isinstance(top, AroundForward) else None
