"""One call of the model: which of its inputs are a loader's leaves, and which signature it has.

Take the arguments and the results of a call apart into leaves, and put them together again.

Like PyTorch's pytrees, and further: a batch that is given whole may be a mapping of its own kind
(`BatchEncoding`), a dataclass or any object with attributes. What holds a loader's tensor is
opened, as are mappings and dataclasses that a model returns.

A model may leave its results in the containers that it is given. It is given others, with the data
of a loader's tensors in them; what it left there is handed back (`Lent`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import BuiltinMethodType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from egeria_cache import batch as batches
from egeria_cache.device import autocast_kinds, fp32_precision
from egeria_cache.pystate import Content, own_attributes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = (bool, int, float, str, bytes, type(None))
_METHODS = MethodType, BuiltinMethodType
_NO_CODE = (Tensor, type, *PLAIN)
_ONE_LEAF = frozenset({Tensor, batches.BatchTensor, batches.AbsentTensor, *PLAIN})
"""Of these very types: what most models are called with has nothing inside to look for."""
_GONE = "no longer there"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each leaf stands. Compared by structure."""

    spec: pytree.TreeSpec = field(hash=False)  # takes longer than to compare it
    opened: tuple[tuple[int, type, batches.Structure], ...] = ()
    """(which leaf of the tree, its type, how it is built)."""
    is_flat: bool = field(compare=False, default=False)
    """Whether it is of positional arguments alone, none of which was looked into."""

    def build(self, leaves: Sequence[Any], given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return (args, kwargs); containers of `given` in which nothing changed are used again."""
        outer, rest = list[Any](), iter(leaves)
        opened = {at: one for at, _, one in self.opened}
        for at in range(self.spec.num_leaves):
            if (structure := opened.get(at)) is None:
                outer.append(next(rest))
            else:
                outer.append(structure.rebuild({path: next(rest) for path in structure.paths}))
        whole = pytree.tree_unflatten(outer, self.spec)
        return batches.own_containers(given, whole)  # type: ignore[no-any-return]

    def paths(self) -> list[str]:
        """Name each leaf as the caller sees it: "args[0]", "kwargs['labels']"."""
        outer = pytree.tree_unflatten(list(range(self.spec.num_leaves)), self.spec)
        inside = {at: one.paths for at, _, one in self.opened}
        found = []
        for path, at in pytree.tree_flatten_with_path(outer)[0]:
            name = path[0].get(("args", "kwargs")) + pytree.keystr(path[1:])
            found += [name + inner for inner in inside.get(at, ("",))]
        return found


def _take_apart(tree: Any, *, is_result: bool) -> tuple[list[Any], Layout]:
    """Take a tree of what a call is given, or of its results, apart.

    Of what is no pytree an object that holds a tensor of a loader is opened, and of results any
    mapping or record. Other objects, such as a cache of keys and values, count as one there:
    skipped modules may have filled them.
    """
    outer, spec = pytree.tree_flatten(tree)
    leaves, opened = list[Any](), []
    for at, leaf in enumerate(outer):
        is_open = not isinstance(leaf, (Tensor, type, *PLAIN))
        if is_result:
            is_open &= isinstance(leaf, Mapping | SimpleNamespace) or is_dataclass(leaf)
        structure, inner = batches.flatten(leaf, -1) if is_open else (None, {"": leaf})
        values = inner.values()
        if structure and (is_result or any(isinstance(one, batches.BatchTensor) for one in values)):
            opened.append((at, type(leaf), structure))
            leaves += values
        else:
            leaves.append(leaf)
    return leaves, Layout(spec, tuple(opened))


@functools.cache
def _flat(count: int) -> Layout:
    """Return the layout of so many positional arguments that are one leaf each."""
    return Layout(pytree.tree_flatten(((None,) * count, {}))[1], is_flat=True)


@dataclass(frozen=True, slots=True)
class Lent:
    """A container of the caller's, and the one that the model was given in its place."""

    given: Any
    built: Any
    """The caller's own where no tensor in it had to be replaced."""
    before: dict[Any, Any]
    """What that held when the model was called."""

    def left(self) -> dict[Any, Any]:
        """Return what the model has put there, by key; `_GONE` for what it took out."""
        before, after = self.before, _content(self.built)
        put = {key: value for key, value in after.items()
               if key not in before or before[key] is not value}  # fmt: skip
        return put | dict.fromkeys(before.keys() - after.keys(), _GONE)

    def hand_back(self) -> None:
        """Let the caller's container be as the model has left the one that it was given."""
        if self.given is not self.built:
            _put(self.given, self.left())


def lend(given: Any, built: Any, depth: int = 8) -> Iterator[Lent]:
    """Yield the containers in what a model is called with."""
    if isinstance(given, Tensor) or type(given) in _ONE_LEAF or not depth:
        return
    is_plain = type(given) in (dict, list, tuple)
    if type(given) is not type(built) or (given is built and not is_plain):
        return
    before = _content(built)
    if not isinstance(given, tuple):
        yield Lent(given, built, before)
    for key, value in _content(given).items():
        if key in before:
            yield from lend(value, before[key], depth - 1)


def _content(node: Any) -> dict[Any, Any]:
    if isinstance(node, dict):
        return dict(node)
    return dict(enumerate(node)) if isinstance(node, list | tuple) else own_attributes(node)


def _put(node: Any, content: Mapping[Any, Any]) -> None:
    if isinstance(node, list):
        after = {**dict(enumerate(node)), **content}
        node[:] = [value for _, value in sorted(after.items()) if value is not _GONE]
        return
    is_dict = isinstance(node, dict)
    for key, value in content.items():
        if value is _GONE:
            dict.pop(node, key, None) if is_dict else object.__delattr__(node, key)
        elif is_dict:
            node[key] = value
        else:
            object.__setattr__(node, key, value)


WANTS_GRADIENT = "an argument requires grad, and its gradient may lead through the front"


@dataclass(frozen=True, slots=True)
class Invocation:
    """The arguments of one call, taken apart."""

    leaves: list[Any]
    """Every leaf of (args, kwargs) in order."""
    layout: Layout
    tagged: Mapping[int, batches.BatchTensor]
    """Leaves that come from the loader, by position."""
    batch: batches.Batch
    """Whose leaves they are; not to be asked for where there is a `why_not`."""
    given: Arguments = ((), {})
    """The arguments as they came."""
    lent: list[Lent] = field(default_factory=list)
    """The containers that the model was given last, in place of the caller's."""
    why_not: str | None = None
    """Why the call cannot be served: its leaves do not come from one batch, or are trained."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
        """Take a call apart."""
        if not kwargs and _ONE_LEAF.issuperset(map(type, args)):
            leaves, layout = list(args), _flat(len(args))
        else:
            leaves, layout = _take_apart((args, kwargs), is_result=False)
        tagged, owners, why_not = dict[int, batches.BatchTensor](), dict[int, batches.Batch](), None
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                why_not = WANTS_GRADIENT
            if isinstance(leaf, batches.BatchTensor) and leaf.intact:
                tagged[i], owners[id(leaf.batch)] = leaf, leaf.batch
        batch: Any = next(iter(owners.values()), None)
        if len(owners) > 1:
            why_not = why_not or "it was given rows of several batches"
        elif batch is None:
            why_not = why_not or _untagged(leaves)
        elif not batch.size:
            why_not = why_not or "the batch is empty"
        return cls(leaves, layout, tagged, batch, (args, kwargs), why_not=why_not)

    def code(self) -> dict[int, Any]:
        """Return what it is given that may be run, or holds such a thing, by position."""
        found = ((i, one) for i, one in enumerate(self.leaves) if not isinstance(one, _NO_CODE))
        return {i: one for i, one in found if callable(one) or not Content(one).is_all}

    def rebuild(self, swap: Callable[[int, Any], Any]) -> Arguments:
        """Return (args, kwargs) with each tensor leaf replaced by `swap(position, leaf)`."""
        leaves = list(self.leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[i] = swap(i, leaf)
        if self.layout.is_flat:
            return tuple(leaves), self.given[1]
        return self.layout.build(leaves, self.given)

    def hand_back(self, output: Any) -> Any:
        """Leave in the caller's containers what the model left in those it was given in their
        place, and return its output: one of them perhaps.
        """
        for lent in self.lent:
            lent.hand_back()
        return next((lent.given for lent in self.lent if lent.built is output), output)

    def result(self, output: Any) -> tuple[list[Any], Layout]:
        """Return all that the call has brought, taken apart: the output, and what the model left in
        the containers that it was given.
        """
        left = [lent.left() for lent in self.lent]
        return _take_apart(((output,), {"left": left}), is_result=True)

    def put(self, output: Any, leaves: Sequence[Any], layout: Layout) -> Any:
        """Return the output with these leaves in place of those of `result`."""
        left = [lent.left() for lent in self.lent]
        (output,), left = layout.build(leaves, ((output,), {"left": left}))
        for lent, content in zip(self.lent, left["left"], strict=True):
            _put(lent.built, content)
        return output

    def plain(self) -> Arguments:
        """Return (args, kwargs) with the data of every leaf, loaded where needed."""
        if not (self.tagged or any(isinstance(leaf, batches.BatchTensor) for leaf in self.leaves)):
            return self.noted(self.given)
        return self.noted(self.rebuild(lambda _, leaf: plain(leaf)))

    def noted(self, built: Arguments) -> Arguments:
        """Remember what the model is called with, for `result` and `hand_back`."""
        given, ours = ((*args, *kwargs.values()) for args, kwargs in (self.given, built))
        self.lent[:] = lend(given, ours)
        return built

    def rows(
        self,
        mask: np.ndarray,
        loaded: Mapping[str, Any] | None = None,
        behind: Sequence[Mapping[str, Any]] = (),
        fill: int = 0,
    ) -> Arguments:
        """Return (args, kwargs) of the masked rows: those that the batch's entry misses, or from
        what was loaded again for them; `behind` them of what was loaded for other batches; and to
        `fill` up their number, the first one some times more.

        Raises:
            LookupError: What others would come with is not known.
        """

        def swap(position: int, leaf: Any) -> Any:
            if position in self.tagged:
                with torch.inference_mode(False):
                    own = leaf.misses() if loaded is None else leaf.rows(mask, loaded)
                    more = [*map(leaf.of, behind), *[own[:1]] * fill]
                    return torch.cat([own, *more]) if more else own
            whole = plain(leaf)
            if not (whole.dim() and whole.shape[0] == self.batch.size):
                return whole
            if behind or fill:
                raise LookupError("an argument has rows that are not the loader's")
            return batches.take_rows(whole, mask)

        return self.rebuild(swap)

    def kinds(self) -> tuple[Any, ...]:
        """What decides which arguments may have any value: of this kind, that is."""
        return (self.layout, *map(kind_of, self.leaves))

    def key(self, free: frozenset[int] = frozenset()) -> tuple[Any, ...]:
        """What must be equal for two calls to be served by the same plan.

        Args:
            free: Positions of plain arguments of which only the kind counts: the prefix does not
                use them.
        """
        leaves = list[Any]()
        for i, leaf in enumerate(self.leaves):
            if i in free:
                leaves.append(kind_of(leaf))
            elif isinstance(leaf, Tensor):
                leaves.append((self.shape(i), leaf.dtype, leaf.device))
            else:
                leaves.append(_describe(leaf))
        autocast = autocast_modes() if torch._C._is_any_autocast_enabled() else ()
        return (self.layout, tuple(leaves), autocast, torch.get_default_dtype(), fp32_precision())

    def shape(self, position: int) -> tuple[Any, ...]:
        """Return the shape of a tensor, with names for the sizes that differ from batch to batch:
        "B" for the number of samples, "L" where a dimension follows their lengths.
        """
        leaf = self.leaves[position]
        shape: tuple[Any, ...] = tuple(leaf.shape)
        lengths, tagged = self.batch.lengths, self.tagged.get(position)
        if tagged is not None and tagged.chain and tagged.fold != batches.Fold():
            return (tagged.fold, *shape[1:])
        if not shape or shape[0] != self.batch.size:
            return shape
        if lengths is None or tagged is None:
            return ("B", *shape[1:])
        follows, padding = following(tagged, lengths), lengths.padding
        length = "L", padding.dims(tagged.leaf), padding.values.get(tagged.leaf)
        return ("B", *(length if i in follows else n for i, n in enumerate(shape[1:], 1)))


def plain(leaf: Any) -> Any:
    """Return the data behind a leaf."""
    if not isinstance(leaf, batches.BatchTensor):
        return leaf
    with torch.inference_mode(False):  # an inference tensor has no version counter to compare
        return leaf.full()


def autocast_modes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the modes that, beside the default dtype, decide in which precision kernels run.

    Whether autograd records is not among them: it moves last bits at most, and the same sample is
    used in training and in evaluation.
    """
    kinds = filter(torch.is_autocast_enabled, autocast_kinds())
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def following(leaf: batches.BatchTensor, lengths: batches.Lengths) -> frozenset[int]:
    """Return the dimensions of a loader's leaf, after what the loop did, that follow lengths."""
    padding, path = lengths.padding, leaf.leaf
    dims = frozenset(dim + 1 for dim, _ in padding.dims(path))
    if not dims or not leaf.chain_key:
        return dims
    known = (leaf.chain_key, path, padding.axes, tuple(leaf.shape[1:]))
    if known not in _FOLLOWING:
        if len(_FOLLOWING) > 1024:
            _FOLLOWING.clear()
        row = leaf.batch.context.metas[path]
        shapes = []
        for more in (0, 8):
            whole = [size + more for size in lengths.whole]
            shape = 2, *padding.shape(path, row, whole)
            meta = torch.empty(shape, dtype=row.dtype, device="meta")
            for op in leaf.chain:
                meta = op.run(meta)
            shapes.append(meta.shape)
        differing = zip(*shapes, strict=True)
        _FOLLOWING[known] = frozenset(i for i, (a, b) in enumerate(differing) if a != b)
    return _FOLLOWING[known]


_FOLLOWING: dict[Any, frozenset[int]] = {}


def kind_of(leaf: Any) -> Any:
    """Return what counts of an argument of which the value does not."""
    is_tensor = isinstance(leaf, Tensor)
    return (Tensor, leaf.dtype, leaf.dim(), leaf.device) if is_tensor else type(leaf)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, (*PLAIN, torch.dtype, torch.device)):
        return (type(leaf), leaf)
    # An object may be changed in place between two calls, or be made anew for each: it counts by
    # what it holds, and by itself only where that does not say all of it.
    held = Content(leaf)
    return (type(leaf), 0 if held.is_all else _Itself(leaf), tuple(held.texts.items()))


