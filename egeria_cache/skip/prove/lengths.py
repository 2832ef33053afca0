"""Whether a sample's activation is the same however far its batch is padded.

The prefix is run on shorter batches, made of the shorter samples, and on longer ones. What is
cached of a sample must come out the same where the sample is; sizes must follow the lengths by a
rule.

The rest of the model makes nothing of what stands in the padding, padding itself excepted. It is
overwritten twice, each time with something else. Where the model's output notices must be
padding; whether the loss reads that is seen in its gradient (`serve/dynamic_shapes.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.batch import Lengths
from egeria_cache.errors import BoundaryError, PaddingError
from egeria_cache.ragged import PaddedRows, inside, widen
from egeria_cache.skip.prove.model_copy import take
from egeria_cache.skip.prove.traced_batch import Recomputed, TracedBatch
from egeria_cache.skip.serve.call import plain
from egeria_cache.skip.serve.compare import difference, tolerance
from egeria_cache.skip.serve.cut import RowGrowth, Rule, Slot, TensorSpec, Whole
from egeria_cache.skip.serve.dynamic_shapes import DynamicShapes, OutputAxis
from egeria_cache.skip.serve.plan import ReplayPlan

Part = tuple[Whole, Recomputed, bool]
"""Lengths, the prefix on a batch of them, and whether its samples are whole."""
_MAX_ALONE = 8
"""Samples that are run without any padding: what reads one position too far shows there."""
_MAX_FURTHER, _NUM_ASKED = 16, 65
"""Runs of one sample at lengths of which nothing certain is known: each halves what strides leave
open. And how many lengths are asked about."""
_OF_THE_TOLERANCE = 1e-3
"""What the same computation may differ by where sums have no fixed order."""


def study_lengths(traced: TracedBatch, plan: ReplayPlan) -> DynamicShapes | None:
    """Return how the plan looks at other lengths; None if the batch is not padded.

    Raises:
        BoundaryError: What is cached of a sample depends on the padding, or follows no rule.
    """
    lengths = traced.call.batch.lengths
    if lengths is None:
        return None
    parts = [(lengths.whole, traced.plain, True), *_parts(traced, plan, lengths)]
    if len(parts) == 1:
        why = "the model takes no batch of other lengths than the first, which has no padding"
        raise PaddingError.at(plan.boundary, why)
    rules = _rules(plan, parts)
    shortest = int(lengths.own.sum(1).argmin())
    for _ in range(_MAX_FURTHER):
        target = _uncertain(rules, lengths, lengths.own[shortest])
        if target is None:
            break
        with Attempt(but=BoundaryError) as trial:
            parts.append((target, _at(traced, lengths, [shortest], target), True))
        if trial.error is not None:
            break
        rules = _rules(plan, parts)
    tried = [whole for whole, _, are_whole in parts if are_whole]
    entered = {traced.call.tagged[i].leaf for i in plan.entered if i in traced.call.tagged}
    axes = lengths.padding.axes
    growth = DynamicShapes(
        rules, {}, tuple(axis.left for axis in axes), tuple(np.array(tried).max(0).tolist()),
        frozenset(i for i, axis in enumerate(axes) if axis.leaf in entered),
    )  # fmt: skip
    plan.growth = growth
    for whole, part, are_whole in parts:
        if are_whole:
            _check_samples(traced, plan, lengths, whole, part)
    growth.constants = dict(_constants(plan, [part for _, part, _ in parts]))
    growth.fills = {slot: _fill(traced, plan, slot, lengths) for slot in plan.slots().values()}
    return growth


# ---- runs at other lengths -----------------------------------------------------------------------


def _uncertain(
    rules: Mapping[Slot, Mapping[int, Rule]], lengths: Lengths, least: np.ndarray
) -> Whole | None:
    """Return lengths, from the least to the batch's own, at which it is not certain how large
    something is; of several the middle ones.
    """
    units, most = _units(lengths), np.array(lengths.whole)
    steps = np.linspace(0, max((most - least) // units), _NUM_ASKED).astype(int)
    asked = [tuple(np.minimum(most, least + step * units).tolist()) for step in steps]
    each = [rule for found in rules.values() for rule in found.values()]
    unknown = [whole for whole in asked if any(rule.at(whole) is None for rule in each)]
    return unknown[len(unknown) // 2] if unknown else None


def _parts(traced: TracedBatch, plan: ReplayPlan, lengths: Lengths) -> Iterator[Part]:
    """Run the prefix at other lengths."""
    own, whole, units = lengths.own, np.array(lengths.whole), _units(lengths)
    order = np.argsort(own.sum(1), kind="stable").tolist()
    alone = {tuple(own[row].tolist()): row for row in order}  # of each length one
    some = list(alone.values())[:: -(-len(alone) // _MAX_ALONE)]
    shorter = [order[: max(1, len(order) // 2)], *([row] for row in some)]
    trials = [(rows, tuple(own[rows].max(0).tolist()), True) for rows in shorter]
    further = [
        _longer(lengths, units),  # by little: what is sliced in steps shows there
        tuple((2 * whole).tolist()),  # by much: a padded position in many may pass for rounding
        tuple(np.maximum(units, whole // 2 // units * units).tolist()),
    ]
    trials += [(order[: min(4, len(order))], target, False) for target in further]
    tried = [lengths.whole]
    for rows, target, has_to_run in trials:
        is_whole = has_to_run or target[0] > whole[0]
        # Whether the lengths tried differ enough for a rule, along each axis.
        are_far = bool((np.min(tried, 0) <= 0.8 * np.max(tried, 0)).all())
        if target in tried or (are_far and not is_whole):
            continue
        tried.append(target)
        with Attempt(but=BoundaryError) as trial:
            part = _at(traced, lengths, rows, target)
        if trial.error is None:  # no longer than the model takes, nor cut where it must not be
            yield target, part, is_whole
        elif has_to_run:
            what = f"{type(trial.error).__name__}: {trial.error}"
            why = f"the model does not take the batch's shorter samples by themselves ({what}); "
            why += "what is as long as the batch, and not the loader's, the collate_fn should give"
            raise PaddingError.at(plan.boundary, why) from trial.error


def _units(lengths: Lengths) -> np.ndarray:
    """Return the step in which lengths grow along each axis: collate functions round them up."""
    common = np.gcd.reduce(lengths.own)
    return np.where(common % 2 == 0, np.gcd(common, 64), 1)


def _longer(lengths: Lengths, units: np.ndarray) -> Whole:
    """Return greater lengths, those that may differ by other amounts."""
    own_of = [(*own, size) for own, size in zip(lengths.own.T.tolist(), lengths.whole, strict=True)]
    longer = [1 + 2 * own_of.index(own) for own in own_of]
    return tuple((lengths.whole + units * longer).tolist())


def _at(traced: TracedBatch, lengths: Lengths, rows: list[int], target: Whole) -> Recomputed:
    call, padding = traced.call, lengths.padding

    def resize(position: int, leaf: Tensor) -> Tensor:
        tagged = call.tagged[position]
        path = tagged.leaf
        if path not in padding.values:
            return leaf
        if tagged.chain:  # what the loop did is done to other rows of the leaf as it came
            batch = call.batch
            came = batch.leaves.get(path)
            if not isinstance(came, Tensor) or len(came) != batch.size:
                came = batch.load_rows(np.ones(batch.size, bool))[path]
            leaf = take(plain(came), rows, batch.size)
        dims, sizes = padding.dims(path), [target[i] for i in padding.positions(path)]
        own = [min(n, leaf.shape[dim + 1]) for n, (dim, _) in zip(sizes, dims, strict=True)]
        leaf = widen(inside(leaf, dims, own, 1), dims, sizes, padding.values[path]).contiguous()
        for op in tagged.chain:
            leaf = op.run(leaf)
        return leaf

    return traced.recompute(rows, resize=resize)


# ---- what was seen -------------------------------------------------------------------------------


def _rules(plan: ReplayPlan, parts: Sequence[Part]) -> dict[Slot, dict[int, Rule]]:
    found: dict[Slot, dict[int, Rule]] = {}
    for i, step in enumerate(plan.steps):
        for j, spec in enumerate(step.leaves) if not step.run else ():
            if not isinstance(spec, TensorSpec):
                is_plain = isinstance(spec, int | float | str | bool)
                if is_plain and any(part.leaves[i][j] != spec for _, part, _ in parts):
                    raise _odd(plan, step.name)
                continue
            runs = [(whole, part.leaves[i][j], len(part.rows)) for whole, part, _ in parts]
            if any(value.dim() != len(spec.shape) for _, value, _ in runs):
                raise _odd(plan, step.name)
            for dim in range(len(spec.shape)):
                sizes = [
                    (whole, value.shape[dim] // (size if dim == spec.batch_dim else 1))
                    for whole, value, size in runs
                ]
                if len({size for _, size in sizes}) == 1:
                    continue  # it follows nothing
                rule = Rule(dict(sizes))
                if len(set(sizes)) > len(dict(sizes)) or not rule.explains:
                    raise _odd(plan, step.name)
                found.setdefault((i, j), {})[dim] = rule
    return found


def _odd(plan: ReplayPlan, name: str) -> PaddingError:
    return PaddingError.at(
        plan.boundary,
        f"the size of what {name!r} returns does not follow the lengths of the samples in a simple "
        "way; pad all samples to one length, or choose an earlier boundary",
    )


def _check_samples(
    traced: TracedBatch, plan: ReplayPlan, lengths: Lengths, whole: Whole, part: Recomputed
) -> None:
    """Compare what is cached of each sample with what it is in a batch of other lengths."""
    assert plan.growth is not None
    shapes, of_these = plan.growth, lengths.select(np.array(part.rows))

    for slot in plan.slots().values():
        name, spec = plan.steps[slot[0]].name, plan.tensor_spec(slot)
        there = spec.grown(shapes.rules.get(slot, {}), whole)
        if there is None:
            raise _odd(plan, name)
        a = spec.to_rows(traced.leaf(*slot))[torch.tensor(part.rows)]
        b = there.to_rows(part.leaves[slot[0]][slot[1]])
        growth = shapes.of_rows(spec, slot)
        pairs: Iterable[tuple[Tensor, Tensor]] = zip(a, b, strict=True)
        if growth is not None:
            sizes = growth.surely(of_these)
            pairs = zip(*(PaddedRows(rows, growth.dims, sizes) for rows in (a, b)), strict=True)
        for x, y in pairs:
            if (error := difference(x, y)) > tolerance(x, plan.coarsest):
                raise PaddingError.reads_padding(plan.boundary, repr(name), error)


def _constants(plan: ReplayPlan, parts: Sequence[Recomputed]) -> Iterator[tuple[Slot, Tensor]]:
    """Yield the longest of each constant that follows lengths: of all that were seen one must be
    the beginning of another.
    """
    for i, step in enumerate(plan.steps):
        for j, value in step.constants.items():
            others = [part.leaves[i][j] for part in parts]
            for other in others:
                both = zip(value.shape, other.shape, strict=True)
                shared = tuple(slice(0, min(n, m)) for n, m in both)
                error = difference(value[shared], other[shared])
                if error > tolerance(value, plan.coarsest):
                    raise PaddingError.reads_padding(plan.boundary, repr(step.name), error)
            yield (i, j), max(others, key=Tensor.numel).detach().clone()


def _fill(traced: TracedBatch, plan: ReplayPlan, slot: Slot, lengths: Lengths) -> Any:
    """Return what to write into padding: what always stands there (a mask), or zero."""
    spec = plan.tensor_spec(slot)
    if plan.growth is None or (growth := plan.growth.of_rows(spec, slot)) is None:
        return 0
    rows = spec.to_rows(traced.leaf(*slot))
    there = rows[_is_padding(growth, rows, lengths)]
    return there[0].item() if there.numel() and bool((there == there[0]).all()) else 0


def _is_padding(growth: RowGrowth, rows: Tensor, lengths: Lengths) -> Tensor:
    """Return where rows are padded, where that is filled with zeros."""
    return growth.blanked(torch.ones_like(rows), lengths) == 0


def fillings(
    traced: TracedBatch, plan: ReplayPlan, rows: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return the rows as the store gives them back: once, or twice with other padding."""
    lengths, growth = traced.call.batch.lengths, plan.row_growth()
    if lengths is None or not growth:
        return [dict(rows)]
    plainly = {n: growth[n].blanked(t, lengths) if n in growth else t for n, t in rows.items()}
    otherwise = dict(plainly)
    for name, how in growth.items():
        values = plainly[name]
        if values.is_floating_point() and how.fill == 0:
            noise = torch.linspace(-1, 1, values.numel()).view(values.shape)
            # Large, so that it shows through a small coefficient; in half precision not too large.
            size = 10 if values.dtype == torch.float16 else 100
            noise = noise.to(values) * size * float(rows[name].float().abs().mean())
            otherwise[name] = torch.where(_is_padding(how, values, lengths), noise, values)
    return [plainly, otherwise]


