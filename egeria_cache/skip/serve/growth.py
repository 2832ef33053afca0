"""A recipe for batches of any length: what was proved at a few lengths, at all others.

Sizes follow rules (`rule.py`). What crosses the boundary without depending on the samples, a table
of positions say, is cut from a longer one where that was shown to be the same, and learnt for each
length where not. What cannot be told for certain is computed plainly, and told from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from egeria_cache.batch import Lengths
from egeria_cache.ragged import Dims, PaddedRows, blank, pad_rows, widen
from egeria_cache.skip.serve.rule import Rule

if TYPE_CHECKING:
    from egeria_cache.skip.serve.cut import TensorSpec
    from egeria_cache.skip.serve.recipe import Recipe

__all__ = ["Growth", "OutputAxis", "RowGrowth", "grown"]

MAX_LENGTHS = 512
"""Lengths of batches that a recipe is kept ready for."""
Whole = tuple[int, ...]
Slot = tuple[int, int]
"""(step, leaf of its output)"""


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
        sizes = [
            [min(rule.most(tuple(own)), most) for rule, most in zip(self.rules, wide, strict=True)]
            for own in lengths.own.tolist()
        ]
        return PaddedRows(rows, self.dims, np.array(sizes, np.int64))

    def blanked(self, rows: Tensor, lengths: Lengths, *, surely: bool = False) -> Tensor:
        """Return a copy of rows, shape (B, ...), with what was computed for padding filled.

        Args:
            rows: Of a batch.
            lengths: Of the batch.
            surely: Fill also what may be padding, where rules leave a doubt; else it is kept, as
                it is in what is stored.
        """
        stripped = self.stripped(rows, lengths)
        if surely:
            own = lengths.own.tolist()
            sizes = [[rule.least(tuple(one)) for rule in self.rules] for one in own]
            stripped = PaddedRows(rows, self.dims, np.array(sizes, np.int64))
        return blank(rows, self.dims, stripped.sizes, self.fill)

    def padded(self, rows: Tensor | Sequence[Tensor], whole: Whole) -> Tensor:
        """Put stored rows together for a batch of these lengths.

        Raises:
            LookupError: It is not known how large they are then.
        """
        sizes = [rule.at(whole) for rule in self.rules]
        if None in sizes:
            raise LookupError(f"no batch of lengths {whole} was seen yet")
        known = [size for size in sizes if size is not None]
        if isinstance(rows, Tensor):
            return widen(rows, self.dims, known, self.fill)
        return pad_rows(rows, self.dims, known, self.fill)


@dataclass(frozen=True, slots=True)
class OutputAxis:
    """Where one leaf of the model's output is padded: users see it, and may use it."""

    dim: int
    """Of the tensor; dimension 0 are the samples."""
    rule: Rule
    """How its size follows the lengths."""
    left: bool

    def is_padding(self, lengths: Lengths, size: int) -> np.ndarray:
        """Return where samples are padded: bool, shape (B, size)."""
        sizes = [self.rule.most(tuple(own)) for own in lengths.own.tolist()]
        own = np.clip(np.array(sizes), 0, size)[:, None]
        at = np.arange(size)[None]
        return np.asarray(at < size - own if self.left else at >= own)


