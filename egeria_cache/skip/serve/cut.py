"""What crosses the boundary: the tensors that a hit needs, and how their rows are kept.

A tensor of the model is stored as rows, one per sample, in the order in which its memory already
lies (a channels_last activation keeps its layout without a copy), and restored with the strides it
had: kernels are chosen by layout, and equal bits need equal kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from egeria_cache.batch import Fold, Lengths
from egeria_cache.ragged import PaddedRows
from egeria_cache.skip.serve.padded import RowGrowth, Rule

Slot = tuple[int, int]
"""(step, leaf of its output)"""


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
        shape = list(self.shape)
        if self.batch_dim is not None:
            shape[self.batch_dim] *= batch_size
        return tuple(shape)

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
        return (
            isinstance(tensor, Tensor)
            and tensor.dtype == self.dtype
            and tuple(tensor.shape) == self.shape_at(batch_size)
        )

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return a view, shape (B, ...), whose rows are the samples, in memory order."""
        dim = self.batch_dim
        assert dim is not None
        rows = tensor.detach()
        if self.shape[dim] == 1:
            return rows.permute(dim, *self.row_dims)
        return self.fold.apart(rows, dim).permute(0, *(i + 1 for i in self.row_dims))

    def as_stored(self, batch_size: int) -> tuple[int, ...] | None:
        """Return the strides of a batch's rows that are the tensor already; None: none are."""
        assert self.batch_dim is not None
        dims, _, strides = _restored(self.shape, self.order, self.batch_dim, batch_size)
        is_alike = self.shape[self.batch_dim] == 1 and dims == tuple(range(len(dims)))
        is_alike &= self.kind is Tensor
        return strides if is_alike else None

    def from_rows(self, rows: Tensor) -> Tensor:
        """Restore the tensor with the strides it had; copies only where memory order differs."""
        dim = self.batch_dim
        assert dim is not None
        dims, shape, strides = _restored(self.shape, self.order, dim, rows.shape[0])
        view = rows.as_subclass(self.kind).permute(dims)
        if self.shape[dim] != 1:
            view = self.fold.together(view, dim)
        if view.stride() == strides:
            return view
        if _same_memory(view, strides):
            return view.as_strided(shape, strides)
        return torch.empty_strided(shape, strides, dtype=rows.dtype, device=rows.device).copy_(view)


@functools.lru_cache(maxsize=1024)
def _restored(
    spec: tuple[int, ...], order: tuple[int, ...], dim: int, batch_size: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how rows are to be permuted, and shape and strides of the tensor that they were."""
    shape = tuple(n * batch_size if d == dim else n for d, n in enumerate(spec))
    # Position of every logical dimension among the row's; the batch itself stands first.
    row_dims = [d for d in order if d != dim or spec[d] != 1]
    where = {d: i + 1 for i, d in enumerate(row_dims)}
    dims = [where.get(d, 0) for d in range(len(shape))]
    return tuple(dims if spec[dim] == 1 else [0, *dims]), shape, _strides(shape, order)


def _same_memory(view: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether only strides of dimensions of size one differ: they address the same elements."""
    pairs = zip(view.shape, view.stride(), strides, strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)


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
    """Per leaf of the output: a TensorSpec, or the plain value it always has."""
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

    @property
    def rows(self) -> list[int]:
        """Leaves of the output that have rows for the samples, of a step that is skipped."""
        leaves = [] if self.run else self.leaves
        return [j for j, spec in enumerate(leaves) if getattr(spec, "batch_dim", None) is not None]