@dataclass(frozen=True, slots=True, eq=False)
class _Itself:
    """An object that is told from all others; a method by what it is bound to. It is kept: another
    one could have its place.
    """

    one: Any

    def __eq__(self, other: object) -> bool:
        is_bound = isinstance(other, _Itself) and type(self.one) is type(other.one) in _METHODS
        return isinstance(other, _Itself) and (
            self.one is other.one or (is_bound and self.one == other.one)
        )

    def __hash__(self) -> int:
        return hash(self.one) if type(self.one) in _METHODS else id(self.one)


def _untagged(leaves: list[Any]) -> str:
    """Say what the model was called with instead of a loader's batch."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
        return f"it was called with {kinds}, in which no tensor of an EgeriaLoader's batch is found"
    known = next((leaf for leaf in tensors if isinstance(leaf, batches.BatchTensor)), None)
    if known is not None and known.has_rows_first:
        what = f"the loader's leaf {known.leaf!r} was changed in place after the loader gave it out"
        return f"{what} ({batches.lost_by()})" if batches.lost_by() else what
    lost = batches.lost_by() or (
        "it is no tensor with a row for each sample out of an EgeriaLoader's batch (stack "
        "samples in the collate_fn; instead of `torch.autograd.Variable(x)` give `x`)"
    )
    tensor, kind = tensors[0], type(tensors[0]).__name__
    if known is not None:
        tensor, kind = known, "Tensor"
        lost = f"the rows were lost in {known.chain[-1].func.__name__!r} of the leaf {known.leaf!r}"
    what = f"a {kind} ({str(tensor.dtype).removeprefix('torch.')}, {list(tensor.shape)})"
    return f"it was called with {what} that does not know its samples: {lost}"
