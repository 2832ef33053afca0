"""What crosses the boundary: the tensors that a hit needs, and how their rows are kept.

A tensor of the model is stored as rows, one per sample, in the order in which its memory already
lies (a channels_last activation keeps its layout without a copy), and restored with the strides it
had: kernels are chosen by layout, and equal bits need equal kernels.

Where samples are padded, rows are stored without their padding. How a size inside the model follows
the lengths of a batch is learnt from runs of it. A hidden state is as long as its tokens; an image
of patches is one longer; strided convolutions, any number of them, give floor((L - o) / s). A rule
keeps all such functions that agree with what was seen, and says a size only where they agree with
each other: it never guesses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from egeria_cache.batch import Fold, Lengths
from egeria_cache.ragged import Dims, PaddedRows, blank, pad_rows, widen

Slot = tuple[int, int]
"""(step, leaf of its output)"""

_MULTIPLES = np.concatenate([np.arange(1, 65), np.ones(4095, np.int64)])
"""Of a length, that a size may be (several rows of a batch that was folded, say), and after that
the ones that go with the strides."""
_STRIDES = np.concatenate([np.ones(64, np.int64), np.arange(2, 4097)])
_MAX_KNOWN = 4096
Whole = tuple[int, ...]


class Rule:
    """The functions of the lengths along some axes that one size may be.

    They are floor((multiple * length - o) / stride) along one axis, for every o from `low` to
    `high`; either the stride or the multiple is 1.

    Args:
        seen: Lengths of batches -> the size in each.
    """

    def __init__(self, seen: Mapping[Whole, int]) -> None:
        self._seen = dict(seen)
        self.within = functools.lru_cache(_MAX_KNOWN)(self._within)
        """Gives the smallest and the largest size that is possible for some lengths."""
        sizes, found = np.array(list(seen.values())), [np.empty((5, 0), np.int64)]
        for axis, lengths in enumerate(np.array(list(seen)).T):
            if (lengths == lengths[0]).all():
                continue
            rests = np.outer(_MULTIPLES, lengths) - np.outer(_STRIDES, sizes)  # in [o, o + stride)
            low, high = rests.max(1) - _STRIDES + 1, rests.min(1)
            every = np.stack([np.full_like(low, axis), _MULTIPLES, _STRIDES, low, high])
            found.append(every[:, low <= high])
        functions = np.concatenate(found, 1)
        self._functions = functions[:, np.argsort(functions[2] > 1, kind="stable")]
        """Axes, multiples, strides, low and high, exact multiples first: int64, shape (5, N)."""

    @classmethod
    def longer_by(cls, offset: int, axis: int) -> Rule:
        """Return the rule of what is so much longer than the samples along an axis."""
        rule = cls({})
        rule._functions = np.array([[axis], [1], [1], [-offset], [-offset]])
        return rule

    @property
    def explains(self) -> bool:
        """Whether some function agrees with all runs."""
        return bool(self._functions.size)

    def at(self, lengths: Whole) -> int | None:
        """Return the size for a batch of these lengths; None if that is not certain."""
        least, most = self.within(lengths)
        return least if least == most else None

    def axis_among(self, preferred: Collection[int]) -> int:
        """Return an axis that it may follow, one of these if it can."""
        axes: list[int] = self._functions[0].tolist()
        return next((axis for axis in axes if axis in preferred), axes[0])

    def sizes(self, lengths: Lengths, *, surely: bool = False) -> np.ndarray:
        """Return how large each sample is at most, or `surely`: int64, shape (B,)."""
        own = map(tuple, lengths.own.tolist())
        return np.array([self.within(one)[not surely] for one in own], np.int64)

    def _within(self, lengths: Whole) -> tuple[int, int]:
        if lengths in self._seen:
            return self._seen[lengths], self._seen[lengths]
        axes, multiples, strides, low, high = self._functions
        product = multiples * np.array(lengths)[axes]
        least, most = (product - high) // strides, (product - low) // strides
        return int(least.min()), int(most.max())


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """How the rows of one cached tensor follow the lengths of their samples."""

    dims: Dims
    """Of a row as it is stored."""
    rules: tuple[Rule, ...]
    """One for each."""
    fill: Any
    """What is written where a sample is padded: nothing that reaches the loss."""

    def stripped(self, rows: Tensor, lengths: Lengths) -> PaddedRows:
        """Return rows, shape (B, ...), without what was computed for padding."""
        wide = [rows.shape[dim + 1] for dim, _ in self.dims]
        sizes = np.stack([rule.sizes(lengths) for rule in self.rules], 1)
        return PaddedRows(rows, self.dims, np.minimum(sizes, wide))

    def blanked(self, rows: Tensor, lengths: Lengths, *, surely: bool = False) -> Tensor:
        """Return a copy of rows, shape (B, ...), with what was computed for padding filled.

        Args:
            rows: Of a batch.
            lengths: Of the batch.
            surely: Fill also what may be padding, where rules leave a doubt; else it is kept, as
                it is in what is stored.
        """
        sizes = self.surely(lengths) if surely else self.stripped(rows, lengths).sizes
        return blank(rows, self.dims, sizes, self.fill)

    def surely(self, lengths: Lengths) -> np.ndarray:
        """Return how large samples are at least: int64, shape (B, number of `dims`)."""
        return np.stack([rule.sizes(lengths, surely=True) for rule in self.rules], 1)

    def sizes(self, whole: Whole) -> list[int]:
        """Return how large rows are along `dims` in a batch of these lengths.

        Raises:
            LookupError: That is not known.
        """
        known = [size for size in (rule.at(whole) for rule in self.rules) if size is not None]
        if len(known) < len(self.rules):
            raise LookupError(f"no batch of lengths {whole} was seen yet")
        return known

    def padded(
        self, rows: Tensor | Sequence[Tensor], whole: Whole | None, *, pin_memory: bool = False
    ) -> Tensor:
        """Put stored rows together for a batch of these lengths; None: no larger than need be.

        Raises:
            LookupError: It is not known how large they are then.
        """
        if whole is None:
            sizes = [max(row.shape[dim] for row in rows) for dim, _ in self.dims]
        else:
            sizes = self.sizes(whole)
        if isinstance(rows, Tensor):
            return widen(rows, self.dims, sizes, self.fill)
        return pad_rows(rows, self.dims, sizes, self.fill, pin_memory=pin_memory)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One sample's part of one cached tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size before any compression."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """A proved place to enter the model. Compared by identity: weights are part of it."""

    boundary: str
    """Qualified name of the last frozen module."""
    tensors: Mapping[str, RowSpec]
    """What is cached, one row per sample, by name."""
    dropped: frozenset[str]
    """Leaves of the loader's batch that only the skipped prefix reads: a hit needs no data."""
    tagged: frozenset[str]
    """Leaves of the loader's batch that the model is called with: they must stay `BatchTensor`s."""
    read: frozenset[str]
    """Those of them that the skipped prefix may read."""
    fields: Mapping[str, Any]
    """The cut's part of the content address, JSON values."""
    devices: Mapping[str, torch.device] = field(default_factory=dict)
    """Where each of them lies: a model may be spread over several devices."""
    growth: Mapping[str, RowGrowth] = field(default_factory=dict)
    """Of the cached tensors whose rows follow the lengths of their samples."""
    profile: tuple[Step, ...] = ()
    """What each module of the prefix cost and gave, in execution order: the gate chooses by it."""

    def stripped(self, name: str, rows: Tensor, lengths: Lengths) -> Tensor | PaddedRows:
        """Return the rows of a cached tensor without what was computed for padding."""
        growth = self.growth.get(name)
        return rows if growth is None else growth.stripped(rows, lengths)

    @cached_property
    def row_bytes(self) -> int:
        """Raw bytes per sample."""
        return sum(spec.num_bytes for spec in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Step:
    """One module of the prefix, as measured once."""

    name: str
    seconds_per_sample: float
    """Time from the model's start until it returned, divided by the rows."""
    row_bytes: int
    """Bytes per sample of its output."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one tensor's shape depends on the batch size, found by running with two sizes."""

    shape: tuple[int, ...]
    """With the size of the batch dimension replaced by its multiple of the batch size."""
    dtype: torch.dtype
    device: torch.device
    batch_dim: int | None
    """None if the shape does not depend on the batch."""
    order: tuple[int, ...]
    """Dimensions from the outermost to the innermost in memory."""
    blocks: int = 1
    """How often the batch stands one behind the other along its dimension."""
    kind: type[Tensor] = Tensor
    """A subclass of the user's, of which nothing else is to be known."""

    @classmethod
    def of(cls, a: Tensor, size_a: int, b: Tensor, size_b: int) -> TensorSpec | None:
        """Compare the same tensor at two batch sizes; None if the shape depends on the data."""
        is_own = type(a).__torch_dispatch__ is Tensor.__torch_dispatch__
        kind = type(a) if is_own and not isinstance(a, nn.Parameter) else Tensor
        is_odd = a.is_nested or a.is_quantized or (kind is not Tensor and vars(a))
        if is_odd or a.dtype != b.dtype or a.dim() != b.dim() or a.layout != torch.strided:
            return None
        differing = [i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
        shape, batch_dim = list(a.shape), None
        if differing:
            batch_dim = differing[0]
            multiple = a.shape[batch_dim] // size_a
            sizes = (a.shape[batch_dim], b.shape[batch_dim])
            if len(differing) > 1 or sizes != (multiple * size_a, multiple * size_b):
                return None
            shape[batch_dim] = multiple
        strides = a.stride()
        order = tuple(sorted(range(a.dim()), key=lambda i: (-strides[i], i)))
        return cls(tuple(shape), a.dtype, a.device, batch_dim, order, kind=kind)

    def shape_at(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape for a batch of this size."""
        return tuple(n * batch_size if i == self.batch_dim else n for i, n in enumerate(self.shape))

    def grown(self, rules: Mapping[int, Rule], whole: tuple[int, ...]) -> TensorSpec | None:
        """Return what describes it in a batch of other lengths; None if that is not certain.

        Args:
            rules: Of its dimensions that follow the lengths; of the batch's own, of its multiple.
            whole: The lengths.
        """
        shape = list(self.shape)
        for dim, rule in rules.items():
            size = rule.at(whole)
            if size is None or (dim == self.batch_dim and (size == 1) != (shape[dim] == 1)):
                return None
            shape[dim] = size
        return replace(self, shape=tuple(shape))

    def empty(self, batch_size: int, device: torch.device) -> Tensor:
        """Return an uninitialised tensor with the shape and strides of the original."""
        shape = self.shape_at(batch_size)
        return torch.empty_strided(
            shape, _strides(shape, self.order), dtype=self.dtype, device=device
        )

    @property
    def fold(self) -> Fold:
        """Which rows of the model's tensor belong to a sample."""
        assert self.batch_dim is not None
        return Fold(self.blocks, self.shape[self.batch_dim] // self.blocks)

    @property
    def row(self) -> RowSpec:
        """One sample's part, in memory order."""
        return RowSpec(tuple(self.shape[i] for i in self.row_dims), self.dtype)

    @property
    def row_dims(self) -> list[int]:
        """The tensor's dimensions that a row has, in memory order."""
        return [i for i in self.order if i != self.batch_dim or self.shape[i] != 1]

    def matches(self, tensor: Any, batch_size: int) -> bool:
        """Whether `tensor` is what this describes, for a batch of this size."""
        is_alike = isinstance(tensor, Tensor) and tensor.dtype == self.dtype
        return is_alike and tuple(tensor.shape) == self.shape_at(batch_size)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return a view, shape (B, ...), whose rows are the samples, in memory order."""
        dim = self.batch_dim
        assert dim is not None
        rows = tensor.detach()
        if self.shape[dim] == 1:
            return rows.permute(dim, *self.row_dims)
        return self.fold.apart(rows, dim).permute(0, *(i + 1 for i in self.row_dims))

    def strides_of_rows(self, batch_size: int) -> tuple[int, ...] | None:
        """Return the strides of rows that are the tensor as they are; None if none can be."""
        is_other = self.batch_dim != 0 or self.shape[0] != 1 or self.kind is not Tensor
        if is_other or self.order != tuple(range(len(self.order))):
            return None
        return _strides(self.shape_at(batch_size), self.order)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Restore the tensor with the strides it had; copies only where memory order differs."""
        dim, strides = self.batch_dim, _strides(self.shape_at(rows.shape[0]), self.order)
        assert dim is not None
        is_one = self.shape[dim] == 1
        stored = [dim if is_one else -1, *self.row_dims]  # -1: samples, apart from their multiple
        view = rows if self.kind is Tensor else rows.as_subclass(self.kind)
        view = view.permute([stored.index(d) for d in sorted(stored)])
        if not is_one:
            view = self.fold.together(view, dim)
        if view.stride() == strides:
            return view.detach()  # what follows may write to it: for autograd it is no view
        return view.new_empty_strided(view.shape, strides).copy_(view)


def _strides(shape: tuple[int, ...] | torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


@dataclass(slots=True)
class StepPlan:
    """One module call of the prefix."""

    module: nn.Module
    name: str
    spec: TreeSpec
    leaves: list[Any]
    """Per leaf of the output: a TensorSpec, the plain value it always has, or the class that
    stands for objects of its kind."""
    run: bool = False
    """Not skipped: it costs little, is trained, or has hooks of the user inside."""
    cached: set[int] = field(default_factory=set)
    """Leaves of the output that are stored with the cut."""
    constants: dict[int, Tensor] = field(default_factory=dict)
    """Leaves that cross the boundary but do not depend on the samples."""
    single: bool = False
    """Whether the output is one leaf."""

    def __post_init__(self) -> None:
        self.single = self.spec.is_leaf()
