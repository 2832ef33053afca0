"""From the plain run of one batch to a plan, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from egeria_cache.attempt import Attempt
from egeria_cache.batch import overlap
from egeria_cache.errors import BatchError, BoundaryError
from egeria_cache.pystate import RandomState
from egeria_cache.skip.prove import probe, purity
from egeria_cache.skip.prove.lengths import fillings, is_same, padded_axis, study_lengths
from egeria_cache.skip.prove.model_copy import ModelCopy, trainable
from egeria_cache.skip.prove.probe import Prober
from egeria_cache.skip.prove.purity import Repeats, is_left_otherwise, same_parts
from egeria_cache.skip.prove.traced_batch import Recomputed, TracedBatch, moved
from egeria_cache.skip.serve.address import prefix_tensors
from egeria_cache.skip.serve.call import PLAIN
from egeria_cache.skip.serve.compare import coarseness, difference, same_content, tolerance
from egeria_cache.skip.serve.cut import Slot, Step, StepPlan, TensorSpec
from egeria_cache.skip.serve.dynamic_shapes import ENOUGH, OutputAxis
from egeria_cache.skip.serve.placeholder import Unavailable
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.replay import ReplayRun
from egeria_cache.skip.state.watch import has_hooks_inside

_MAX_ALONE = 8
"""Samples that are run alone where the prefix branches on values."""
_Part = tuple[Any, list[int]]
"""What a step gave in a run, and for which rows."""
_MORE_DRAWS = 40
"""Further runs where random numbers are drawn to no effect so far: what they decide may be rare."""


def prove(traced: TracedBatch) -> tuple[ReplayPlan, dict[str, Tensor]]:
    """Return the plan and the first batch's rows.

    Raises:
        BoundaryError: The model cannot be cut there, and why.
    """
    inside = (module for step in traced.modules for module in step.modules())
    for module in (*inside, *traced.ancestors):
        if isinstance(module, torch.jit.ScriptModule):
            name = traced.names[id(module)]
            why = f"what {name!r} does, which was traced or scripted, cannot be followed"
            raise BoundaryError.impure(traced.boundary, why)
    traced.called.call = traced.copies.call_anew()
    followed = traced.recompute(copied=traced.called, goes_on=True)
    traced.trace = probe.observe(traced)
    repeats, few = Repeats(traced), list(_few_rows(traced))
    parts = [repeats.first, repeats.last, *few]
    if any(part.drew for part in parts):
        parts += [traced.recompute([traced.size - 1, 0]) for _ in range(_MORE_DRAWS)]
    plan = _draft(traced, parts, coarseness(traced.trace.dtypes))
    for position in traced.written:  # so that a hit writes to them as well
        plan.kept.add(position)
        plan.entered.add(position)
    Prober(traced, repeats.last, plan).run()
    if not plan.slots():
        raise _crosses_nothing(traced, plan)
    repeated = few[-1]
    other_mode = traced.recompute(repeated.rows, grad=not traced.grad)
    purity.check_trained(traced, plan, repeats.last if traced.grad else other_mode)
    repeats.check(plan)
    if not same_parts(plan, repeats.first, followed):
        how = f"a call leaves behind what decides the next: {repeats.left()}"
        raise BoundaryError.impure(plan.boundary, how)
    parts += _with_made_up(traced, plan)
    purity.check_rows(traced, parts, plan)
    purity.check_constants(parts, plan)
    plan.own = dict(_own_constants(traced, repeats, plan))
    plan.grad_mode = None if same_parts(plan, repeated, other_mode) else traced.grad
    plan.draws = any(part.drew for part in parts)
    probe.note_reads(traced, plan, repeats.moving)
    probe.note_unused(traced, plan)
    mixed = set(map(id, traced.call.batch.mixed.values()))
    if any(id(traced.call.leaves[position]) in mixed for position in plan.pinned):
        raise BatchError(traced.call.batch.why_mixed)  # no sample has it as its own
    tagged = traced.call.tagged
    plan.leaf_names = {i: (leaf.leaf, leaf.chain_key) for i, leaf in tagged.items()}
    plan.modes = tuple(module.training for module in plan.not_skipped)
    plan.profile = _profile(traced, plan)
    plan.growth = study_lengths(traced, plan)
    rows = _check_replay(traced, plan)
    repeats.check_left(plan)
    return plan, rows


def _crosses_nothing(traced: TracedBatch, plan: ReplayPlan) -> BatchError | BoundaryError:
    """Say why there is nothing to store of a sample."""
    if plan.pinned and not plan.entered:
        name = traced.call.layout.paths()[min(plan.pinned)]
        return BatchError(
            f"the frozen front reads {name!r}, which holds no row for each sample of the batch; "
            "put samples into rows in the collate_fn"
        )
    why = "nothing after it reads what it returns"
    if plan.steps[-1].run:
        why = "it runs for every batch, for hooks inside; remove them, or cut at a module inside"
    return BoundaryError.not_proved(plan.boundary, why)


def _few_rows(traced: TracedBatch) -> Iterator[Recomputed]:
    """Run the prefix on single rows of the batch; a repeated one is the last."""
    size, middle = traced.size, traced.size // 2
    rows = [0, size - 1, middle]
    if traced.trace.branches:
        # A value decides what runs (`if mask.all()`): let it be decided by each sample alone.
        rows = [*rows, *range(min(size, _MAX_ALONE))]
    for part in (*([row] for row in dict.fromkeys(rows) if size > 1), [middle] * 2):
        with Attempt(but=BoundaryError) as alone:
            found = traced.recompute(part)
        if alone.error is not None:
            # Code that takes a batch of one for something else (`squeeze()`): by twos, then.
            found = traced.recompute([*part, (part[0] + 1) % size])
        yield found


def _with_made_up(traced: TracedBatch, plan: ReplayPlan) -> Iterator[Recomputed]:
    """Run it on made-up samples too, in company and alone, as far as the model takes them for
    samples.
    """
    a, b, c = range(traced.size, traced.size + 3)
    for rows in ([a, 0], [0, b], [b], [0, c, 0], [c]):
        with Attempt() as tried:
            part = traced.recompute(rows)
        if tried.error is not None:
            continue
        if all(
            len(leaves) == len(step.leaves)
            and all(step.leaves[j].matches(leaves[j], len(rows)) for j in step.cached)
            for leaves, step in zip(part.leaves, plan.steps, strict=True)
        ):
            yield part


def _draft(traced: TracedBatch, parts: Sequence[Recomputed], coarsest: float) -> ReplayPlan:
    """Describe the steps; compare the batch sizes to find the batch dimension."""
    steps = []
    for i, (record, spec) in enumerate(zip(traced.steps, traced.specs, strict=True)):
        name, leaves = traced.names[id(record.module)], traced.plain.leaves[i]
        if any(len(leaves) != len(part.leaves[i]) for part in parts):
            how = f"{name!r} returns another structure for another batch"
            raise BoundaryError.another_way(traced.boundary, how)
        described = [
            _describe(traced, name, a, coarsest, [(part.leaves[i][j], part.rows) for part in parts])
            for j, a in enumerate(leaves)
        ]
        run = has_hooks_inside(record.module) or trainable(record.module) is not None
        steps.append(StepPlan(record.module, name, spec, described, run=run))
    last = steps[-1]
    tensors = [j for j, leaf in enumerate(last.leaves) if isinstance(leaf, TensorSpec)]
    if not last.run and len(tensors) == 1 and last.leaves[tensors[0]].batch_dim is not None:
        last.cached.add(tensors[0])
    return ReplayPlan(
        traced.boundary, steps, traced.ancestors, traced.names, traced.surroundings, copies=True,
        coarsest=coarsest,
    )  # fmt: skip


def _describe(
    traced: TracedBatch, name: str, a: Any, coarsest: float, parts: Sequence[_Part]
) -> Any:
    other, other_rows = parts[0]
    is_plain = isinstance(other, nn.Parameter) or not (isinstance(other, Tensor) and vars(other))
    if isinstance(a, Tensor) and isinstance(other, Tensor) and is_plain:
        spec = TensorSpec.of(a, traced.size, other, len(other_rows))
        if spec is None or not all(spec.matches(b, len(rows)) for b, rows in parts):
            how = f"{name!r} returns a {a.type()!r} whose shape does not follow the batch's size"
            raise BoundaryError.impure(traced.boundary, how)
        return _in_blocks(traced, spec, a, coarsest, parts)
    if isinstance(a, PLAIN):
        return a  # that it is always the same is looked at in the end: `check_constants`
    return Unavailable.like(type(a))


def _in_blocks(
    traced: TracedBatch, spec: TensorSpec, a: Tensor, coarsest: float, parts: Sequence[_Part]
) -> TensorSpec:
    """Return the spec with samples where the parts have them: several rows of one may stand
    together, or in as many blocks as the batch's (views that were put one behind the other).
    """

    def is_same(here: TensorSpec, b: Tensor, rows: list[int]) -> bool:
        at = [k for k, row in enumerate(rows) if row < traced.size]
        known, seen = here.to_rows(a)[[rows[k] for k in at]], here.to_rows(b)[at]
        return difference(known, seen) <= tolerance(a, coarsest)

    rows = 1 if spec.batch_dim is None else spec.shape[spec.batch_dim]
    joined = [leaf.fold.outer for leaf in traced.call.tagged.values()]
    for blocks in sorted({1, rows, *joined}) if rows > 1 else ():
        here = replace(spec, blocks=blocks)
        if rows % blocks == 0 and all(is_same(here, *part) for part in parts):
            return here
    return spec


def _own_constants(
    traced: TracedBatch, repeats: Repeats, plan: ReplayPlan
) -> Iterator[tuple[Slot, Tensor]]:
    """Yield what the front gives out of the model's own tensors: what follows may write to it."""
    slots = [(i, j) for i, step in enumerate(plan.steps) for j in step.constants]
    for (i, j), (*_, tensor) in product(slots, traced.known):
        leaf, own = repeats.last.leaves[i][j].detach(), repeats.copied.of(tensor)
        if not is_lazy(own) and overlap(leaf, own.detach()):
            place = leaf.shape, leaf.stride(), leaf.storage_offset()
            yield (i, j), tensor.detach().as_strided(*place)


