"""From the plain run of one batch to a recipe, or to the reason why there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from egeria_cache.errors import BoundaryError
from egeria_cache.skip.calls import intercept
from egeria_cache.skip.compare import difference, same_content, tolerance
from egeria_cache.skip.cut import Step, TensorSpec
from egeria_cache.skip.evidence import Evidence, Recomputed, observe, recompute, trainable
from egeria_cache.skip.placeholder import Source
from egeria_cache.skip.probe import Prober
from egeria_cache.skip.recipe import Recipe, ReplayRun, Slot, StepPlan, Unavailable
from egeria_cache.skip.state import RandomState
from egeria_cache.skip.trace import Named, PrefixTrace, known_tensors

__all__ = ["prove", "same_rows"]

_MAX_ALONE = 8
"""Samples that are run alone where the prefix branches on values."""


def prove(evidence: Evidence) -> tuple[Recipe, dict[str, Tensor]]:
    """Return the recipe and the first batch's rows.

    Raises:
        BoundaryError: The model cannot be cut there, and why.
    """
    other, trace = recompute(evidence), observe(evidence)
    recipe = _draft(evidence, other)
    prober = Prober(evidence, other, recipe)
    prober.run()
    if not recipe.slots():
        raise BoundaryError.not_proved(recipe.boundary, "nothing after it reads what it returns")
    _check_rows(evidence, other, recipe, trace)
    if trace is not None and trace.branches:
        # A value decides what runs (`if mask.all()`): let it be decided by each sample alone.
        for row in range(min(evidence.size, _MAX_ALONE)):
            _check_rows(evidence, recompute(evidence, [row]), recipe, trace)
    _check_trained(evidence, other, recipe, trace)
    recipe.reads = _reads(evidence, recipe, trace)
    _note_draws(recipe, trace)
    tagged = evidence.call.tagged
    recipe.leaf_names = {i: (leaf.leaf, leaf.chain_key) for i, leaf in tagged.items()}
    recipe.modes = tuple(module.training for module in recipe.ancestors)
    recipe.profile = _profile(evidence, recipe)
    return recipe, _check_replay(evidence, prober, recipe)


def same_rows(evidence: Evidence, recipe: Recipe, other: Recipe) -> bool:
    """Whether `other`, proved with other training flags around the boundary, stores the same."""
    slots = recipe.slots()
    if slots != other.slots() or recipe.leaf_names != other.leaf_names:
        return False
    if recipe.kept != other.kept or recipe.pinned or other.pinned:
        return False
    if any(recipe.tensor_spec(slot) != other.tensor_spec(slot) for slot in slots.values()):
        return False
    if recipe.ancestors != other.ancestors:
        return False
    ours = recompute(evidence)
    for module, mode in zip(recipe.ancestors, other.modes, strict=True):
        module.training = mode
    try:
        theirs = recompute(evidence)
    finally:
        for module, mode in zip(recipe.ancestors, recipe.modes, strict=True):
            module.training = mode
    return all(difference(ours.leaves[i][j], theirs.leaves[i][j]) == 0 for i, j in slots.values())


def _draft(evidence: Evidence, other: Recomputed) -> Recipe:
    """Describe the steps; compare the two batch sizes to find the batch dimension."""
    steps = []
    for record, output, leaves_b in zip(
        evidence.steps, evidence.outputs, other.leaves, strict=True
    ):
        name = evidence.names[id(record.module)]
        leaves_a, spec = tree_flatten(output)
        if len(leaves_a) != len(leaves_b):
            raise BoundaryError.another_way(
                evidence.boundary, f"{name!r} returns another structure for another batch"
            )
        described = [
            _describe(evidence, name, a, b, len(other.rows))
            for a, b in zip(leaves_a, leaves_b, strict=True)
        ]
        run = trainable(record.module) is not None
        steps.append(StepPlan(record.module, name, spec, described, run=run))
    last = steps[-1]
    tensors = [j for j, leaf in enumerate(last.leaves) if isinstance(leaf, TensorSpec)]
    if len(tensors) == 1 and last.leaves[tensors[0]].batch_dim is not None:
        last.cached.add(tensors[0])
    return Recipe(evidence.boundary, steps, evidence.ancestors, evidence.names)


def _describe(evidence: Evidence, name: str, a: Any, b: Any, other_size: int) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        spec = TensorSpec.of(a, evidence.size, b, other_size)
        if spec is None:
            raise BoundaryError.impure(
                evidence.boundary,
                f"{name!r} returns a tensor of shape {tuple(a.shape)} for {evidence.size} samples "
                f"and {tuple(b.shape)} for {other_size}",
            )
        return spec
    if isinstance(a, int | float | str | bool | type(None)):
        if a != b:
            raise BoundaryError.impure(
                evidence.boundary, f"{name!r} returns {a!r} for one batch and {b!r} for another"
            )
        return a
    return Unavailable(frozenset({Source("step", name)}))


def _check_rows(
    evidence: Evidence, other: Recomputed, recipe: Recipe, trace: PrefixTrace | None
) -> None:
    """Compare what is cached with the same samples in other company."""
    for i, j in recipe.slots().values():
        value, again = evidence.leaf(i, j), other.leaves[i][j]
        parameter = evidence.trained_by(again) if again.requires_grad else None
        if parameter is not None:
            raise BoundaryError.trainable(recipe.boundary, parameter)
        error = _row_difference(evidence, other, recipe.tensor_spec((i, j)), value, again)
        if error > tolerance(value):
            if trace is not None and trace.draws:
                raise BoundaryError.impure(recipe.boundary, trace.describe_draws())
            raise _blame(evidence, other, recipe, error)


def _row_difference(
    evidence: Evidence, other: Recomputed, spec: TensorSpec, a: Tensor, b: Tensor
) -> float:
    if spec.batch_dim is None:
        return difference(a, b)
    index = torch.tensor(other.rows, device=a.device)
    first = spec.to_rows(a, evidence.size)[index]
    second = spec.to_rows(b, len(other.rows))
    if evidence.size == 1:  # the second row is a made-up neighbour
        first, second = first[:1], second[:1]
    return difference(first, second)


def _blame(evidence: Evidence, other: Recomputed, recipe: Recipe, error: float) -> BoundaryError:
    """Name the first module whose output shows the difference."""
    for i, step in enumerate(recipe.steps):
        for j, spec in enumerate(step.leaves):
            if isinstance(spec, TensorSpec):
                a, b = evidence.leaf(i, j), other.leaves[i][j]
                here = _row_difference(evidence, other, spec, a, b)
                if here > tolerance(a):
                    return BoundaryError.mixes_samples(recipe.boundary, step.name, here)
    return BoundaryError.mixes_samples(recipe.boundary, recipe.boundary, error)


def _check_trained(
    evidence: Evidence, other: Recomputed, recipe: Recipe, trace: PrefixTrace | None
) -> None:
    """Change what is trained and ran before the boundary: the cut must not notice.

    Autograd has named most offenders already; this finds those used under `no_grad`.
    """
    if trace is None:
        return
    suspects = [
        (name, tensor)
        for name, _, tensor in known_tensors(evidence.model)
        if tensor.requires_grad and id(tensor) in trace.read and tensor.is_floating_point()
    ]
    if not suspects:
        return
    before = [tensor.data.clone() for _, tensor in suspects]
    try:
        for _, tensor in suspects:
            tensor.data.mul_(1.5).add_(0.1)  # through .data: the user's graph must not notice
        changed = recompute(evidence)
    finally:
        for (_, tensor), old in zip(suspects, before, strict=True):
            tensor.data.copy_(old)
    for i, j in recipe.slots().values():
        if difference(other.leaves[i][j], changed.leaves[i][j]) > 0:
            raise BoundaryError.trainable(recipe.boundary, suspects[0][0])


def _reads(evidence: Evidence, recipe: Recipe, trace: PrefixTrace | None) -> list[Named]:
    """Return what the prefix reads outside of its modules: class tokens, constants."""
    known = known_tensors(evidence.model)
    if trace is None:  # compiled code cannot be traced: take all that is near
        near = {id(module) for module in recipe.ancestors}
        return [named for named in known if id(named[1]) in near]
    skipped = {i for i, step in enumerate(recipe.steps) if not step.run} | {-1}
    return [
        named
        for named in known
        if trace.read.get(id(named[2]), set()) & skipped and not named[2].requires_grad
    ]


def _note_draws(recipe: Recipe, trace: PrefixTrace | None) -> None:
    """Let a replay draw what the skipped modules would have drawn (to no effect, as was shown)."""
    if trace is None:
        return
    for index, draws in trace.draws.items():
        recipe.draws = True
        if index >= 0 and not recipe.steps[index].run:
            recipe.steps[index].draws = draws


def _profile(evidence: Evidence, recipe: Recipe) -> tuple[Step, ...]:
    """Return what each step cost and gave: where else the model might be cut."""
    steps = []
    for seconds, step in zip(evidence.seconds, recipe.steps, strict=True):
        specs = [leaf for leaf in step.leaves if isinstance(leaf, TensorSpec)]
        num_bytes = sum(spec.row.num_bytes for spec in specs if spec.batch_dim is not None)
        steps.append(Step(step.name, seconds / evidence.size, num_bytes))
    steps[-1] = Step(
        steps[-1].name,
        steps[-1].seconds_per_sample,
        sum(recipe.tensor_spec(slot).row.num_bytes for slot in recipe.slots().values()),
    )
    return tuple(steps)


def _check_replay(evidence: Evidence, prober: Prober, recipe: Recipe) -> dict[str, Tensor]:
    """Replay from rows as the store gives them back; the output must be the user's result."""
    rows: dict[str, Tensor] = {}
    values: dict[Slot, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, slot in recipe.slots().items():
            spec = recipe.tensor_spec(slot)
            view = spec.to_rows(evidence.leaf(*slot), evidence.size)
            rows[name] = view.clone(memory_format=torch.contiguous_format)
            values[slot] = spec.from_rows(rows[name].clone())
    given = [*values.values(), *(t for step in recipe.steps for t in step.constants.values())]
    versions = [tensor._version for tensor in given]
    run = ReplayRun(recipe, evidence.size, values)
    evidence.rng_before.restore()
    args, kwargs = prober.inputs(run)
    with intercept(recipe.modules, run):
        output = evidence.forward(*args, **kwargs)
    run.scene.finished = True
    recipe.copies = [tensor._version for tensor in given] != versions
    recipe.mutable = [
        buffer
        for module, key in evidence.state.changed_buffers()
        if (buffer := module._buffers.get(key)) is not None
    ]
    if not RandomState.now().equals(evidence.rng_after):
        raise BoundaryError.impure(
            recipe.boundary, "the prefix draws random numbers, so that later ones would differ"
        )
    recipe.opaque_outputs = _compare_outputs(evidence, output)
    return rows


def _compare_outputs(evidence: Evidence, output: Any) -> frozenset[int]:
    """Compare with the plain result; return the leaves that a hit cannot give."""
    expected, spec = tree_flatten(evidence.result)
    leaves, other_spec = tree_flatten(output)
    if spec != other_spec:
        raise BoundaryError.not_proved(evidence.boundary, "the output has another structure")
    opaque = set()
    for i, (a, b) in enumerate(zip(expected, leaves, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            error = difference(a, b)
            if error > tolerance(a):
                raise BoundaryError.not_proved(
                    evidence.boundary,
                    f"the output differs by {error:.3g}: something reaches the active part without "
                    "being passed to it (an attribute, a global, a mutated input)",
                )
        elif not same_content(a, b):
            if len(expected) == 1:
                raise BoundaryError.not_proved(
                    evidence.boundary, f"the output, a {type(a).__name__}, is not reproduced"
                )
            opaque.add(i)
    return frozenset(opaque)
