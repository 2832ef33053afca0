"""Whether a training loop reads what the model gives where its batch is padded.

A hit has other values there than the plain model. Where the gradient of an output is zero at all
padded positions, the loss does not know of them, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from egeria_cache.batch import Lengths
from egeria_cache.skip.serve.growth import Growth
from egeria_cache.skip.serve.padded import OutputAxis

__all__ = ["CALLS_TO_PROVE", "awaits_proof", "watched"]

CALLS_TO_PROVE = 2
"""Computed batches whose gradient must be zero in the padding before anything is served."""
_MAX_WATCHED = 8
"""Calls that are computed for that; what comes without a backward is no training."""
_AGAIN_EVERY = 64
"""Calls after which it is looked again."""
_NEGLIGIBLE = 1e-6
"""Of the largest gradient."""


def awaits_proof(growth: Growth | None) -> bool:
    """Whether a call has to be computed plainly, for its gradient to be looked at."""
    if growth is None or not growth.unproved or not torch.is_grad_enabled():
        return False
    _take_in(growth)
    return bool(growth.unproved) and growth.num_watched < _MAX_WATCHED


def watched(
    growth: Growth | None, output: Any, lengths: Lengths | None, found: Callable[[], None]
) -> Any:
    """Look at the gradient of a model's output when it comes; return the output to hand out.

    An output of a model that is frozen as a whole has no gradient by itself: the loop may go on
    from it, and it gets one for the first calls.

    Args:
        growth: Of the recipe that the call belongs to; counts what was proved.
        output: The model's.
        lengths: Of the batch.
        found: Called if the loss reads what is padded.
    """
    if growth is None or lengths is None or not growth.outputs or not torch.is_grad_enabled():
        return output
    _take_in(growth)
    growth.num_watched += 1
    is_proving = growth.unproved and growth.num_watched <= _MAX_WATCHED
    if not is_proving and growth.num_watched % _AGAIN_EVERY:
        return output
    leaves, spec = tree_flatten(output)
    seen = growth.seen = Seen()
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        axis = growth.outputs.get(index)
        if axis is None:
            if leaf.requires_grad:
                leaf.register_hook(seen.backward)
            continue
        look = partial(_look, seen, axis, lengths, found)
        if leaf.requires_grad:
            leaf.register_hook(look)
        elif is_proving:
            root = leaf.detach().requires_grad_()
            root.register_hook(look)
            leaves[index] = root.clone()  # the loop may write into it
    seen.has_padding = any(
        axis.is_padding(lengths, leaves[index].shape[axis.dim]).any()
        for index, axis in growth.outputs.items()
    )
    return tree_unflatten(leaves, spec)


class Seen:
    """What came of one call that was watched."""

    def __init__(self) -> None:
        self.has_padding = False
        self.came_back = False
        """Whether a gradient has reached an output: padding would have been seen in it."""

    def backward(self, grad: Tensor) -> None:
        """A gradient has come."""
        self.came_back = True


def _take_in(growth: Growth) -> None:
    """Count the last call that was watched as a proof, if it was one."""
    seen, growth.seen = growth.seen, None
    if seen is not None and seen.has_padding and seen.came_back:
        growth.unproved = max(0, growth.unproved - 1)


def _look(
    seen: Seen, axis: OutputAxis, lengths: Lengths, found: Callable[[], None], grad: Tensor
) -> None:
    size = grad.detach().abs()
    rest = [dim for dim in range(grad.dim()) if dim not in (0, axis.dim)]
    largest = (size.amax(rest) if rest else size).cpu()
    if not largest.isfinite().all():
        return  # a scaled loss that overflowed
    seen.came_back = True
    padding = torch.from_numpy(axis.is_padding(lengths, grad.shape[axis.dim]))
    if padding.any() and largest[padding].max() > _NEGLIGIBLE * largest.max():
        found()
