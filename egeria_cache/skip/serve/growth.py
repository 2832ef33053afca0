"""A recipe for batches of any length: what was proved at a few lengths, at all others.

Sizes follow rules (`rule.py`). What crosses the boundary without depending on the samples, a table
of positions say, is cut from a longer one where that was shown to be the same, and learnt for each
length where not. What cannot be told for certain is computed plainly, and told from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from egeria_cache.skip.serve.cut import TensorSpec
from egeria_cache.skip.serve.padded import OutputAxis, Proof, RowGrowth
from egeria_cache.skip.serve.rule import Rule
from egeria_cache.skip.serve.step import Slot, StepPlan

__all__ = ["MAX_LENGTHS", "Growth"]

MAX_LENGTHS = 512
"""Lengths of batches that a recipe is kept ready for."""
_REACH = 1.5
"""How much longer than what was tried a batch may be."""
Whole = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Growth:
    """What a recipe needs to know of other lengths than the one it was proved at."""

    rules: dict[Slot, dict[int, Rule]]
    """Per step and leaf of its output: dimension -> rule; of the batch's own, of its multiple."""
    fills: Mapping[Slot, Any]
    """Of the tensors that are cached."""
    lefts: tuple[bool, ...]
    """Per axis, whether samples are padded on the left."""
    reach: Whole
    """The longest batch that was tried, along each axis."""
    entered: frozenset[int]
    """Axes of leaves that the prefix reads: where others are as long, these count."""
    cuttable: frozenset[Slot] = frozenset()
    """Constants that are the beginning of those of longer batches."""
    constants: dict[Whole, dict[Slot, Tensor]] = field(default_factory=dict)
    """As they were seen at some lengths."""
    outputs: Mapping[int, OutputAxis] = field(default_factory=dict)
    """Leaves of the model's output that are padded."""
    proof: Proof = field(default_factory=Proof)
    """That the loss does not read them."""

    def is_beyond(self, whole: Whole) -> bool:
        """Whether batches of these lengths have to be studied: a model may do otherwise there."""
        return any(n > _REACH * most for n, most in zip(whole, self.reach, strict=True))

    def steps(self, known: Sequence[StepPlan], whole: Whole) -> list[StepPlan] | None:
        """Return the steps for batches of these lengths; None if they have to be seen first."""
        steps = []
        for i, step in enumerate(known):
            leaves, constants = list(step.leaves), dict(step.constants)
            for j, spec in enumerate(leaves):
                if (i, j) in self.rules:
                    leaves[j] = spec.grown(self.rules[i, j], whole)
                    if leaves[j] is None:
                        return None
            for j in constants:
                value = self._constant((i, j), constants[j], leaves[j].shape, whole)
                if value is None:
                    return None
                constants[j] = value
            steps.append(replace(step, leaves=leaves, constants=constants))
        return steps

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
        self,
        steps: Sequence[StepPlan],
        whole: Whole,
        batch_size: int,
        outputs: Sequence[Sequence[Any]],
    ) -> str | None:
        """Take in how the steps' outputs looked at these lengths; say which one no rule explains.

        Args:
            steps: The recipe's.
            whole: The lengths of the batch.
            batch_size: Its size.
            outputs: The leaves of every step's output.
        """
        for (i, j), rules in self.rules.items():
            value, spec = outputs[i][j], steps[i].leaves[j]
            if not isinstance(value, Tensor) or value.dim() != len(spec.shape):
                return steps[i].name
            for dim, rule in rules.items():
                size = value.shape[dim]
                if not rule.add(whole, size // batch_size if dim == spec.batch_dim else size):
                    return steps[i].name
        self.keep_constants(steps, whole, outputs)
        return None

    def keep_constants(
        self, steps: Sequence[StepPlan], whole: Whole, outputs: Sequence[Sequence[Any]]
    ) -> None:
        """Remember what crosses the boundary in batches of these lengths, whatever the samples."""
        if len(self.constants) >= MAX_LENGTHS:
            del self.constants[next(iter(self.constants))]
        self.constants[whole] = {
            (i, j): outputs[i][j].detach().clone()
            for i, step in enumerate(steps)
            for j, first in step.constants.items()
            if (i, j) in self.rules
            and self._constant((i, j), first, outputs[i][j].shape, whole) is None
        }

    def of_rows(self, spec: TensorSpec, slot: Slot) -> RowGrowth | None:
        """Return how the rows of a cached tensor grow; None if they are all of one size."""
        rules = self.rules.get(slot)
        if not rules:
            return None
        rows = [(at, rules[dim]) for at, dim in enumerate(spec.row_dims) if dim in rules]
        dims = tuple((at, self.lefts[rule.axis_among(self.entered)]) for at, rule in rows)
        return RowGrowth(dims, tuple(rule for _, rule in rows), self.fills.get(slot, 0))
