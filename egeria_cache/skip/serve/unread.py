"""Whether a training loop reads what the model gives where its batch is padded.

A hit has other values there than the plain model. Where the gradient of an output is zero at all
padded positions, the loss does not know of them, whoever computes it; unless it selects. A maximum
over all positions has a gradient in a few places only, which may all be tokens by chance. So many
places have to show it: `ENOUGH`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.batch import Lengths
from egeria_cache.skip.serve.invocation import Invocation
from egeria_cache.skip.serve.padded import OutputAxis, Proof
from egeria_cache.skip.serve.recipe import Growth

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


def awaits_proof(growth: Growth | None) -> bool:
    """Whether a call has to be computed plainly: nothing shows yet that the loss reads no padding.

    Nor does anything show it where no gradient is recorded; what was proved in training holds there
    as well.
    """
    if growth is None or not growth.proof.missing:
        return False
    _take_in(growth.proof)
    return growth.proof.missing > 0


def watched(growth: Growth | None, call: Invocation, output: Any, found: Callable[[], None]) -> Any:
    """Look at the gradient of a model's output when it comes; return the output to hand out.

    An output of a model that is frozen as a whole has no gradient by itself: the loop may go on
    from it, and it gets one for the first calls.

    Args:
        growth: Of the recipe that the call belongs to; counts what was proved.
        call: What the model was called with.
        output: The model's.
        found: Called if the loss reads what is padded.
    """
    lengths = call.batch.lengths
    if growth is None or lengths is None or not growth.outputs:
        return output
    proof = growth.proof
    _take_in(proof)
    proof.num_watched += 1
    if not torch.is_grad_enabled():
        return output
    is_proving = proof.missing > 0
    if not is_proving and proof.num_watched % _AGAIN_EVERY:
        return output
    leaves, layout = call.result(output)
    seen, replaced = Seen(), False
    for index, leaf in enumerate(leaves):
        axis = growth.outputs.get(index)
        if axis is None:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(seen.backward)
        elif axis.fits(leaf, lengths):
            size = axis.arranged(leaf, len(lengths.own)).shape[1]
            seen.has_padding |= bool(axis.is_padding(lengths, size).any())
            look = partial(_look, seen, axis, lengths, found)
            if leaf.requires_grad:
                leaf.register_hook(look)
            else:
                root = leaf.detach().requires_grad_()
                root.register_hook(look)
                leaves[index] = root.clone().as_subclass(Followed)  # the loop may write into it
                replaced = True
    proof.seen = seen
    return call.put(output, leaves, layout) if replaced else output


class Followed(Tensor):
    """A tensor with a gradient that may be used as if it had none."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        """See `Tensor.numpy`."""
        return self.detach().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.detach().__array__(*args, **kwargs)


class Seen:
    """What came of one call that was watched."""

    def __init__(self) -> None:
        self.has_padding = False
        self.came_back = False
        """Whether a gradient has reached an output: padding would have been seen in it."""
        self.shown = _OF_ONE_CALL
        """What that shows; an output that no gradient reaches is not read."""

    def backward(self, grad: Tensor) -> None:
        """A gradient has come."""
        self.came_back = True


def _take_in(proof: Proof) -> None:
    """Count the last call that was watched, if its gradient has come."""
    seen, proof.seen = proof.seen, None
    if seen is not None and seen.has_padding and seen.came_back:
        proof.missing = max(0.0, proof.missing - seen.shown)
        proof.num_watched *= not seen.shown  # a gradient of zero everywhere shows nothing


def _look(
    seen: Seen, axis: OutputAxis, lengths: Lengths, found: Callable[[], None], grad: Tensor
) -> None:
    with Attempt():
        _look_at(seen, axis, lengths, found, grad)


def _look_at(
    seen: Seen, axis: OutputAxis, lengths: Lengths, found: Callable[[], None], grad: Tensor
) -> None:
    size = axis.arranged(grad.detach(), len(lengths.own)).abs()[..., None].flatten(2)
    largest = size.max()
    if not largest.isfinite():
        return  # a scaled loss that overflowed
    seen.came_back = True
    places = (size > NEGLIGIBLE * largest).sum(2).cpu()
    padding = torch.from_numpy(axis.is_padding(lengths, size.shape[1]))
    if places[padding].any():
        found()
    elif padding.any():
        shown = float(places[padding.any(1)].sum()) / size.shape[1]
        seen.shown = min(seen.shown, shown)
