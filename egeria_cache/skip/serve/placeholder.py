"""Tensors without data: what the skipped part of the model would have computed.

Glue code between modules (masks, reshapes, position ids) runs on placeholders as arithmetic on
shapes. Anything computed from a placeholder is a placeholder that remembers its sources, so
whatever crosses the boundary beside the cached value is caught where it is used: the answer is
right, or there is an error that names both ends. See docs/correctness.md.

Where a hit needs a value after all, what it has left out is computed then and there, in its order,
and the placeholders stand for these numbers: no code of the user's runs a second time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from egeria_cache.batch import overlap
from egeria_cache.errors import BoundaryError
from egeria_cache.kinds import once_per_class
from egeria_cache.pystate import OF_EVERY_OBJECT
from egeria_cache.skip.serve.call import autocast_modes

_RESULTS: dict[Any, Any] = {}
"""Results of operators on meta tensors: many go through Python and take half a millisecond."""
_MAX_RESULTS = 4096


@dataclass(frozen=True, slots=True)
class Source:
    """Where a placeholder's value would have come from."""

    kind: str
    """'leaf' is an input, 'step' is a skipped module, 'trainable' a parameter."""
    name: str
    """Module, argument or parameter, for the error message."""
    index: int = -1
    """Which leaf of the call, or which step."""
    leaf: int = -1
    """Which leaf of a step's output."""
    made: str = ""
    """The class of an object there, of whose parts nobody can tell."""


class Escape(BoundaryError):  # noqa: N818
    """A placeholder reached code that needs its value."""

    sources: frozenset[Source] = frozenset()

    @classmethod
    def at(cls, sources: Iterable[Source], consumer: str) -> Escape:
        """Name one of the sources, and remember all."""
        sources = frozenset(sources)
        names = sorted(s.name for s in sources if s.kind != "trainable") or ["?"]
        text = str(BoundaryError.escaped(names[0], consumer))
        for made in {source.made for source in sources if source.made}:
            text += (
                f". What is made there, a {made!r}, can be stored where PyTorch knows its parts: "
                "as a tuple or a dict, or by `torch.utils._pytree.register_dataclass`"
            )
        error = cls(text)
        error.sources = sources
        return error


class _Mark(weakref.ref[Any]):
    """Stands for a placeholder, which it does not keep."""

    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__


_MAX_DEPTH, _MAX_HELD = 8, 256
_NOT_LOOKED_INTO = (type, types.ModuleType, nn.Module, Tensor)
_Call = Callable[..., Any]
_Modes = tuple[bool, tuple[tuple[str, torch.dtype], ...]]


class LeftOut(NamedTuple):
    """A call that was not made."""

    function: _Call
    given: Any
    """(args, kwargs), with marks for placeholders."""
    gives: list[_Mark | None]
    """Marks of the leaves of what it gives."""
    modes: _Modes
    """Whether autograd recorded, and what was cast."""

    def make(self, values: Mapping[Any, Any]) -> list[Any]:
        """Make it, with these values of what it is given; return the leaves of what it gives."""
        args, kwargs = tree_map_only(_Mark, values.__getitem__, self.given)
        records, autocast = self.modes
        with torch.set_grad_enabled(records), contextlib.ExitStack() as modes:
            for kind, _ in autocast_modes():
                modes.enter_context(torch.autocast(kind, enabled=False))
            for kind, dtype in autocast:
                modes.enter_context(torch.autocast(kind, dtype))
            return tree_leaves(self.function(*args, **kwargs))


def _holds_placeholders(node: Any) -> bool:
    """Whether an object holds what stands for something else, or is too large to tell."""
    seen, pending = {id(node)}, [node]
    while pending and len(seen) < _MAX_HELD:
        held = gc.get_referents(holder := pending.pop())
        if isinstance(holder, types.FunctionType):  # and not its globals
            held = [holder.__closure__, holder.__defaults__, holder.__kwdefaults__, vars(holder)]
        for one in held:
            if isinstance(one, Placeholder | Unavailable):
                return True
            if id(one) not in seen and gc.is_tracked(one) and not isinstance(one, _NOT_LOOKED_INTO):
                seen.add(id(one))
                pending.append(one)
    return bool(pending)


