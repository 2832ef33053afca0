"""Take the arguments of a call apart into leaves, and put them together again.

Like PyTorch's pytrees, and further: a batch that is given whole may be a mapping of its own kind
(`BatchEncoding`), a dataclass or any object with attributes. What holds a loader's tensor is
opened.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from egeria_cache.batch import BatchTensor, Structure, flatten, own_containers

__all__ = ["PLAIN", "Layout", "hand_back", "take_apart"]

PLAIN = (bool, int, float, str, bytes, type(None))
_ONE_LEAF = frozenset({Tensor, *PLAIN})
"""Of these very types: what most models are called with has nothing inside to look for."""


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
    if not kwargs and all(isinstance(a, BatchTensor) or type(a) in _ONE_LEAF for a in args):
        return list(args), _flat(len(args))
    outer, spec = tree_flatten((args, kwargs))
    leaves, opened, structures = list[Any](), [], []
    for at, leaf in enumerate(outer):
        structure, inner = _opened(leaf)
        if structure is None:
            leaves.append(leaf)
        else:
            opened.append((at, type(leaf), structure.paths))
            structures.append(structure)
            leaves += (inner[path] for path in structure.paths)
    return leaves, Layout(spec, tuple(opened), tuple(structures))


@functools.cache
def _flat(count: int) -> Layout:
    """Return the layout of so many positional arguments that are one leaf each."""
    return Layout(tree_flatten(((None,) * count, {}))[1], (), (), is_flat=True)


def hand_back(given: Any, built: Any) -> None:
    """Give dicts and lists what was added to the ones that were built in their place."""
    if given is built or type(given) is not type(built):
        return
    if isinstance(given, dict):
        for key, value in built.items():
            if key in given:
                hand_back(given[key], value)
            else:
                given[key] = value
    elif type(given) in (list, tuple):
        for pair in zip(given, built, strict=False):
            hand_back(*pair)
        if isinstance(given, list):
            given += built[len(given) :]


def _opened(leaf: Any) -> tuple[Structure | None, dict[str, Any]]:
    """Look into an object that is no pytree, if it holds a tensor of a loader."""
    if isinstance(leaf, (Tensor, *PLAIN)):
        return None, {}
    structure, inner = flatten(leaf, -1)
    if any(isinstance(value, BatchTensor) for value in inner.values()):
        return structure, inner
    return None, {}