def _profile(traced: TracedBatch, plan: ReplayPlan) -> tuple[Step, ...]:
    """Return what each step cost and gave: where else the model might be cut."""
    steps = []
    for seconds, step in zip(traced.seconds, plan.steps, strict=True):
        specs = [leaf for leaf in step.leaves if isinstance(leaf, TensorSpec)]
        num_bytes = sum(spec.row.num_bytes for spec in specs if spec.batch_dim is not None)
        steps.append(Step(step.name, seconds / traced.size, num_bytes))
    stored = sum(plan.tensor_spec(slot).row.num_bytes for slot in plan.slots().values())
    return *steps[:-1], replace(steps[-1], row_bytes=stored)


def _check_replay(traced: TracedBatch, plan: ReplayPlan) -> dict[str, Tensor]:
    """Replay from rows as the store gives them back; the output must be the user's result."""
    rows = plan.rows(lambda slot: traced.leaf(*slot))
    with torch.inference_mode(False), torch.no_grad():
        filled = fillings(traced, plan, rows)
    outputs = [_replayed(traced, plan, stored) for stored in filled]
    _compare_outputs(traced, outputs, plan)
    return rows


def _replayed(traced: TracedBatch, plan: ReplayPlan, rows: Mapping[str, Tensor]) -> list[Any]:
    """Return the leaves of what a replay brings; it must write and draw what the plain run did."""
    specs = {name: (slot, plan.tensor_spec(slot)) for name, slot in plan.slots().items()}
    with torch.inference_mode(False), torch.no_grad():
        values = {slot: spec.from_rows(rows[name].clone()) for name, (slot, spec) in specs.items()}
    steps = [
        replace(step, constants={j: value.clone() for j, value in step.constants.items()})
        for step in plan.steps
    ]
    given = [*values.values(), *(t for step in steps for t in step.constants.values())]
    contents, copied = [tensor.clone() for tensor in given], traced.copies.fresh()
    run = ReplayRun(replace(plan, steps=steps, copies=False), traced.size, copied.scene(plan))
    run.begin(values)
    leaves, layout = traced.run(copied, run, run.input)
    if layout != traced.result[1]:
        raise BoundaryError.not_proved(traced.boundary, "the output has another structure")
    if traced.outside:
        traced.replayed = traced.before.outside.moved_whole(copied.of)
    after = RandomState.now()
    run.scene.finished = True
    held, left = traced.held_by(copied), traced.left.items()
    traced.left = {k: pair for k, pair in left if is_left_otherwise(*pair, held.get(k))}
    plan.copies = any(difference(a, b) > 0 for a, b in zip(contents, given, strict=True))
    _check_written(traced, plan, copied, moved(traced.held, held))
    if not after.equals(traced.after):
        how = "the prefix draws random numbers, so that later ones would differ"
        raise BoundaryError.impure(plan.boundary, how)
    return leaves