def padded_axis(
    traced: TracedBatch, plan: ReplayPlan, leaves: tuple[Tensor, Tensor, Tensor]
) -> OutputAxis:
    """Return the dimension along which all differences of one leaf of the output lie in the
    padding.

    Args:
        traced: The plain run.
        plan: What was replayed.
        leaves: Of the plain result, and of the replays' in the order of `fillings`.

    Raises:
        BoundaryError: What stands in the padding reaches what a user reads of a sample.
    """
    a, growth, lengths = leaves[0], plan.growth, traced.call.batch.lengths
    assert growth is not None
    assert lengths is not None
    axes = range(len(lengths.whole))
    rules = [Rule.longer_by(offset, axis) for offset in (0, -1, 1) for axis in axes]
    rules += [rule for found in growth.rules.values() for rule in found.values()]
    has_rows = a.dim() > 0 and len(a) == traced.size
    dims = range(1, a.dim()) if has_rows else ()
    for rule, dim in itertools.product(rules, dims):
        if a.shape[dim] == rule.at(lengths.whole):
            found = OutputAxis(dim, rule, growth.lefts[rule.axis_among(growth.entered)])
            own, plainly, otherwise = _inside(leaves, found, lengths)
            if difference(own, plainly) <= tolerance(a) and is_same(plainly, otherwise):
                return found
    what = "output" if a.dim() else "loss"
    raise PaddingError.reads_padding(plan.boundary, f"the model's {what}")


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs of one computation are equal, padding excepted: the same kernels have
    run on the same shapes, in the same order where they run on the host.
    """
    return difference(a, b) <= (0.0 if a.is_cpu else tolerance(a) * _OF_THE_TOLERANCE)


def _inside(outputs: Sequence[Tensor], axis: OutputAxis, lengths: Lengths) -> list[Tensor]:
    """Return what outputs hold elsewhere than in the padding, which must be equal."""
    moved = [output.movedim(axis.dim, 1) for output in outputs]
    there = torch.from_numpy(~axis.is_padding(lengths, moved[0].shape[1])).to(moved[0].device)
    return [output[there] for output in moved]
