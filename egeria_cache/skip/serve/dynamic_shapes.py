"""Whether a training loop reads what the model gives where its batch is padded.

A hit has other values there than the plain model. Where the gradient of an output is zero at all
padded positions, the loss does not know of them, whoever computes it; unless it selects. A maximum
over all positions has a gradient in a few places only, which may all be tokens by chance. So many
places have to show it: `ENOUGH`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.batch import Lengths
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.serve.cut import RowGrowth, Rule, Slot, StepPlan, TensorSpec, Whole

_REACH = 1.5
"""How much longer than what was tried a batch may be."""


@dataclass(slots=True)
class Proof:
    """Whether the loss reads what a model gives where its batch is padded: see `watched`."""

    missing: float = 0.0
    """What gradients have yet to show, in computed calls: none comes from padding. Nothing shows it
    where no gradient is recorded; what was proved in training holds there as well."""
    num_watched: int = 0
    """Calls whose gradient was waited for, or could have been, since one has shown something."""
    seen: list[float] = field(default_factory=list)
    """What each gradient of the last of them has shown."""

    def take_in(self) -> None:
        """Count the last call that was watched, if its gradient has come."""
        seen, self.seen = self.seen, []
        if seen:
            shown = min(seen)
            self.missing = max(0.0, self.missing - shown)
            self.num_watched *= not shown  # a gradient of zero everywhere shows nothing


@dataclass(frozen=True, slots=True)
class OutputAxis:
    """Where one leaf of the model's output is padded: users see it, and may use it."""

    dim: int
    """Behind that of the samples; at least 1."""
    rule: Rule
    """How its size follows the lengths."""
    left: bool

    def fits(self, leaf: Any, lengths: Lengths) -> bool:
        """Whether a leaf of an output may have a gradient, and is as long as this batch."""
        size, batch_size = self.rule.at(lengths.whole), len(lengths.own)
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or size is None:
            return False
        return leaf.shape[:1] == (batch_size,) and leaf.shape[self.dim : self.dim + 1] == (size,)

    def is_padding(self, lengths: Lengths, size: int) -> np.ndarray:
        """Return where samples are padded: bool, shape (B, size)."""
        own = np.clip(self.rule.sizes(lengths), 0, size)[:, None]
        at = np.arange(size)[None]
        return np.asarray(at < size - own if self.left else at >= own)


@dataclass(slots=True, eq=False)
class DynamicShapes:
    """What a plan needs to know of other lengths than the one it was proved at."""

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
    constants: Mapping[Slot, Tensor] = field(default_factory=dict)
    """Of the longest batch that was tried: those of shorter ones are the beginning of them."""
    outputs: Mapping[int, OutputAxis] = field(default_factory=dict)
    """Leaves of the model's output that are padded."""
    proof: Proof = field(default_factory=Proof)
    """That the loss does not read them."""

    def is_beyond(self, whole: Whole) -> bool:
        """Whether batches of these lengths have to be studied: a model may do otherwise there."""
        return any(n > _REACH * most for n, most in zip(whole, self.reach, strict=True))

    def steps(self, known: Sequence[StepPlan], whole: Whole) -> list[StepPlan] | None:
        """Return the steps for batches of these lengths; None if that is not certain."""
        steps = []
        for i, step in enumerate(known):
            leaves, constants = list(step.leaves), dict(step.constants)
            for j, spec in enumerate(leaves):
                if (i, j) in self.rules:
                    leaves[j] = spec.grown(self.rules[i, j], whole)
                    if leaves[j] is None:
                        return None
            for j in constants:
                if (i, j) in self.rules:
                    longest, shape = self.constants[i, j], leaves[j].shape
                    if any(n < m for n, m in zip(longest.shape, shape, strict=True)):
                        return None
                    constants[j] = longest[tuple(slice(0, size) for size in shape)]
            steps.append(replace(step, leaves=leaves, constants=constants))
        return steps

    def of_rows(self, spec: TensorSpec, slot: Slot) -> RowGrowth | None:
        """Return how the rows of a cached tensor grow; None if they are all of one size."""
        rules = self.rules.get(slot)
        if not rules:
            return None
        rows = [(at, rules[dim]) for at, dim in enumerate(spec.row_dims) if dim in rules]
        dims = tuple((at, self.lefts[rule.axis_among(self.entered)]) for at, rule in rows)
        return RowGrowth(dims, tuple(rule for _, rule in rows), self.fills.get(slot, 0))


ENOUGH = 14.0
"""Places that have a gradient, over the positions of their batch, before anything is served. That a
maximum finds no padding in so many is a chance of one in a million."""
_OF_ONE_CALL = ENOUGH / 2
"""At most: batches differ."""
MAX_WATCHED = 8
"""Calls whose gradient is waited for; then it is said that none has come."""
_AGAIN_EVERY = 8
"""Calls after which it is looked again."""
NEGLIGIBLE = 1e-8
"""Of the largest gradient."""


def watched(growth: DynamicShapes, call: Invocation, output: Any, found: Callable[[], None]) -> Any:
    """Look at the gradient of a model's output when it comes; return the output to hand out.

    An output of a model that is frozen as a whole has no gradient by itself: the loop may go on
    from it, and it gets one for the first calls.

    Args:
        growth: Of the plan that the call belongs to; counts what was proved.
        call: What the model was called with.
        output: The model's.
        found: Called if the loss reads what is padded.
    """
    lengths = call.batch.lengths
    if lengths is None or not growth.outputs:
        return output
    proof = growth.proof
    proof.take_in()
    proof.num_watched += 1
    is_due = proof.missing > 0 or not proof.num_watched % _AGAIN_EVERY
    if not (is_due and torch.is_grad_enabled()):
        return output
    leaves, layout = call.result(output)
    seen, has_padding, replaced = list[float](), False, False
    for index, leaf in enumerate(leaves):
        axis = growth.outputs.get(index)
        if axis is None:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: seen.append(_OF_ONE_CALL))
        elif axis.fits(leaf, lengths):
            has_padding |= bool(axis.is_padding(lengths, leaf.shape[axis.dim]).any())
            look = partial(_look, seen, axis, lengths, found)
            if leaf.requires_grad:
                leaf.register_hook(look)
            else:
                root = leaf.detach().requires_grad_()
                root.register_hook(look)
                leaves[index] = root.clone().as_subclass(Followed)  # the loop may write into it
                replaced = True
    proof.seen = seen if has_padding else []
    return call.put(output, leaves, layout) if replaced else output


class Followed(Tensor):
    """A tensor with a gradient that may be used as if it had none."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        """See `Tensor.numpy`."""
        return self.detach().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.detach().__array__(*args, **kwargs)


def _look(
    seen: list[float], axis: OutputAxis, lengths: Lengths, found: Callable[[], None], grad: Tensor
) -> None:
    """See what the gradient of an output shows; one that no gradient reaches is not read."""
    with Attempt():
        size = grad.detach().movedim(axis.dim, 1).abs()[..., None].flatten(2)
        largest = size.max()
        if not largest.isfinite():
            return  # a scaled loss that overflowed
        shown = _OF_ONE_CALL
        places = (size > NEGLIGIBLE * largest).sum(2).cpu()
        padding = torch.from_numpy(axis.is_padding(lengths, size.shape[1]))
        if places[padding].any():
            found()
        elif padding.any():
            shown = min(shown, float(places[padding.any(1)].sum()) / size.shape[1])
        seen.append(shown)
