"""How one cut is served: the steps of the prefix, and what becomes of each on a hit.

For batches of any length: what was proved at a few lengths holds at all others. Sizes follow rules
(`dynamic_shapes.py`). What crosses the boundary without depending on the samples, a table of
positions say, is cut from a longer one: all of them were shown to begin alike. What cannot be told
for certain is computed plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.batch import Lengths
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.model.frozen import Named
from egeria_cache.skip.serve.call import Invocation, plain
from egeria_cache.skip.serve.cut import Cut, RowGrowth, Slot, Step, StepPlan, TensorSpec
from egeria_cache.skip.serve.dynamic_shapes import DynamicShapes
from egeria_cache.skip.state.guards import PrefixGuard
from egeria_cache.skip.state.surroundings import Surroundings
from egeria_cache.skip.state.watch import watched_attributes

_is_training = attrgetter("training")
_MAX_LENGTHS = 512
"""Lengths of batches that a plan is kept ready for."""


@dataclass(slots=True, eq=False)
class ReplayPlan:
    """Everything needed to serve one signature of calls at one boundary."""

    boundary: str
    steps: list[StepPlan]
    """In execution order; the last is the boundary."""
    ancestors: list[nn.Module]
    """The modules whose own code calls the steps, the model itself among them."""
    names: Mapping[int, str]
    surroundings: Surroundings
    """What the code may touch outside of the model, hooks too."""
    kept: set[int] = field(default_factory=set)
    """Positions of the loader's leaves that a hit needs for real."""
    same: dict[Slot, Slot] = field(default_factory=dict)
    """Leaves that are the very tensor that is stored for another."""
    entered: set[int] = field(default_factory=set)
    """Positions of the loader's leaves that the prefix reads."""
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """Other tensor arguments that the prefix reads: they must not change."""
    copies: bool = False
    """Whether the model writes into what a hit gives it, which must then be a copy."""
    wants_grad: set[Slot] = field(default_factory=set)
    """Outputs that autograd follows although nothing before them is trained: somebody asked for it
    (`enable_input_require_grads`), so that checkpointed regions behind have a gradient to pass."""
    moving: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Attributes that the code around the boundary moves before the boundary returns."""
    left: list[tuple[str, Callable[[], Any], Any]] = field(default_factory=list)
    """What skipped modules leave elsewhere with each call: its name, how to look at it, what it is.
    """
    own: dict[Slot, Tensor] = field(default_factory=dict)
    """Constants that lie in the memory of the model's own tensors, in a hit as well."""
    written: frozenset[int] = frozenset()
    """Which of the tensors that left-out calls are given are written to later, as they come."""
    opaque_outputs: frozenset[int] = frozenset()
    """Leaves of the model's output that cannot be had on a hit."""
    key: tuple[Any, ...] = ()
    """Signature of the calls that it serves."""
    others: list[nn.Module] = field(default_factory=list)
    """Modules behind the boundary of which code before it reads attributes."""
    modes: tuple[bool, ...] = ()
    """Training flags of the ancestors and the others."""
    leaf_names: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Position -> (leaf of the loader's batch, operations done to it)."""
    reads: list[Named] = field(default_factory=list)
    """What the prefix computes with beside its modules' own tensors."""
    draws: bool = False
    """Whether the prefix draws random numbers (to no effect on what is cached)."""
    free: frozenset[int] = frozenset()
    """Positions of plain arguments that the prefix does not use: any value of the kind fits."""
    given: list[Any] = field(default_factory=list)
    """Code among the arguments that the prefix runs."""
    numbers: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Attributes of modules that are not skipped, of which the prefix uses no value: any number
    fits."""
    attributes: frozenset[tuple[int, str]] = frozenset()
    """(id of an ancestor or another module, name) that code around the boundary reads before it
    returns."""
    beside: dict[int, nn.Module] = field(default_factory=dict)
    """By id: modules that code of the prefix finds elsewhere than among the model's."""
    until: Mapping[CodeType, int] = field(default_factory=dict)
    """Offset of the call, in code around the boundary, that it returns from; see `Code.until`."""
    unread: Mapping[Any, Any] = field(default_factory=dict)
    """What the model counts outside of itself, and no activation depends on; see `Code.unread`."""
    operators: dict[str, Any] = field(default_factory=dict)
    """Operators of the user's own that it runs, by name."""
    coarsest: float = 0.0
    """The `coarseness` of all that the prefix computes with."""
    grad_mode: bool | None = None
    """Whether autograd recorded when it was proved; None if that does not matter."""
    profile: tuple[Step, ...] = ()
    guard: PrefixGuard | None = None
    cut: Cut | None = None
    growth: DynamicShapes | None = None
    """How it looks for batches of other lengths, where samples are padded."""
    escaped: BoundaryError | None = None
    """What the last hit has needed of what it skipped, which was computed then."""
    returned: Callable[[], None] = lambda: None
    """Is called when the boundary has returned."""
    replays: dict[int, Any] = field(default_factory=dict)
    """By batch size: what `replay.py` has made for all hits of that size."""
    _grown: dict[tuple[int, ...], ReplayPlan] = field(default_factory=dict)
    """The same for batches of other lengths; one dict for all of them."""

    @property
    def modules(self) -> list[nn.Module]:
        """The distinct modules of the steps."""
        return list({id(step.module): step.module for step in self.steps}.values())

    def at(self, lengths: Lengths | None) -> ReplayPlan | None:
        """Return the plan for batches of these lengths; None if it is not certain how it looks."""
        if self.growth is None or lengths is None:
            return self
        known, whole = self._grown, lengths.whole
        if whole not in known:
            steps = self.growth.steps(self.steps, whole)
            if steps is None:
                return None
            if len(known) >= _MAX_LENGTHS:
                del known[next(iter(known))]
            known[whole] = replace(self, steps=steps, replays={}, own={})
        return known[whole]

    def settle(self, key: tuple[Any, ...]) -> None:
        """Serve calls of this key; what was made for batches of other lengths has no cut as yet."""
        self.key = key
        self._grown.clear()

    def row_growth(self) -> dict[str, RowGrowth]:
        """Return how the rows of the cached tensors follow the lengths of their samples."""
        if self.growth is None:
            return {}
        of, slots = self.growth.of_rows, self.slots().items()
        found = {name: of(self.tensor_spec(slot), slot) for name, slot in slots}
        return {name: growth for name, growth in found.items() if growth is not None}

    def fits(self, call: Invocation) -> bool:
        """Whether the inputs and modes are those that it was proved with."""
        growth, lengths = self.growth, call.batch.lengths
        is_beyond = growth and lengths and growth.is_beyond(lengths.whole)
        if is_beyond or self.grad_mode not in (None, torch.is_grad_enabled()):
            return False
        if (*map(_is_training, self.ancestors), *map(_is_training, self.others)) != self.modes:
            return False
        for module, key in self.numbers:
            if type(vars(module).get(key)) not in (int, float):
                return False
        for position, known in self.leaf_names.items():
            leaf = call.tagged.get(position)
            if leaf is None:
                if position not in self.kept or position in self.entered:
                    return False
            elif (leaf.leaf, leaf.chain_key if leaf.chain else "") != known:
                return False
        return not self.pinned or all(
            torch.equal(plain(call.leaves[i]), value) for i, value in self.pinned.items()
        )

    @property
    def not_skipped(self) -> list[nn.Module]:
        """The modules around and behind the boundary of which code before it reads anything."""
        return [*self.ancestors, *self.others]

    def lies_beyond(self, name: str) -> bool:
        """Whether its boundary comes after the module `name`, or contains it."""
        return name.startswith(self.boundary + ".") or any(
            step.name == name or name.startswith(step.name + ".") for step in self.steps[:-1]
        )

    def skipped_modules(self) -> list[tuple[str, nn.Module]]:
        """Return every module that does not run on a hit, at any depth, with its name."""
        skipped = (step.module.modules() for step in self.steps if not step.run)
        modules = {id(module): module for own in skipped for module in own}
        return [(self.names.get(i, ""), module) for i, module in (modules | self.beside).items()]

    def around(self) -> list[tuple[str, nn.Module, list[str]]]:
        """Return (name, module that is not skipped, names of it that code before the boundary
        reads).
        """
        modules = [*self.not_skipped, *(step.module for step in self.steps if step.run)]
        keys: dict[int, list[str]] = {id(module): [] for module in modules}
        for owner, key in self.attributes:
            keys[owner].append(key)
        return [(self.names.get(id(m), ""), m, keys[id(m)]) for m in modules]

    def stored(self) -> list[Any]:
        """Return what modules of the prefix, and the code around it, have as attributes."""
        skipped = (module for _, module in self.skipped_modules())
        kept = [value for module in skipped for value in watched_attributes(module).values()]
        for _, module, names in self.around():
            own = watched_attributes(module)
            kept += [own[name] for name in names if name in own]
        return [*kept, *(vars(one) for one in self.operators.values())]

    def unexpected(self, module: nn.Module, step: StepPlan) -> str:
        """Say that another module ran than the one of this step."""
        return f"{self.names[id(module)]!r} ran where {step.name!r} was expected"

    def slots(self) -> dict[str, Slot]:
        """Name the cached tensors."""
        named: dict[str, Slot] = {}
        for i, step in enumerate(self.steps):
            for j in sorted(step.cached):
                name = step.name if len(step.leaves) == 1 else f"{step.name}:{j}"
                calls = sum(other.module is step.module for other in self.steps[:i])
                named[f"{name}#{calls}" if calls else name] = (i, j)
        return named

    def tensor_spec(self, slot: Slot) -> TensorSpec:
        """Return the spec of a cached tensor."""
        spec = self.steps[slot[0]].leaves[slot[1]]
        assert isinstance(spec, TensorSpec)
        return spec

    def rows(self, tensor_of: Callable[[Slot], Tensor]) -> dict[str, Tensor]:
        """Return copies of the cached tensors as rows, shape (B, ...), by name."""
        with torch.inference_mode(False), torch.no_grad():
            return {
                name: self.tensor_spec(slot)
                .to_rows(tensor_of(slot))
                .clone(memory_format=torch.contiguous_format)
                for name, slot in self.slots().items()
            }


Key = tuple[Any, ...]
"""What calls have in common that are served alike: see `Invocation.key`."""

_MAX_PLANS = 16
"""Signatures of calls (shapes, modes, plain arguments) proved per boundary."""
_REST = 256
"""Calls after one on which the model could not be cut, while nothing is proved: as long as that no
other signature is tried. It doubles each time."""
_FIRST_WAIT = 2
"""Batches during which the prefix must be still after it changed; doubles each time."""
_MAX_PARKED = 4
"""States of the prefix that are remembered, in case it returns to one (weights swapped for their
average during evaluation, say)."""
_FEW, _MAX_HASTY = 8, 4
"""Changes with fewer calls between them; so many of these, and no state is remembered: to take each
up again costs more than it brings."""


class PlanCache:
    """Keeps plans by signature; parks them while the prefix is not what they were proved for.

    Args:
        kept: Plans of an earlier boundary that still hold.
    """

    def __init__(self, kept: Iterable[ReplayPlan] = ()) -> None:
        self._refused, self._tried_again = set[Key](), set[Key]()
        self._rest = 0
        """Calls that are not tried any more."""
        self._num_dry_runs = self._num_calls = self._num_hasty = 0
        self._parked = list[list[ReplayPlan]]()
        self._watch: PrefixGuard | None = None
        """Looks whether a prefix that changed is still again."""
        self._wait = _FIRST_WAIT
        self._become(kept)

    def _become(self, plans: Iterable[ReplayPlan]) -> None:
        """There are other plans now."""
        self._plans = list(plans)
        self.guards = [plan.guard for plan in self._plans if plan.guard]
        """What watches the prefix of any of them."""
        for plan in self._plans:
            plan.returned = self._settle

    def all(self) -> list[ReplayPlan]:
        """Return the plans for the prefix as it is now."""
        return self._plans

    def has_proved(self) -> bool:
        """Whether there are plans, be they for another state of the prefix."""
        return any((self._plans, *self._parked))

    def alike(self, key: Key, boundary: str) -> list[ReplayPlan]:
        """Return those of one signature at one boundary."""
        return [plan for plan in self._plans if (plan.key, plan.boundary) == (key, boundary)]

    def find(
        self, key: Key, call: Invocation, *, boundary: str | None = None, cut: Cut | None = None
    ) -> ReplayPlan | None:
        """Return the plan for calls like this one, at `cut` or else at `boundary`."""
        self._num_calls += cut is None
        for plan in self._plans:
            wanted = plan.boundary == boundary if cut is None else plan.cut is cut
            if wanted and plan.key == key and plan.fits(call):
                return plan
        return None

    def add(self, plan: ReplayPlan) -> None:
        """Take in a plan that was proved."""
        self._become([*self._plans, plan])

    def _settle(self) -> None:
        """What the prefix's own run has left on its modules is no change: memoised tables, what its
        hooks count. What the model does behind the boundary may be one.
        """
        for guard in self.guards:
            guard.settle()

    def refuse(self, key: Key) -> None:
        """Try calls of this signature no more; what was proved of some goes on."""
        self._refused.add(key)
        self._rest = 0 if self._plans else _REST << len(self._refused) - 1

    def drop(self, key: Key) -> None:
        """What was proved of calls of this signature does not hold."""
        self._become(plan for plan in self._plans if plan.key != key)
        self._refused.add(key)

    def may_try_again(self, key: Key) -> bool:
        """Forget what was proved of such calls; whether it may be proved anew, as it may once."""
        self.drop(key)
        may = key not in self._tried_again
        self._tried_again.add(key)
        self._refused -= {key} if may else set()
        return may

    def may_dry_run(self, key: Key) -> bool:
        """Whether another dry run is worth its price; whoever asks and is told so makes one."""
        watch = None if self._plans else self._watch
        if watch is not None and watch.changed() is not None:
            self._watch, self._rest = watch.anew(), self._wait
        self._rest -= 1
        if key in self._refused or self._rest >= 0 or self._num_dry_runs >= _MAX_PLANS:
            return False
        if watch is not None:
            self._watch, self._wait = None, min(2 * self._wait, 1024)
        self._num_dry_runs += 1
        return True

    def park(self, guard: PrefixGuard, *, is_late: bool) -> bool:
        """The prefix has changed, as `guard` saw, late perhaps. Whether what is stored holds:
        states that take turns (adapters switched off for a reference) stay known.

        It may return to what it was, or go on changing: then it is left alone for a while.
        """
        self._parked = [self._plans, *self._parked][:_MAX_PARKED]
        self._become(())
        self.unpark()
        is_known = self._plans or (self._watch is not None and self._watch.changed() is None)
        if is_late or not is_known:
            is_hasty, self._num_calls = self._num_calls < _FEW, 0
            self._num_hasty = self._num_hasty + 1 if is_hasty else 0
            if self._num_hasty > _MAX_HASTY:
                self._parked, is_known = [], False
                self._become(())
        if is_known:
            return not is_late
        self._refused.clear()
        if self._num_dry_runs > 1:  # else the first call may have made what moved since
            self._watch, self._rest = guard.anew(), self._wait
        return False

    def unpark(self) -> None:
        """Go back to plans that were proved for what the prefix is now, if there are any."""
        known = (p for p in self._parked if p and all(r.guard and r.guard.is_same() for r in p))
        if (parked := next(known, None)) is not None:
            self._parked.remove(parked)
            self._become(parked)
