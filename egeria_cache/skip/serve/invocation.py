"""One call of the model: which of its inputs are a loader's leaves, and which signature it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.batch import Batch, BatchTensor, Fold, Lengths, lost_by, take_rows
from egeria_cache.device import autocast_kinds
from egeria_cache.skip.serve.arguments import (
    PLAIN,
    Layout,
    Lent,
    lend,
    take_apart,
    take_result_apart,
)
from egeria_cache.skip.state.content import digest, is_content

__all__ = ["WANTS_GRADIENT", "Invocation", "following", "mode_key"]

WANTS_GRADIENT = "an input requires grad, and its gradient leads through the frozen front"


@dataclass(frozen=True, slots=True)
class Invocation:
    """The arguments of one call, taken apart."""

    leaves: list[Any]
    """Every leaf of (args, kwargs) in order."""
    layout: Layout
    tagged: Mapping[int, BatchTensor]
    """Leaves that come from the loader, by position."""
    batch: Batch
    """Whose leaves they are; not to be asked for where there is a `why_not`."""
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """The arguments as they came."""
    lent: list[Lent] = field(default_factory=list)
    """The containers that the model was given last, in place of the caller's."""
    why_not: str | None = None
    """Why the call cannot be served: its leaves do not come from one batch, or are trained."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
        """Take a call apart."""
        leaves, layout = take_apart(args, kwargs)
        tagged, batches = dict[int, BatchTensor](), dict[int, Batch]()
        why_not = None
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                why_not = WANTS_GRADIENT
            if isinstance(leaf, BatchTensor) and leaf.intact:
                tagged[i], batches[id(leaf.batch)] = leaf, leaf.batch
        if why_not is not None:
            pass
        elif len(batches) != 1:
            why_not = _untagged(leaves) if not batches else "it was given rows of several batches"
        elif not next(iter(batches.values())).size:
            why_not = "the batch is empty"
        batch: Any = next(iter(batches.values()), None)
        return cls(leaves, layout, tagged, batch, (args, kwargs), why_not=why_not)

    def rebuild(self, swap: Callable[[int, Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with each tensor leaf replaced by `swap(position, leaf)`."""
        leaves = [
            swap(i, leaf) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        return self.layout.build(leaves, self.given)

    def hand_back(self, output: Any) -> Any:
        """Leave in the caller's containers what the model left in those it was given in their
        place, and return its output: one of them perhaps.
        """
        if not self.lent:
            return output
        for lent in self.lent:
            lent.hand_back()
        return next((lent.given for lent in self.lent if lent.built is output), output)

    def result(self, output: Any) -> tuple[list[Any], Layout]:
        """Return all that the call has brought, taken apart: the output, and what the model left in
        the containers that it was given.
        """
        return take_result_apart(output, [lent.left() for lent in self.lent])

    def put(self, output: Any, leaves: Sequence[Any], layout: Layout) -> Any:
        """Return the output with these leaves in place of those of `result`."""
        left = [lent.left() for lent in self.lent]
        (output,), left = layout.build(leaves, ((output,), {"left": left}))
        for lent, content in zip(self.lent, left["left"], strict=True):
            lent.put(content)
        return output

    def plain(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with the data of every leaf, loaded where needed."""
        if not (self.tagged or any(isinstance(leaf, BatchTensor) for leaf in self.leaves)):
            return self.noted(self.given)
        return self.noted(self.rebuild(lambda _, leaf: plain(leaf)))

    def noted(self, built: tuple[Any, Any]) -> tuple[Any, Any]:
        """Remember what the model is called with, for `result` and `hand_back`."""
        self.lent.clear()
        if not self.layout.is_flat:
            (args, kwargs), (given, given_kwargs) = built, self.given
            for pair in (*zip(given, args, strict=True),
                         *((given_kwargs[key], kwargs[key]) for key in kwargs)):  # fmt: skip
                self.lent.extend(lend(*pair))
        return built

    def rows(self, mask: np.ndarray) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of the masked rows, those that the batch's entry misses."""
        size = self.batch.size

        def swap(position: int, leaf: Any) -> Any:
            if position in self.tagged:
                with torch.inference_mode(False):
                    return leaf.misses()
            whole = plain(leaf)
            return take_rows(whole, mask) if whole.dim() and whole.shape[0] == size else whole

        return self.rebuild(swap)

    def again(
        self, mask: np.ndarray, loaded: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of the masked rows, from what was loaded again for them."""
        size = self.batch.size

        def swap(position: int, leaf: Any) -> Any:
            if position in self.tagged:
                with torch.inference_mode(False):
                    return leaf.rows(mask, loaded)
            whole = plain(leaf)
            return take_rows(whole, mask) if whole.dim() and whole.shape[0] == size else whole

        return self.rebuild(swap)

    def key(self, free: frozenset[int] = frozenset()) -> tuple[Any, ...]:
        """What must be equal for two calls to be served by the same recipe.

        Args:
            free: Positions of plain arguments that may differ: the prefix does not use them.
        """
        leaves = list[Any]()
        for i, leaf in enumerate(self.leaves):
            if i in free:
                leaves.append("any")
            elif isinstance(leaf, Tensor):
                leaves.append((self.shape(i), leaf.dtype, leaf.device))
            else:
                leaves.append(_describe(leaf))
        return (self.layout, tuple(leaves), mode_key())

    def shape(self, position: int) -> tuple[Any, ...]:
        """Return the shape of a tensor, with names for the sizes that differ from batch to batch:
        "B" for the number of samples, "L" where a dimension follows their lengths.
        """
        leaf = self.leaves[position]
        shape: tuple[Any, ...] = tuple(leaf.shape)
        lengths, tagged = self.batch.lengths, self.tagged.get(position)
        if tagged is not None and tagged.fold != Fold():
            return (tagged.fold, *shape[1:])
        if not shape or shape[0] != self.batch.size:
            return shape
        if lengths is None or tagged is None:
            return ("B", *shape[1:])
        follows = following(tagged, lengths)
        return ("B", *("L" if i in follows else n for i, n in enumerate(shape[1:], 1)))

    def paths(self) -> list[str]:
        """Name each leaf as the caller sees it: "args[0]", "kwargs['labels']"."""
        return self.layout.paths()


def plain(leaf: Any) -> Any:
    """Return the data behind a leaf."""
    if not isinstance(leaf, BatchTensor):
        return leaf
    with torch.inference_mode(False):  # an inference tensor has no version counter to compare
        return leaf.full()


def mode_key() -> tuple[Any, ...]:
    """Return the modes that decide in which precision kernels run.

    Whether autograd records is not among them: it moves last bits at most, and the same sample is
    used in training and in evaluation.
    """
    autocast: tuple[tuple[str, str], ...] = ()
    for kind in autocast_kinds():
        if torch.is_autocast_enabled(kind):
            autocast = (*autocast, (kind, str(torch.get_autocast_dtype(kind))))
    return autocast, torch.get_default_dtype()


def following(leaf: BatchTensor, lengths: Lengths) -> frozenset[int]:
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
            meta = torch.empty(
                (2, *padding.shape(path, row, whole)), dtype=row.dtype, device="meta"
            )
            for op in leaf.chain:
                meta = op.run(meta)
            shapes.append(meta.shape)
        differing = zip(*shapes, strict=True)
        _FOLLOWING[known] = frozenset(i for i, (a, b) in enumerate(differing) if a != b)
    return _FOLLOWING[known]


_FOLLOWING: dict[Any, frozenset[int]] = {}


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, (*PLAIN, torch.dtype, torch.device)):
        return (type(leaf), leaf)
    # An object may be changed in place between two calls, or be made anew for each: it counts by
    # what it holds, and by itself only where that does not say all of it.
    return (type(leaf), 0 if is_content(leaf) else id(leaf), digest(leaf))


def _untagged(leaves: list[Any]) -> str:
    """Say what the model was called with instead of a loader's batch."""
    for leaf in leaves:
        if isinstance(leaf, BatchTensor) and not leaf.has_rows_first:
            return (
                f"it was called with a Tensor ({str(leaf.dtype).removeprefix('torch.')}, "
                f"{list(leaf.shape)}) that does not know its samples: the rows were lost in "
                f"{leaf.chain[-1].func.__name__!r} of the leaf {leaf.leaf!r}"
            )
        if isinstance(leaf, BatchTensor):
            return (
                f"the loader's leaf {leaf.leaf!r} was changed in place after the loader gave it out"
                + (f" ({lost_by()})" if lost_by() else "")
            )
    tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if tensor is None:
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
        return f"it was called with {kinds}, in which no tensor of an EgeriaLoader's batch is found"
    dtype = str(tensor.dtype).removeprefix("torch.")
    lost = lost_by() or (
        "it is no tensor with a row for each sample out of an EgeriaLoader's batch (stack "
        "samples in the collate_fn; instead of `torch.autograd.Variable(x)` give `x`)"
    )
    return (
        f"it was called with a {type(tensor).__name__} ({dtype}, {list(tensor.shape)}) that does "
        f"not know its samples: {lost}"
    )
