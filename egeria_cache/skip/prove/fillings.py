"""What the rest of the model makes of what stands in the padding: nothing, padding itself excepted.

It is overwritten twice, each time with something else. Where the model's output notices must be
padding; whether the loss reads that is seen in its gradient (`serve/unread.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egeria_cache.batch import Lengths
from egeria_cache.errors import PaddingError
from egeria_cache.ragged import blank
from egeria_cache.skip.prove.evidence import Evidence
from egeria_cache.skip.serve.compare import difference, tolerance
from egeria_cache.skip.serve.growth import Growth
from egeria_cache.skip.serve.padded import OutputAxis
from egeria_cache.skip.serve.recipe import Recipe
from egeria_cache.skip.serve.rule import Rule
from egeria_cache.skip.serve.unread import ENOUGH, NEGLIGIBLE

__all__ = ["check_losses", "compared", "fillings", "find_output_axes"]

_OF_THE_TOLERANCE = 1e-3
"""What the same computation may differ by where sums have no fixed order."""


def fillings(
    evidence: Evidence, recipe: Recipe, rows: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return the rows as the store gives them back: once, or twice with other padding."""
    lengths, growth = evidence.call.batch.lengths, recipe.row_growth()
    if lengths is None or not growth:
        return [dict(rows)]
    plainly, otherwise = dict(rows), dict(rows)
    for name, how in growth.items():
        plainly[name] = how.blanked(rows[name], lengths)
        otherwise[name] = plainly[name]
        if rows[name].is_floating_point() and how.fill == 0:
            noise = torch.linspace(-1, 1, rows[name].numel()).view(rows[name].shape)
            # Large, so that it shows through a small coefficient; in half precision not too large.
            size = 10 if rows[name].dtype == torch.float16 else 100
            noise = noise.to(rows[name]) * size * float(rows[name].float().abs().mean())
            inside = how.blanked(torch.ones_like(rows[name]), lengths) != 0
            otherwise[name] = torch.where(inside, plainly[name], noise)
    return [plainly, otherwise]


def find_output_axes(evidence: Evidence, recipe: Recipe, outputs: Sequence[list[Any]]) -> None:
    """Find where the model's output is padded: it may be anything there, and nowhere else.

    Args:
        evidence: The plain run.
        recipe: Is told.
        outputs: The leaves of the replays' results, in the order of `fillings`.

    Raises:
        BoundaryError: What stands in the padding reaches what a user reads of a sample.
    """
    growth, lengths = recipe.growth, evidence.call.batch.lengths
    if growth is None or lengths is None or len(outputs) < 2:
        return
    axes: dict[int, OutputAxis] = {}
    for index, leaves in enumerate(zip(evidence.result[0], *outputs, strict=True)):
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            continue
        a, b, c = leaves
        if a.shape != b.shape or (_same(b, c) and difference(a, b) <= tolerance(a)):
            continue
        axis = _axis_of((a, b, c), growth, lengths, evidence.size)
        if axis is None:
            raise PaddingError.reads_padding(recipe.boundary, "the model's output")
        axes[index] = axis
    growth.outputs = axes
    growth.proof.missing = ENOUGH if axes else 0.0


def check_losses(
    evidence: Evidence, recipe: Recipe, leaves: list[Any], roots: Mapping[str, Tensor]
) -> None:
    """Look at the gradient of losses that the model computes: none may come from padding.

    Args:
        evidence: The plain run, which recorded gradients.
        recipe: Its tensors are padded.
        leaves: Of a replay's result.
        roots: What it was given, by name.

    Raises:
        PaddingError: One does.
    """
    lengths = evidence.call.batch.lengths
    losses = [
        leaf for leaf in leaves
        if isinstance(leaf, Tensor) and not leaf.dim() and leaf.requires_grad
    ]  # fmt: skip
    for loss in losses:
        grads = torch.autograd.grad(
            loss, list(roots.values()), retain_graph=True, allow_unused=True
        )
        for name, grad in zip(roots, grads, strict=True):
            growth = recipe.row_growth().get(name)
            if grad is None or growth is None or lengths is None or not grad.isfinite().all():
                continue
            rows = growth.stripped(grad, lengths)
            outside = grad - blank(grad, rows.dims, rows.sizes, 0)
            if outside.abs().max() > NEGLIGIBLE * grad.abs().max():
                raise PaddingError.reads_padding(recipe.boundary, "the model's loss")


def _axis_of(
    leaves: tuple[Tensor, Tensor, Tensor], growth: Growth, lengths: Lengths, size: int
) -> OutputAxis | None:
    """Return the dimension along which all differences lie in the padding."""
    a, b, c = leaves
    axes = range(len(lengths.whole))
    rules = [Rule.longer_by(offset, axis) for offset in (0, -1, 1) for axis in axes]
    rules += [rule for found in growth.rules.values() for rule in found.values()]
    for rule in rules:
        length = rule.at(lengths.whole)
        for form, dim in _places(a, size, length):
            found = OutputAxis(dim, rule, growth.lefts[rule.axis_among(growth.entered)], form)
            like_plain = _outside(a, b, found, lengths)
            if difference(*like_plain) <= tolerance(a) and _same(*_outside(b, c, found, lengths)):
                return found
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs of one computation are equal, padding excepted: the same kernels have
    run on the same shapes, in the same order where they run on the host.
    """
    return difference(a, b) <= (0.0 if a.is_cpu else tolerance(a) * _OF_THE_TOLERANCE)


def _places(tensor: Tensor, size: int, length: int | None) -> Iterator[tuple[str, int]]:
    """Yield (form, dimension) where a tensor may have so many positions for each sample."""
    shape = tensor.shape
    if length is None or not shape:
        return
    if shape[0] == size:
        yield from (("rows", dim) for dim in range(1, len(shape)) if shape[dim] == length)
    if shape[:2] == (length, size):
        yield "time", 1
    if shape[0] == length * size:
        yield "folded", 1


def _outside(a: Tensor, b: Tensor, axis: OutputAxis, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Return what two outputs hold elsewhere than in the padding."""
    a, b = (axis.arranged(tensor, len(lengths.own)) for tensor in (a, b))
    inside = torch.from_numpy(~axis.is_padding(lengths, a.shape[1])).to(a.device)
    return a[inside], b[inside]


def compared(
    output: Tensor, other: Tensor, axis: OutputAxis | None, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    """Return the parts of two outputs that must be equal."""
    if axis is None or lengths is None:
        return output, other
    return _outside(output, other, axis, lengths)