def _sources_of(one: Any) -> frozenset[Source]:
    return one.sources if isinstance(one, Placeholder) else one._sources


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(slots=True)
class Scene:
    """One run of the model on placeholders, as far as they have to know it."""

    names: Mapping[int, str]
    """Name of every module by its id."""
    ancestors: frozenset[int]
    """Ids of the modules that call the boundary, directly or not: their code is glue."""
    after_boundary: bool = False
    """Whether the boundary has returned: modules called from now on are active."""
    finished: bool = False
    """Whether the run is over; a placeholder that is left has leaked."""
    trainable: dict[int, Tensor] = field(default_factory=dict)
    """Trainable tensors that met a placeholder, by the index of their source."""
    made: list[_Mark] = field(default_factory=list)
    """Every placeholder of the run."""
    is_hit: bool = False
    """Whether what is left out can be computed: a dry run is to find out what is needed."""
    left_out: list[LeftOut] = field(default_factory=list)
    read: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that they are given, and their versions then."""
    written: Collection[int] = ()
    """Which of these are known to be written to later: a copy is kept."""
    stored: list[tuple[_Mark, Tensor]] = field(default_factory=list)
    """Placeholders in whose place a tensor was given out."""
    values: dict[_Mark | None, Any] = field(default_factory=dict)
    """What they give, once that was computed."""
    why: BoundaryError | None = None
    """What has needed it."""

    @staticmethod
    def marks(leaves: Iterable[Any]) -> list[_Mark | None]:
        """Return the marks of what stands for something else; None for others."""
        return list(map(mark_of, leaves))

    def leave_out(self, function: _Call, given: Any, leaves: Iterable[Any]) -> None:
        """Remember an operation that is not done, and the leaves of what it would give."""
        call = LeftOut(function, self.marked(given), self.marks(leaves), (False, ()))
        self.left_out.append(call)

    def marked(self, node: Any, depth: int = _MAX_DEPTH) -> Any:
        """Return what a call is given, with marks for placeholders, none of which is kept, and for
        what else holds one, which cannot be had again.
        """
        if (mark := mark_of(node)) is not None:
            return mark
        kind = type(node)
        if depth and isinstance(node, tuple) and kind is not torch.Size:
            parts = [self.marked(one, depth - 1) for one in node]
            made_in_c = hasattr(kind, "n_fields")  # what `max` gives
            return kind(parts) if made_in_c else tuple.__new__(kind, parts)
        if depth and kind is list:
            return [self.marked(one, depth - 1) for one in node]
        if depth and kind is dict and gc.is_tracked(node):
            return {key: self.marked(one, depth - 1) for key, one in node.items()}
        if isinstance(node, Tensor):
            node = node.clone() if len(self.read) in self.written else node
            self.read.append((node, _version(node)))
        elif gc.is_tracked(node) and not isinstance(node, nn.Module | type):
            return _Mark(type(self)) if _holds_placeholders(node) else node
        return node

    def written_since(self) -> frozenset[int]:
        """Return which of the tensors that left-out calls were given are no longer as they were."""
        return frozenset(i for i, (one, then) in enumerate(self.read) if _version(one) != then)

    def settle(self, why: BoundaryError) -> bool:
        """Compute what was left out, and leave nothing out any more; False if that cannot be."""
        if self.why is None and self.is_hit and not self.finished:
            if self.written_since():
                return False
            self.why, self.after_boundary = why, True
            with torch._C._EnableTorchFunction():
                for call in self.left_out:
                    with contextlib.suppress(LookupError):  # what it was given may not be there
                        both = zip(call.gives, call.make(self.values), strict=False)
                        self.values.update((m, one) for m, one in both if one is not None)
                self._share()
        return self.why is not None

    def value_of(self, one: Any, what: str) -> Any:
        """Return what something stands for.

        Raises:
            Escape: That cannot be had.
        """
        mark = mark_of(one)
        if mark not in self.values:
            escape = self.escape(_sources_of(one), what)
            if not self.settle(escape) or mark not in self.values:
                raise escape
        return self.values[mark]

    def let_go(self) -> None:
        """Keep of what was computed what somebody keeps a placeholder of."""
        kept = (m for m in self.values if m is not None and m() is not None)
        self.values = {mark: self.values[mark] for mark in kept}

    def _share(self) -> None:
        """Let what was given out lie in the memory of its like, as it is by now, if others do."""
        for mark, given in self.stored:
            own = self.values.get(mark)
            if own is not None and any(
                overlap(own, other) for m, other in self.values.items() if m is not mark
            ):
                with torch.no_grad():
                    given.data = own.copy_(given)

    def kept(self, own: Sequence[Any] = (), held: Sequence[int] = ()) -> frozenset[Source]:
        """Return the sources of the placeholders, and of objects, that somebody still holds.

        Args:
            own: Those that are used in every run.
            held: How many references each of the first of these had when the run began.
        """

        def alive() -> list[Any]:
            ours, now = set(map(id, own)), list(map(sys.getrefcount, own))
            found = [p for ref in self.made if (p := ref()) is not None and id(p) not in ours]
            both = zip(own, now, held, strict=False)
            return found + [p for p, after, before in both if after > before]

        for generation in range(3):  # a cycle of this run is young: a full collection is slow
            if not alive():
                return frozenset()
            gc.collect(generation)
        return frozenset(source for one in alive() for source in _sources_of(one))

    def escape(self, sources: frozenset[Source], what: object) -> Escape:
        """Name the innermost module whose code is running, or else what is done."""
        return Escape.at(sources, innermost_module(self.names) or str(what))


class Placeholder(Tensor):
    """Shape, dtype, strides and device of a tensor whose value was not computed."""

    meta: Tensor
    sources: frozenset[Source]
    scene: Scene
    is_callers: bool
    """Whether its memory is that of an input: what is written there, the caller sees."""
    mark: _Mark

    @staticmethod
    def like(
        meta: Tensor,
        device: torch.device,
        sources: frozenset[Source],
        scene: Scene,
        *,
        is_callers: bool = False,
    ) -> Placeholder:
        """Wrap a meta tensor."""
        tensor: Placeholder = Tensor._make_wrapper_subclass(
            Placeholder, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        tensor.meta, tensor.sources, tensor.scene = meta, sources, scene
        tensor.is_callers, tensor.mark = is_callers, _Mark(tensor)
        scene.made.append(tensor.mark)
        return tensor

    @staticmethod
    def of(leaf: Tensor, sources: frozenset[Source], scene: Scene) -> Placeholder:
        """Stand for an input that is there, or would be."""
        with torch._C.DisableTorchFunctionSubclass():
            meta = _empty(leaf, "meta")
            return Placeholder.like(meta, leaf.device, sources, scene, is_callers=True)

    # Straight to the dispatcher: a placeholder has no use for a look at the Python function.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _given(args, kwargs)
        if found[0].scene.why is None:
            try:
                return cls._on_shapes(found, func, args, kwargs)
            except Escape as escape:
                with torch.overrides.enable_reentrant_dispatch():
                    if not found[0].scene.settle(escape):
                        raise
        numbers = functools.partial(Placeholder.number_of, what=str(func))
        args, kwargs = tree_map_only(Placeholder, numbers, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _on_shapes(
        cls, found: list[Placeholder], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device, scene, given = found[0].device, found[0].scene, (args, kwargs)
        if is_factory(func):
            # A tensor of the right kind will do: they never read the values.
            args, kwargs = tree_map_only(Placeholder, lambda p: _empty(p, p.device), given)
            return func(*args, **kwargs)
        sources = found[0].sources.union(*[p.sources for p in found[1:]])
        if scene.finished:
            raise Escape.at(sources, f"{func} (after the forward)")
        if scene.after_boundary and (active := innermost_module(scene.names, scene.ancestors)):
            raise Escape.at(sources, active)
        written: list[Any] = _written(func, args, kwargs) if func._schema.is_mutable else []
        trainable: list[Tensor] = []
        for tensor in written:
            # Behind the boundary, what is stored may share the memory that is written to.
            if not isinstance(tensor, Placeholder) or tensor.is_callers or scene.after_boundary:
                raise scene.escape(sources, func)
            tensor.meta = tensor.meta.detach()  # others share it
        if "device" in kwargs:
            device = torch.device(kwargs["device"] or device)
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": None}
        key = None if written else _key(func, args, kwargs)
        result = None if key is None else _RESULTS.get(key)
        if result is None:

            def meta_of(tensor: Tensor) -> Tensor:
                if isinstance(tensor, Placeholder):
                    return tensor.meta
                if tensor.requires_grad:
                    trainable.append(tensor)
                return _empty(tensor, "meta")

            meta_args, meta_kwargs = tree_map_only(Tensor, meta_of, (args, kwargs))
            try:
                result = func(*meta_args, **meta_kwargs)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                raise scene.escape(sources, func) from error
            if key is not None:  # else there may be trained tensors: these are noted each time
                if len(_RESULTS) >= _MAX_RESULTS:
                    _RESULTS.clear()
                _RESULTS[key] = result
        scene.trainable.update((id(tensor), tensor) for tensor in trainable)
        sources |= {Source("trainable", "", id(tensor)) for tensor in trainable}
        for tensor in written:
            tensor.sources |= sources
            if (tensor.meta.shape, tensor.meta.stride()) != (tensor.shape, tensor.stride()):
                # `unsqueeze_` and the like change the tensor itself: a wrapper cannot follow.
                raise scene.escape(sources, func)
        if written and isinstance(result, Tensor):
            scene.leave_out(func, given, ())
            return written[0]
        is_callers = func.is_view and any(one.is_callers for one in found)

        def wrap(one: Tensor) -> Placeholder:
            return Placeholder.like(one, device, sources, scene, is_callers=is_callers)

        output = wrap(result) if isinstance(result, Tensor) else tree_map_only(Tensor, wrap, result)
        leaves = (output,) if type(output) is Placeholder else tree_leaves(output)
        scene.leave_out(func, given, leaves)
        return output

    def number_of(self, what: str = "the model's output") -> Tensor:
        """Return the tensor that it stands for, or raise an `Escape`."""
        return self.scene.value_of(self, what)  # type: ignore[no-any-return]


def _by_number(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kw: getattr(self.number_of(f"{name}()"), name)(*args, **kw)


for _name in (
    "numpy", "__array__", "tolist", "data_ptr", "__reduce_ex__", "__deepcopy__", "__format__",
    "__repr__",
):  # fmt: skip
    setattr(Placeholder, _name, _by_number(_name))


class Unavailable:
    """An object that a skipped module would have made; its content is computed once it is read."""

    __slots__ = ("__weakref__", "_mark", "_scene", "_sources")

    def __init__(self, sources: frozenset[Source], scene: Scene | None = None) -> None:
        own_parts = {"_sources": sources, "_scene": scene, "_mark": _Mark(self)}
        for name, own in own_parts.items():
            object.__setattr__(self, name, own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not hasattr(self.__class__, name):
            raise AttributeError(name)
        return getattr(self._object(f".{name}"), name)

    @staticmethod
    @once_per_class
    def like(kind: type) -> type[Unavailable]:
        """Return the class that stands for objects of another: what can be done to them (a call, an
        operator) is done to the object.
        """

        def done_by(name: str) -> Callable[..., Any]:
            return lambda self, *args, **kw: getattr(self._object(name), name)(*args, **kw)

        names = {*dir(kind)} - OF_EVERY_OBJECT - {*vars(Unavailable), "__del__"}
        special = {n: getattr(kind, n, None) for n in names if n[:2] == "__"}
        own = {n: one for n, one in special.items() if type(one) in (dict, tuple)}
        own |= {n: done_by(n) for n, one in special.items() if callable(one)}
        own |= {"__slots__": (), "__class__": property(lambda _: kind)}
        return type(kind.__name__, (Unavailable,), own)

    def _object(self, what: str) -> Any:
        if self._scene is None:
            raise Escape.at(self._sources, what)
        return self._scene.value_of(self, what)


def mark_of(node: Any) -> _Mark | None:
    """Return the mark of what stands for something else."""
    kind = type(node)
    if kind is Placeholder:
        return node.mark  # type: ignore[no-any-return]
    if issubclass(kind, Unavailable):
        return node._mark  # type: ignore[no-any-return]
    return node if kind is _Mark else None


def innermost_module(names: Mapping[int, str], but: frozenset[int] = frozenset()) -> str | None:
    """Name the innermost module whose code is running, by a walk up the Python stack.

    Returns None outside of any module, or if that module's id is in `but`.
    """
    # Only those who must name a module pay for it: hooks on every module would cost every call.
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            if id(owner) in but:
                return None
            return names[id(owner)] or type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None


def placeholders(tree: Any) -> list[Placeholder]:
    """Return the placeholders in nested containers, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Placeholder)]


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Placeholder]:
    """Return the placeholders that an operator is given, whose lists hold no others."""
    found = list[Placeholder]()
    for one in (*args, *kwargs.values()):
        many = one if type(one) in (list, tuple) else (one,)
        found += [part for part in many if isinstance(part, Placeholder)]
    return found


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what decides the shapes of a result; None if that cannot be told by a look."""
    try:
        key = func, torch.get_default_dtype(), _describe(args), _describe(kwargs)
        hash(key)
    except TypeError:
        return None
    return key


def _describe(node: Any) -> Any:
    if isinstance(node, Tensor):
        if not isinstance(node, Placeholder):
            if node.requires_grad:
                raise TypeError
            return (node.shape, node.stride(), node.dtype)
        meta = node.meta
        return (meta.shape, meta.stride(), meta.dtype, meta.storage_offset())
    if isinstance(node, tuple | list):
        return (type(node), *map(_describe, node))
    if isinstance(node, dict):
        return tuple((name, _describe(node[name])) for name in sorted(node))
    return (type(node), node)


def _empty(like: Tensor, device: Any) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that `func` changes in place."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [one for one in tree_leaves(value) if isinstance(one, Tensor)]
    return written


_FACTORIES = frozenset(
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
                 "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
)  # fmt: skip


def is_factory(func: Any) -> bool:
    """Whether an operator reads a tensor's shape and dtype, never its values."""
    return func._schema.name in _FACTORIES and not func._schema.is_mutable