def _check_written(
    traced: TracedBatch, plan: ReplayPlan, copied: ModelCopy, moved: Iterable[Any]
) -> None:
    """What the plain run writes to, a replay must write to; what the prefix reads, nothing may."""
    for position in traced.written:
        if not same_content(traced.given[position], copied.call.leaves[position]):
            how = f"the prefix writes to its input {traced.call.layout.paths()[position]}"
            raise BoundaryError.impure(plan.boundary, how)
    owned = (mark for mark in moved if isinstance(mark[0], nn.Module))
    written = traced.moved.keys() | {id(owner._buffers.get(key)) for owner, key in owned}
    read = {id(tensor) for *_, tensor in prefix_tensors(plan)}
    for name, _, tensor in traced.known:
        if id(tensor) in written & read:
            if isinstance(tensor, nn.Parameter):
                raise BoundaryError.moves(plan.boundary, name)
            how = f"the prefix reads {name!r}, which the model writes to after it"
            raise BoundaryError.impure(plan.boundary, how)


def _compare_outputs(traced: TracedBatch, outputs: Sequence[list[Any]], plan: ReplayPlan) -> None:
    """Compare replays with the plain result: where it is padded may be anything. Note where, and
    which leaves a hit cannot give.
    """
    expected, axes, opaque = traced.result[0], dict[int, OutputAxis](), set[int]()
    for i, (a, b, *others) in enumerate(zip(expected, *outputs, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            error = difference(a, b)
            if error <= tolerance(a, plan.coarsest) and all(is_same(b, c) for c in others):
                continue
            if not others or a.shape != b.shape:
                why = (
                    f"the output differs by {error:.3g}: something reaches the active part without "
                )
                why += "being passed to it (an attribute, a global, a mutated input)"
                raise BoundaryError.not_proved(traced.boundary, why)
            axes[i] = padded_axis(traced, plan, (a, b, others[0]))
        elif not same_content(a, b):
            if len(expected) == 1:
                why = f"the output, a {type(a).__name__}, is not reproduced"
                raise BoundaryError.not_proved(traced.boundary, why)
            opaque.add(i)
    plan.opaque_outputs = frozenset(opaque)
    if plan.growth is not None:
        plan.growth.outputs, plan.growth.proof.missing = axes, ENOUGH if axes else 0.0