@dataclass(slots=True, eq=False)
class Growth:
    """What a recipe needs to know of other lengths than the one it was proved at."""

    rules: dict[Slot, dict[int, Rule]]
    """Per step and leaf of its output: dimension -> rule; of the batch's own, of its multiple."""
    fills: Mapping[Slot, Any]
    """Of the tensors that are cached."""
    lefts: tuple[bool, ...]
    """Per axis, whether samples are padded on the left."""
    cuttable: frozenset[Slot] = frozenset()
    """Constants that are the beginning of those of longer batches."""
    constants: dict[Whole, dict[Slot, Tensor]] = field(default_factory=dict)
    """As they were seen at some lengths."""
    outputs: Mapping[int, OutputAxis] = field(default_factory=dict)
    """Leaves of the model's output that are padded."""
    unproved: int = 0
    """Calls to be computed yet, to see whether their gradient comes from padding."""
    num_watched: int = 0
    """Calls whose output's gradient was waited for, or could have been."""
    seen: Any = None
    """What came of the last of them (`unread.py`)."""
    _known: OrderedDict[Whole, Recipe] = field(default_factory=OrderedDict)

    def at(self, recipe: Recipe, whole: Whole) -> Recipe | None:
        """Return the recipe for batches of these lengths; None if they have to be seen first."""
        known = self._known.get(whole)
        if known is not None:
            self._known.move_to_end(whole)
            return known
        steps = []
        for i, step in enumerate(recipe.steps):
            leaves, constants = list(step.leaves), dict(step.constants)
            for j, spec in enumerate(leaves):
                if (i, j) in self.rules:
                    leaves[j] = grown(spec, self.rules[i, j], whole)
                    if leaves[j] is None:
                        return None
            for j in constants:
                value = self._constant((i, j), constants[j], leaves[j].shape, whole)
                if value is None:
                    return None
                constants[j] = value
            steps.append(replace(step, leaves=leaves, constants=constants))
        known = recipe.with_steps(steps)
        self._known[whole] = known
        if len(self._known) > MAX_LENGTHS:
            self._known.popitem(last=False)
        return known

    def _constant(
        self, slot: Slot, first: Tensor, shape: Sequence[int], whole: Whole
    ) -> Tensor | None:
        if slot not in self.rules:
            return first
        seen = [first, *(values[slot] for values in self.constants.values() if slot in values)]
        if slot in self.cuttable:
            longer = (v for v in seen if all(n >= m for n, m in zip(v.shape, shape, strict=True)))
            value = next(longer, None)
            return None if value is None else value[tuple(slice(0, size) for size in shape)]
        return self.constants.get(whole, {}).get(slot)

    def learn(
        self, recipe: Recipe, whole: Whole, batch_size: int, outputs: Sequence[Sequence[Any]]
    ) -> str | None:
        """Take in how the steps' outputs looked at these lengths; say which one no rule explains.

        Args:
            recipe: The recipe.
            whole: The lengths of the batch.
            batch_size: Its size.
            outputs: The leaves of every step's output.
        """
        odd = self.learn_sizes(recipe, whole, batch_size, outputs)
        if odd is None:
            self.keep_constants(recipe, whole, outputs)
        return odd

    def learn_sizes(
        self, recipe: Recipe, whole: Whole, batch_size: int, outputs: Sequence[Sequence[Any]]
    ) -> str | None:
        """Take in the sizes alone; see `learn`."""
        for (i, j), rules in self.rules.items():
            value, spec = outputs[i][j], recipe.steps[i].leaves[j]
            if not isinstance(value, Tensor) or value.dim() != len(spec.shape):
                return recipe.steps[i].name
            for dim, rule in rules.items():
                size = value.shape[dim]
                if not rule.add(whole, size // batch_size if dim == spec.batch_dim else size):
                    return recipe.steps[i].name
        return None

    def keep_constants(
        self, recipe: Recipe, whole: Whole, outputs: Sequence[Sequence[Any]]
    ) -> None:
        """Remember what crosses the boundary in batches of these lengths, whatever the samples."""
        if len(self.constants) >= MAX_LENGTHS:
            del self.constants[next(iter(self.constants))]
        self.constants[whole] = {
            (i, j): outputs[i][j].detach().clone()
            for i, step in enumerate(recipe.steps)
            for j, first in step.constants.items()
            if (i, j) in self.rules
            and self._constant((i, j), first, outputs[i][j].shape, whole) is None
        }

    def of_rows(self, recipe: Recipe, slot: Slot) -> RowGrowth | None:
        """Return how the rows of a cached tensor grow; None if they are all of one size."""
        rules = self.rules.get(slot)
        if not rules:
            return None
        rows = [
            (at, rules[dim])
            for at, dim in enumerate(recipe.tensor_spec(slot).row_dims)
            if dim in rules
        ]
        dims = tuple((at, self.lefts[rule.axis]) for at, rule in rows)
        return RowGrowth(dims, tuple(rule for _, rule in rows), self.fills.get(slot, 0))


def grown(spec: TensorSpec, rules: Mapping[int, Rule], whole: Whole) -> TensorSpec | None:
    """Return what describes a tensor in a batch of other lengths; None if that is not certain."""
    shape = list(spec.shape)
    for dim, rule in rules.items():
        size = rule.at(whole)
        if size is None or (dim == spec.batch_dim and (size == 1) != (shape[dim] == 1)):
            return None
        shape[dim] = size
    return replace(spec, shape=tuple(shape))
