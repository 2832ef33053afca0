"""Whether what is cached of a sample is the same in any company: compared row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.prove.evidence import Evidence, Recomputed, recompute
from egeria_cache.skip.prove.precise import doubled, in_float64
from egeria_cache.skip.serve.compare import difference, slice_difference, tolerance
from egeria_cache.skip.serve.cut import TensorSpec
from egeria_cache.skip.serve.recipe import Recipe, Slot
from egeria_cache.skip.serve.trace import PrefixTrace

__all__ = ["check_constants", "check_rows", "check_trained", "same_parts"]

_PRECISE = 1e-6
"""Largest difference of a slice in float64 that may be rounding."""


def check_trained(evidence: Evidence, recipe: Recipe, part: Recomputed) -> None:
    """Raise if autograd says that what is cached was computed with something trained.

    Raises:
        BoundaryError: And with what.
    """
    for i, j in recipe.slots().values():
        leaf = part.leaves[i][j]
        parameter = evidence.trained_by(leaf) if leaf.requires_grad else None
        if parameter is not None:
            raise BoundaryError.trainable(recipe.boundary, parameter)


def check_rows(
    evidence: Evidence, parts: Sequence[Recomputed], recipe: Recipe, trace: PrefixTrace | None
) -> None:
    """Compare what is cached with the same samples in other company.

    Raises:
        BoundaryError: Something depends on its neighbours; names the first module that shows it.
    """
    suspects: list[Recomputed] = []
    for slot in recipe.slots().values():
        spec, value = recipe.tensor_spec(slot), evidence.leaf(*slot)
        for part, a, b in _pairs(evidence, spec, slot, parts):
            error = difference(a, b)
            if error > tolerance(value):
                if trace is not None and trace.draws:
                    raise BoundaryError.impure(recipe.boundary, trace.describe_draws())
                raise _blame(evidence, parts, recipe, error)
            strict = tolerance(value, as_stored=True)
            is_odd = error > strict or slice_difference(a, b) > strict
            if is_odd and part not in suspects:
                suspects.append(part)
    if suspects:
        _check_precisely(evidence, suspects[:3], recipe)


def check_constants(evidence: Evidence, parts: Sequence[Recomputed], recipe: Recipe) -> None:
    """Raise if what a skipped module always gives is not always the same.

    Raises:
        BoundaryError: And which module that is.
    """
    for i, step in enumerate(recipe.steps):
        for part in () if step.run else parts:
            for j, (known, other) in enumerate(zip(step.leaves, part.leaves[i], strict=True)):
                value = step.constants.get(j)
                if value is not None:
                    error = difference(value, other)
                    if error > tolerance(value):
                        raise BoundaryError.mixes_samples(recipe.boundary, step.name, error)
                elif isinstance(known, int | float | str | bool) and known != other:
                    raise BoundaryError.impure(
                        recipe.boundary,
                        f"{step.name!r} returns {known!r} for one batch and {other!r} for another",
                    )


def same_parts(recipe: Recipe, a: Recomputed, b: Recomputed) -> bool:
    """Whether what is cached is the same in two runs on the same rows."""
    pairs = ((a.leaves[i][j], b.leaves[i][j]) for i, j in recipe.slots().values())
    return all(difference(x, y) <= tolerance(x) for x, y in pairs)


def _pairs(
    evidence: Evidence, spec: TensorSpec, slot: Slot, parts: Sequence[Recomputed]
) -> Iterator[tuple[Recomputed, Tensor, Tensor]]:
    """Yield (part, rows as they were first seen, the same rows in this part)."""
    known = dict(enumerate(spec.to_rows(evidence.leaf(*slot), evidence.size)))
    for part in parts:
        rows = spec.to_rows(part.leaves[slot[0]][slot[1]], len(part.rows))
        seen = [k for k, row in enumerate(part.rows) if row in known]
        if seen:
            yield part, torch.stack([known[part.rows[k]] for k in seen]), rows[seen]
        for k, row in enumerate(part.rows):
            known.setdefault(row, rows[k])


def _check_precisely(evidence: Evidence, parts: Sequence[Recomputed], recipe: Recipe) -> None:
    """Decide in float64 about differences that may be rounding, or are large only in a channel."""
    with Attempt() as tried:
        whole = _in_double(evidence, list(range(evidence.size)))
        again = [_in_double(evidence, part.rows) for part in parts]
    if tried.error is not None:
        return  # it cannot run so: the tolerance for the whole tensor has decided
    for i, j in recipe.slots().values():
        spec = recipe.tensor_spec((i, j))
        if not spec.dtype.is_floating_point:
            continue
        known = spec.to_rows(whole.leaves[i][j], evidence.size)
        for part in again:
            rows = spec.to_rows(part.leaves[i][j], len(part.rows))
            seen = [k for k, row in enumerate(part.rows) if row < evidence.size]
            error = slice_difference(known[[part.rows[k] for k in seen]], rows[seen])
            if seen and error > _PRECISE:
                raise BoundaryError.mixes_samples(recipe.boundary, recipe.steps[i].name, error)


def _in_double(evidence: Evidence, rows: list[int]) -> Recomputed:
    twin = evidence.twins.fresh(doubled)
    with in_float64():
        return recompute(evidence, rows, twin=twin)


def _blame(
    evidence: Evidence, parts: Sequence[Recomputed], recipe: Recipe, error: float
) -> BoundaryError:
    """Name the first module whose output shows the difference."""
    for i, step in enumerate(recipe.steps):
        for j, spec in enumerate(step.leaves):
            if not isinstance(spec, TensorSpec):
                continue
            for here in _differences(evidence, spec, (i, j), parts):
                if here > tolerance(evidence.leaf(i, j)):
                    return BoundaryError.mixes_samples(recipe.boundary, step.name, here)
    return BoundaryError.mixes_samples(recipe.boundary, recipe.boundary, error)


def _differences(
    evidence: Evidence, spec: TensorSpec, slot: Slot, parts: Sequence[Recomputed]
) -> Iterator[float]:
    if spec.batch_dim is None:
        for part in parts:
            yield difference(evidence.leaf(*slot), part.leaves[slot[0]][slot[1]])
        return
    for _, a, b in _pairs(evidence, spec, slot, parts):
        yield difference(a, b)
