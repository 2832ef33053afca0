"""Whether the prefix only computes, and each sample by itself.

*By itself*: what is cached of a sample is the same in any company: compared row by row. What the
model's own digits leave open is decided in float64, where rounding cannot be taken for a
dependence, or hide one.

*Only computes*: run again on the same copy, nothing of it may move. What settles after the first
run (a memo, a mask kept for its shape) is harmless: skipping it skips nothing. What moves with
every run (a counter, a moving average, a private generator, a growing list) would stand still on
hits, and what is left behind by a run would be that of another batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from egeria_cache.attempt import Attempt
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Content, Moved, Names, Place, Snapshot, describe
from egeria_cache.skip.prove.traced_batch import Held, Recomputed, TracedBatch, moved, rest
from egeria_cache.skip.serve.call import PLAIN
from egeria_cache.skip.serve.compare import difference, same_content, slice_difference, tolerance
from egeria_cache.skip.serve.cut import Slot, TensorSpec
from egeria_cache.skip.serve.plan import ReplayPlan

_DECIDES = "moves with every call, and decides what it computes later"
_COARSE = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


def _doubled(tensor: Tensor) -> Tensor:
    """Return what stands for a tensor of the model, or of its inputs."""
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.detach().double()
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


class _Float64(TorchFunctionMode):
    """Reads every request for fewer digits as one for float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            func = Tensor.double
            args, kwargs = args[:1], {}
        args = [_wider(arg) for arg in args]
        result = func(*args, **{key: _wider(arg) for key, arg in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype in _COARSE:
            raise ArithmeticError("computed in fewer digits all the same")
        return result


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _COARSE else value


_PRECISE = 1e-6
"""Largest difference of a slice in float64 that may be rounding."""
_MAX_ODD, _COMPANY, _PAIR = 3, 4, 2
"""Rows that float64 decides about, that it runs together, and of a suspect that is run again."""
_WHOLE_S = 0.1
"""Seconds, at most, of a batch that is run whole again."""


def check_trained(traced: TracedBatch, plan: ReplayPlan, part: Recomputed) -> None:
    """Raise if autograd says that what is cached was computed with something trained; or if that is
    read where autograd does not follow, by what is skipped or by what runs before it: what that
    gives (under `no_grad`, in a checkpointed region) may lead there.

    Raises:
        BoundaryError: And with what.
    """
    for i, j in plan.slots().values():
        if part.leaves[i][j].requires_grad:
            traced.refuse_trained(part.leaves[i][j])
    last = max((i for i, step in enumerate(plan.steps) if not step.run), default=-1)
    unfollowed = traced.trace.undifferentiated
    for name, _, tensor in traced.known:
        if min(unfollowed.get(id(tensor), ()), default=last + 1) <= last:
            raise BoundaryError.trainable(plan.boundary, name)


def check_rows(traced: TracedBatch, parts: Sequence[Recomputed], plan: ReplayPlan) -> None:
    """Compare what is cached with the same samples in other company.

    Raises:
        BoundaryError: Something depends on its neighbours; names the first module that shows it.
    """
    suspects: dict[int, tuple[Recomputed, int]] = {}
    for slot in plan.slots().values():
        spec, value = plan.tensor_spec(slot), traced.leaf(*slot)
        for part, rows, a, b in _in_company(spec, slot, [traced.plain, *parts]):
            error = difference(a, b)
            if error > tolerance(value, plan.coarsest):
                for how in traced.trace.draws.values():
                    raise BoundaryError.impure(plan.boundary, how)
                raise next(_blamed(traced, parts, plan))
            strict = tolerance(value, as_stored=True)
            is_odd = error > strict or slice_difference(a, b) > strict
            if is_odd and id(part) not in suspects:
                pairs = zip(a.split(1), b.split(1), strict=True)
                errors = [slice_difference(*pair) for pair in pairs]
                suspects[id(part)] = part, rows[errors.index(max(errors))]
    if suspects:
        _check_precisely(traced, [*suspects.values()][:_MAX_ODD], plan)


def check_constants(parts: Sequence[Recomputed], plan: ReplayPlan) -> None:
    """Raise if what a skipped module always gives is not always the same.

    Raises:
        BoundaryError: And which module that is.
    """
    for (i, step), part in itertools.product(enumerate(plan.steps), parts):
        for j, value in step.constants.items():
            error = difference(value, part.leaves[i][j])
            if error > tolerance(value, plan.coarsest):
                raise BoundaryError.mixes_samples(plan.boundary, step.name, error)
        for known, other in zip(step.leaves, part.leaves[i], strict=True):
            if isinstance(known, PLAIN) and (type(other) is not type(known) or known != other):
                how = f"{step.name!r} returns {known!r} for one batch and {other!r} for another"
                raise BoundaryError.impure(plan.boundary, how)


def same_parts(plan: ReplayPlan, a: Recomputed, b: Recomputed) -> bool:
    """Whether what is cached is the same in two runs on the same rows."""
    pairs = ((a.leaves[i][j], b.leaves[i][j]) for i, j in plan.slots().values())
    return all(difference(x, y) <= tolerance(x, plan.coarsest) for x, y in pairs)


_Pairs = Iterator[tuple[Recomputed, list[int], Tensor, Tensor]]
"""(part, rows that were seen before, as they were first seen, the same in this part)"""


def _in_company(spec: TensorSpec, slot: Slot, parts: Sequence[Recomputed]) -> _Pairs:
    """Compare a leaf's rows with what they were in the parts before; of a tensor that is no
    sample's all of it.
    """
    leaves, known = [part.leaves[slot[0]][slot[1]] for part in parts], dict[int, Tensor]()
    if spec.batch_dim is None:
        yield from ((part, [], leaves[0], leaf) for part, leaf in zip(parts, leaves, strict=True))
        return
    for part, leaf in zip(parts, leaves, strict=True):
        rows = spec.to_rows(leaf)
        seen = [k for k, row in enumerate(part.rows) if row in known]
        if seen:
            again = [part.rows[k] for k in seen]
            yield part, again, torch.stack([known[row] for row in again]), rows[seen]
        for k, row in enumerate(part.rows):
            known.setdefault(row, rows[k])


def _check_precisely(
    traced: TracedBatch, suspects: Sequence[tuple[Recomputed, int]], plan: ReplayPlan
) -> None:
    """Decide in float64 about differences that may be rounding, or are large only in a channel.

    The oddest row of each suspect is run in other company, by itself, and in the suspect's; so is
    the batch. It takes six times as long as before: where that is long, no more than a few rows.
    """
    odd, again = [row for _, row in suspects], [part.rows for part, _ in suspects]
    others = sorted({row for rows in again for row in rows}, reverse=True)
    company = list(dict.fromkeys([*odd, *others, *range(traced.size), traced.size]))[:_COMPANY]
    whole = [list(range(traced.size))]
    if traced.seconds[-1] > _WHOLE_S:
        whole, again = [], [rows for rows in again if len(rows) <= _PAIR]
    apart = [[row, row] for row in dict.fromkeys(odd) if [row] not in again]
    copied, parts = traced.copies.fresh(_doubled), (company[::-1], *apart, *whole, *again)
    with Attempt() as tried, ExitStack() as modes:
        modes.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        modes.enter_context(_Float64())
        runs = [traced.recompute(rows, copied=copied) for rows in parts]
    if tried.error is not None:
        return  # it cannot run so: the tolerance for the whole tensor has decided
    for i, j in plan.slots().values():
        for _, _, a, b in _in_company(plan.tensor_spec((i, j)), (i, j), runs):
            if (error := slice_difference(a, b)) > _PRECISE:
                raise BoundaryError.mixes_samples(plan.boundary, plan.steps[i].name, error)


def _blamed(
    traced: TracedBatch, parts: Sequence[Recomputed], plan: ReplayPlan
) -> Iterator[BoundaryError]:
    """Name the modules whose outputs show a difference."""
    for i, step in enumerate(plan.steps):
        specs = [(j, spec) for j, spec in enumerate(step.leaves) if isinstance(spec, TensorSpec)]
        for j, spec in specs:
            for _, _, a, b in _in_company(spec, (i, j), [traced.plain, *parts]):
                if (error := difference(a, b)) > tolerance(traced.leaf(i, j), plan.coarsest):
                    yield BoundaryError.mixes_samples(plan.boundary, step.name, error)


# ---- again on the same copy ----------------------------------------------------------------------

_AHEAD = *range(1, 64), *(1 << k for k in range(6, 21))
"""Calls that a counter is put ahead by, to see whether anything comes of it: what it does in every
n-th call, or in turns of n, or from the n-th on."""


class Repeats:
    """The prefix three times on one copy of the model: twice on the same rows, then on others."""

    def __init__(self, traced: TracedBatch) -> None:
        self._traced = traced
        copied = self.copied = traced.copies.fresh()
        self.first = traced.recompute(copied=copied)
        settled, world = traced.held_by(copied), traced.before.outside
        # 10 ms each for six layers: not where the model has moved nothing there.
        moved_outside = partial(world.moved_whole, copied.of) if traced.outside else dict
        self._once_outside: dict[Any, Moved] = moved_outside()
        own = [mark for mark in moved(traced.held, settled) if copied.of(mark[0]) is not mark[0]]
        self._kept = Snapshot((), [Names("", vars(copied.of(one)), (key,)) for one, key in own])
        once = self._kept.now()
        outside = world.now(copied.of), world.now(), dict(copied.context)
        self.again = traced.recompute(self.first.rows, copied=copied, goes_on=True)
        self._counted = list(self._kept.moved(once, self._kept.now()))
        """What the second run has moved on the copy, as far as that can be put ahead."""
        self._later_outside = [moved_outside()]
        self._outside = list(self._moved_outside(*outside))
        again = traced.held_by(copied)
        self._counting = moved(settled, again)
        self.last = traced.recompute(rest(traced.size), copied=copied)
        self._later_outside.append(moved_outside())
        later = traced.held_by(copied)
        self._of_others = moved(again, later)
        """Whether other rows leave other tensors there, and not new ones."""
        self.moving = list(dict.fromkeys((*self._counting, *self._of_others)))
        """What calls after the first move; what that one has left is a memo."""
        traced.common = copied

    def check(self, plan: ReplayPlan) -> None:
        """Run twice on the same rows, what is cached must be the same, and nothing of what is
        skipped may move: a hit would leave it as it is.

        Raises:
            BoundaryError: And what that is.
        """
        skipped = {id(m) for step in plan.steps if not step.run for m in step.module.modules()}
        around = {id(module) for module in plan.ancestors} - skipped
        for mark, has_arrays in self._counting.items():
            if id(mark[0]) in skipped or (id(mark[0]) in around and has_arrays):
                raise BoundaryError.leaves(self._traced.boundary, self._name(mark))
        if not same_parts(plan, self.first, self.again):
            names = map(self._name, self._counting)
            reason = next((f" ({name!r} moves with every call)" for name in names), "")
            how = f"it gives other results when it is called again{reason}"
            raise BoundaryError.impure(plan.boundary, how)
        own = [f"the attribute {one.path.lstrip('.')!r}" for one in self._counted]
        self._check_counters(plan, self._counted, own)
        self._kept.put_back()

    def _check_counters(
        self, plan: ReplayPlan, counted: Sequence[Moved], names: Sequence[str],
        of: Callable[[Any], Any] = lambda where: where,
    ) -> None:  # fmt: skip
        """Put ahead what counts the calls: nothing that is cached may notice, now or later."""

        def later(ahead: int) -> Recomputed | None:
            self._traced.before.restore(for_a_copy=True)
            for one in counted:
                one.put_ahead(ahead, of)
            rows = self.first.rows[:2]
            with Attempt():  # who asks which word a log has last raises
                return self._traced.recompute(rows, copied=self.copied, goes_on=True)
            return None

        now = later(0) if counted else self.first
        ways = (later(ahead) for ahead in _AHEAD if counted)
        if not all(now and one and same_parts(plan, now, one) for one in ways):
            raise BoundaryError.impure(plan.boundary, f"{names[0]} {_DECIDES}")

    def check_left(self, plan: ReplayPlan) -> None:
        """Tell the plan what a plain call leaves elsewhere, a hit does not, and is the same after
        all; and what the model counts outside of itself.

        Raises:
            BoundaryError: Something is not the same; or something outside moves with each run of
                the prefix, and is no count: it would stand still on hits.
        """
        outside, left = self._traced.before.outside.places, self._traced.left
        skipped = {id(module) for _, module in plan.skipped_modules()}
        anew = self._counting.keys() | {mark for mark, holds in self._of_others.items() if holds}
        if not left.keys().isdisjoint(self._of_others):  # do other rows, as many, leave another?
            held, num = list[Held](), min(len(self.first.rows), len(self.last.rows))
            for rows in (self.first.rows[:num], self.last.rows[:num]):
                self._traced.recompute(rows, copied=self.copied)
                held.append(self._traced.held_by(self.copied))
            anew |= moved(*held).keys()
        for mark, (_, now) in left.items():
            if mark in anew:
                raise BoundaryError.leaves(self._traced.boundary, self._name(mark))
            where = mark[0] if isinstance(mark[0], nn.Module) else outside[mark[0]]
            if id(where) not in skipped and not now.arrays:
                plan.left.append((self._name(mark), partial(_look, where, mark[1]), now.texts))
        # What its first run works out, and no other one moves, is no count; nor is what hits move
        # otherwise than the whole model: what the prefix moves then would stand still.
        once, (again, last) = self._once_outside, self._later_outside
        still = {m for m in once if m in again and same_content(once[m].twice, again[m].twice)}
        memos = {m for m in still if m in last and same_content(once[m].twice, last[m].twice)}
        found, replayed = self._traced.outside, self._traced.replayed
        marks = [mark for mark in found.keys() - memos if mark in replayed]
        counted = [m for m in marks if same_content(found[m].twice, replayed[m].twice)]
        where = {id(found[m].where) for m in counted}
        names = [one.name for m, one in found.items() if m in again and m not in (*still, *counted)]
        for name in (*names, *(name for one, name in self._outside if id(one) not in where)):
            how = f"{name} moves with every call of it"
            raise BoundaryError.impure(self._traced.boundary, how)
        ours = [found[m] for m in counted]
        self._check_counters(plan, ours, [one.name for one in ours], self.copied.of)
        plan.unread = {one.mark: one.where for one in ours}

    def _moved_outside(
        self, once: list[Any], really: list[Any], context: Mapping[Any, Any]
    ) -> Iterator[tuple[Any, str]]:
        """Yield where something has moved since, of the copy's or really, and its name."""
        world, of = self._traced.before.outside, self.copied.of
        for variable, value in self.copied.context.items():
            then = context.get(variable)
            if value is not then and describe(value) != describe(then):
                yield variable, f"the context variable {variable.name!r}"
        for one in world.moved(once, world.now(of)):
            if id(one.where) not in world.apart:
                yield one.where, one.name
        for one in world.moved(really, world.now()):
            if of(one.where) is not one.where:  # the model itself, which a global names
                yield one, one.name

    def left(self) -> str:
        """Name what the whole first call has left: what is read, if any of it is."""
        own = [mark for mark in self._traced.left if isinstance(mark[0], nn.Module)]
        read = [mark for mark in own if (id(mark[0]), mark[1]) in self._traced.trace.noted]
        names = [repr(self._name(mark)) for mark in read or own]
        return ", ".join(names) or "something outside of the model"

    def _name(self, mark: Any) -> str:
        name = self._traced.names.get(id(mark[0]), "")
        return f"{name}.{mark[1]}" if name else str(mark[1])


def is_left_otherwise(then: Content | None, now: Content, replayed: Content | None) -> bool:
    """Whether a replay leaves what it found where a plain run moves it; or has counted less."""
    before, found = ({} if one is None else one.texts for one in (then, replayed))
    return before == found or any(
        _is_less(text, now.texts.get(path, b"")) for path, text in found.items()
    )


def _is_less(a: bytes, b: bytes) -> bool:
    (kind, _, number), (other_kind, _, other) = a.partition(b":"), b.partition(b":")
    return kind == other_kind == b"int" and int(number) < int(other)


def _look(where: nn.Module | Place, key: Any) -> dict[str, bytes]:
    held = vars(where) if isinstance(where, nn.Module) else where.read(where.where)
    return Content(held.get(key), into_foreign=False).texts
