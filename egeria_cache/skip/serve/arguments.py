"""Take the arguments and the results of a call apart into leaves, and put them together again.

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
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from egeria_cache.batch import BatchTensor, Structure, flatten, own_containers, state_of

__all__ = ["PLAIN", "Layout", "Lent", "lend", "take_apart", "take_result_apart"]

PLAIN = (bool, int, float, str, bytes, type(None))
_ONE_LEAF = frozenset({Tensor, *PLAIN})
"""Of these very types: what most models are called with has nothing inside to look for."""
_GONE = "no longer there"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each leaf stands. Compared by structure."""

    spec: TreeSpec
    opened: tuple[tuple[int, type, tuple[str, ...]], ...]
    """(which leaf of the tree, its type, the paths inside it)."""
    structures: tuple[Structure, ...] = field(compare=False)
    """How to build what was opened."""
    is_flat: bool = field(compare=False, default=False)
    """Whether it is of positional arguments alone, none of which was looked into."""

    def __hash__(self) -> int:
        """Leave out the tree itself, which older releases of PyTorch cannot hash."""
        return hash((self.spec.num_leaves, self.opened))

    def build(self, leaves: Sequence[Any], given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return (args, kwargs); containers of `given` in which nothing changed are used again."""
        if self.is_flat:
            return tuple(leaves), given[1]
        if not self.opened:
            built = tree_unflatten(leaves, self.spec)
        else:
            outer, rest = list[Any](), iter(leaves)
            opened = {at: i for i, (at, *_) in enumerate(self.opened)}
            for at in range(self.spec.num_leaves):
                if at in opened:
                    structure = self.structures[opened[at]]
                    values = {path: next(rest) for path in structure.paths}
                    outer.append(structure.rebuild(values))
                else:
                    outer.append(next(rest))
            built = tree_unflatten(outer, self.spec)
        args, kwargs = (own_containers(*pair) for pair in zip(given, built, strict=True))
        return args, kwargs

    def paths(self) -> list[str]:
        """Name each leaf as the caller sees it: "args[0]", "kwargs['labels']"."""
        outer = tree_unflatten(list(range(self.spec.num_leaves)), self.spec)
        names = {"[0]": "args", "[1]": "kwargs"}
        inside = {at: paths for at, _, paths in self.opened}
        found = []
        for path, at in tree_flatten_with_path(outer)[0]:
            text = keystr(path)
            name = names[text[:3]] + text[3:]
            found += [name + inner for inner in inside.get(at, ("",))]
        return found


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Layout]:
    """Return every leaf in order, and how they belong together."""
    for argument in args:
        if kwargs or not (isinstance(argument, BatchTensor) or type(argument) in _ONE_LEAF):
            return _take_apart((args, kwargs), _with_batch)
    return _take_apart((args, kwargs), _with_batch) if kwargs else (list(args), _flat(len(args)))


def take_result_apart(output: Any, left: Sequence[Mapping[Any, Any]]) -> tuple[list[Any], Layout]:
    """Return every leaf of what a call has brought, and how they belong together.

    Args:
        output: What the model returned.
        left: What it left in each of the containers that it was given.
    """
    return _take_apart(((output,), {"left": list(left)}), _result)


def _take_apart(
    tree: Any, look_into: Callable[[Any], tuple[Structure, dict[str, Any]] | None]
) -> tuple[list[Any], Layout]:
    outer, spec = tree_flatten(tree)
    leaves, opened, structures = list[Any](), [], []
    for at, leaf in enumerate(outer):
        found = None if isinstance(leaf, (Tensor, *PLAIN)) else look_into(leaf)
        if found is None:
            leaves.append(leaf)
        else:
            structure, inner = found
            opened.append((at, type(leaf), structure.paths))
            structures.append(structure)
            leaves += (inner[path] for path in structure.paths)
    return leaves, Layout(spec, tuple(opened), tuple(structures))


@functools.cache
def _flat(count: int) -> Layout:
    """Return the layout of so many positional arguments that are one leaf each."""
    return Layout(tree_flatten(((None,) * count, {}))[1], (), (), is_flat=True)


def _with_batch(leaf: Any) -> tuple[Structure, dict[str, Any]] | None:
    """Look into an object that is no pytree, if it holds a tensor of a loader."""
    structure, inner = flatten(leaf, -1)
    found = any(isinstance(value, BatchTensor) for value in inner.values())
    return (structure, inner) if found else None


def _result(leaf: Any) -> tuple[Structure, dict[str, Any]] | None:
    """Look into a mapping or a record that is no pytree. Other objects, such as a cache of keys and
    values, count as one: skipped modules may have filled them.
    """
    is_open = isinstance(leaf, Mapping | SimpleNamespace) or is_dataclass(leaf)
    return flatten(leaf, -1) if is_open and not isinstance(leaf, type) else None


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

    def put(self, content: Mapping[Any, Any]) -> None:
        """Put values into what the model was given."""
        _put(self.built, content)

    def hand_back(self) -> None:
        """Let the caller's container be as the model has left the one that it was given."""
        if self.given is not self.built:
            _put(self.given, self.left())


def lend(given: Any, built: Any, depth: int = 8) -> Iterator[Lent]:
    """Yield the containers in what a model is called with."""
    if isinstance(given, Tensor) or type(given) in _ONE_LEAF or not depth:
        return
    if type(given) is not type(built) or (
        given is built and type(given) not in (dict, list, tuple)
    ):
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
    return dict(enumerate(node)) if isinstance(node, list | tuple) else state_of(node)


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
