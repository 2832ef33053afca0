"""Whether what is cached of a sample is the same in any company: compared row by row.

What the model's own digits leave open is decided in float64, where rounding cannot be taken for a
dependence, or hide one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from egeria_cache.attempt import Attempt
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.prove.traced_batch import Recomputed, TracedBatch, recompute
from egeria_cache.skip.serve.call import PLAIN
from egeria_cache.skip.serve.compare import difference, slice_difference, tolerance
from egeria_cache.skip.serve.cut import Slot, TensorSpec
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.trace import PrefixTrace

_COARSE = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Imprecise(Exception):  # noqa: N818
    """Something was computed in fewer digits all the same."""


def doubled(tensor: Tensor) -> Tensor:
    """Return what stands for a tensor of the model, or of its inputs."""
    if not tensor.is_floating_point():
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().double(), tensor.requires_grad)
    return tensor.double()


class _Float64(TorchFunctionMode):
    """Reads every request for fewer digits as one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CASTS:
            func = Tensor.double
            args, kwargs = args[:1], {}
        args = [_wider(arg) for arg in args]
        result = func(*args, **{key: _wider(arg) for key, arg in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype in _COARSE:
            raise Imprecise
        return result


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _COARSE else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute with as many digits inside the block.

    Raises:
        Imprecise: Inside the block, where something does not follow.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


_PRECISE = 1e-6
"""Largest difference of a slice in float64 that may be rounding."""
_MAX_ODD, _COMPANY, _PAIR = 3, 6, 2
"""Rows that float64 decides about, that it runs together, and of a suspect that is run again."""
_WHOLE, _WHOLE_S = 16, 0.1
"""Rows, or seconds, of a batch that is run whole again."""


def check_trained(traced: TracedBatch, plan: ReplayPlan, part: Recomputed) -> None:
    """Raise if autograd says that what is cached was computed with something trained.

    Raises:
        BoundaryError: And with what.
    """
    for i, j in plan.slots().values():
        leaf = part.leaves[i][j]
        parameter = traced.trained_by(leaf) if leaf.requires_grad else None
        if parameter is not None:
            raise BoundaryError.trainable(plan.boundary, parameter)


def check_rows(
    traced: TracedBatch, parts: Sequence[Recomputed], plan: ReplayPlan, trace: PrefixTrace | None
) -> None:
    """Compare what is cached with the same samples in other company.

    Raises:
        BoundaryError: Something depends on its neighbours; names the first module that shows it.
    """
    suspects: list[Recomputed] = []
    odd: list[int] = []
    for slot in plan.slots().values():
        spec, value = plan.tensor_spec(slot), traced.leaf(*slot)
        for part, rows, a, b in _in_company(traced, spec, slot, parts):
            error = difference(a, b)
            if error > tolerance(value, plan.coarsest):
                if trace is not None and trace.draws:
                    why = trace.describe_draws(next(iter(trace.draws)))
                    raise BoundaryError.impure(plan.boundary, why)
                raise _blame(traced, parts, plan, error)
            strict = tolerance(value, as_stored=True)
            is_odd = error > strict or slice_difference(a, b) > strict
            if is_odd and all(part is not one for one in suspects):
                suspects.append(part)
                pairs = zip(a.split(1), b.split(1), strict=True)
                errors = [slice_difference(*pair) for pair in pairs]
                odd.append(rows[errors.index(max(errors))])
    if suspects:
        _check_precisely(traced, suspects[:_MAX_ODD], odd[:_MAX_ODD], plan)


def check_constants(parts: Sequence[Recomputed], plan: ReplayPlan) -> None:
    """Raise if what a skipped module always gives is not always the same.

    Raises:
        BoundaryError: And which module that is.
    """
    for i, step in enumerate(plan.steps):
        for part in parts:
            for j, (known, other) in enumerate(zip(step.leaves, part.leaves[i], strict=True)):
                value = step.constants.get(j)
                if value is not None:
                    error = difference(value, other)
                    if error > tolerance(value, plan.coarsest):
                        raise BoundaryError.mixes_samples(plan.boundary, step.name, error)
                elif isinstance(known, PLAIN) and (
                    type(other) is not type(known) or known != other
                ):
                    raise BoundaryError.impure(
                        plan.boundary,
                        f"{step.name!r} returns {known!r} for one batch and {other!r} for another",
                    )


def same_parts(plan: ReplayPlan, a: Recomputed, b: Recomputed) -> bool:
    """Whether what is cached is the same in two runs on the same rows."""
    pairs = ((a.leaves[i][j], b.leaves[i][j]) for i, j in plan.slots().values())
    return all(difference(x, y) <= tolerance(x, plan.coarsest) for x, y in pairs)


_Pairs = Iterator[tuple[Recomputed, list[int], Tensor, Tensor]]
"""(part, rows that were seen before, as they were first seen, the same in this part)"""


def _in_company(traced: TracedBatch, spec: Any, slot: Slot, parts: Sequence[Recomputed]) -> _Pairs:
    """Compare a leaf with the batch's; of a tensor that is no sample's all of it."""
    if not isinstance(spec, TensorSpec):
        return
    value = traced.leaf(*slot)
    if spec.batch_dim is not None:
        yield from _pairs(dict(enumerate(spec.to_rows(value))), spec, slot, parts)
        return
    for part in parts:
        yield part, [], value, part.leaves[slot[0]][slot[1]]


def _pairs(
    known: dict[int, Tensor], spec: TensorSpec, slot: Slot, parts: Sequence[Recomputed]
) -> _Pairs:
    """Compare a leaf's rows with what they were in the parts before, or in the batch."""
    for part in parts:
        rows = spec.to_rows(part.leaves[slot[0]][slot[1]])
        seen = [k for k, row in enumerate(part.rows) if row in known]
        if seen:
            again = [part.rows[k] for k in seen]
            yield part, again, torch.stack([known[row] for row in again]), rows[seen]
        for k, row in enumerate(part.rows):
            known.setdefault(row, rows[k])


def _check_precisely(
    traced: TracedBatch, suspects: Sequence[Recomputed], odd: Sequence[int], plan: ReplayPlan
) -> None:
    """Decide in float64 about differences that may be rounding, or are large only in a channel.

    The oddest row of each suspect is run in other company, by itself, and in the suspect's; so is
    the batch. It takes six times as long as before: where that is long, no more than a few rows.
    """
    others = sorted({row for part in suspects for row in part.rows}, reverse=True)
    company = list(dict.fromkeys([*odd, *others, *range(traced.size), traced.size]))[:_COMPANY]
    whole, again = [list(range(traced.size))], [part.rows for part in suspects]
    if traced.size > _WHOLE and traced.seconds[-1] > _WHOLE_S:
        whole, again = [], [rows for rows in again if len(rows) <= _PAIR]
    apart = [[row, row] for row in dict.fromkeys(odd) if [row] not in again]
    copied, parts = traced.copies.fresh(doubled), (company[::-1], *apart, *whole, *again)
    with Attempt() as tried, in_float64():
        runs = [recompute(traced, rows, copied=copied) for rows in parts]
    if tried.error is not None:
        return  # it cannot run so: the tolerance for the whole tensor has decided
    for i, j in plan.slots().values():
        for _, _, a, b in _pairs({}, plan.tensor_spec((i, j)), (i, j), runs):
            if (error := slice_difference(a, b)) > _PRECISE:
                raise BoundaryError.mixes_samples(plan.boundary, plan.steps[i].name, error)


def _blame(
    traced: TracedBatch, parts: Sequence[Recomputed], plan: ReplayPlan, error: float
) -> BoundaryError:
    """Name the first module whose output shows the difference."""
    for i, step in enumerate(plan.steps):
        for j, spec in enumerate(step.leaves):
            for _, _, a, b in _in_company(traced, spec, (i, j), parts):
                if (here := difference(a, b)) > tolerance(traced.leaf(i, j), plan.coarsest):
                    return BoundaryError.mixes_samples(plan.boundary, step.name, here)
    return BoundaryError.mixes_samples(plan.boundary, plan.boundary, error)
