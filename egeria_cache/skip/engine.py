"""Skip the frozen prefix of a model, inside the user's own `model(x)`.

The whole way of a batch through the model is `SkipEngine.forward`. How a cut is found and proved:
`dry_run.py`; how it is replayed: `plan.py`; what is promised: docs/correctness.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache import attempt
from egeria_cache.attempt import Attempt, is_beside, is_ours, without_us
from egeria_cache.batch import Batch, Entry, Leaves, Missing, batch_tensors, interleaved, unwrap
from egeria_cache.device import Answers, runs_late, uploaded
from egeria_cache.errors import BoundaryError, PaddingError
from egeria_cache.pystate import is_compiled, reached
from egeria_cache.skip.model import calls
from egeria_cache.skip.model.entered import Scout, inner_model, module_named
from egeria_cache.skip.model.frozen import FrozenPrefix, RequiresGradWatch, are_alike, tell_modes
from egeria_cache.skip.model.fsdp import Front, ShardedFront, states_in
from egeria_cache.skip.prove.dry_run import AutoBoundary, DryRun, before_in_sequence
from egeria_cache.skip.serve import replay
from egeria_cache.skip.serve.address import address, prefix_tensors
from egeria_cache.skip.serve.call import WANTS_GRADIENT, Invocation
from egeria_cache.skip.serve.compare import difference, gap, tolerance
from egeria_cache.skip.serve.cut import Cut
from egeria_cache.skip.serve.dynamic_shapes import MAX_WATCHED, watched
from egeria_cache.skip.serve.placeholder import Escape
from egeria_cache.skip.serve.plan import PlanCache, ReplayPlan
from egeria_cache.skip.serve.replay import Rows
from egeria_cache.skip.state.guards import SEEN_LATE, PrefixGuard
from egeria_cache.skip.state.watch import hook_of_training, hooks_of

log = logging.getLogger("egeria")

_is_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")
MAX_CHAINS = 4
"""Different operations on a loader's batches before the model; with more, they never repeat."""
_MAX_EVEN = 8
"""Batches without padding that are computed in the hope of one that has some."""
_MAX_BARE = 3
"""Calls under a boundary that may come without a loader's batch before that is said."""
_MANY_ALIKE = 16
"""Calls with one batch before that is said."""
_ALL_NEW = "no call came with the arguments of one before it"
_KEPT = "the loop keeps batches that came before anything was stored, and gives them again"
_TRANSFORMED = (
    "the model is called within `torch.func` (vmap, grad) or under a mode that changes operations, "
    "and never without"
)
_REMEDIES = {
    _KEPT: "Ask the loader for every epoch",
    WANTS_GRADIENT: "Where the loop needs that gradient (adversarial examples, a generator's "
    "pictures), such calls are always computed; where it does not, leave `requires_grad_` out",
}
_AS_THEY_COME = (
    "Give the model the loader's batches as they come, or do what changes them after the boundary "
    "or in the data set"
)


class _OneCall:
    """One call of the model, and what is the loop's own of it: one run of its forward, at most."""

    call: Invocation | None = None
    key: tuple[Any, ...] = ()
    raised: BaseException | None = None
    """What the loop has to get."""
    is_done = False
    output: Any = None
    seconds = 0.0
    """What the model itself took."""

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model as it would be run without us."""
        started = time.perf_counter()
        try:
            self.output = forward(*args, **kwargs)
        except BaseException as error:
            self.note(error)
            raise
        self.is_done, self.seconds = True, time.perf_counter() - started
        return self.output

    def note(self, error: BaseException) -> None:
        """The model has raised it: it is the loop's, unless it is ours."""
        if not is_ours(error):
            self.raised = error


class _Unserved:
    """Says once, and why, that calls under a boundary cannot be served, one after another.

    Args:
        told: Is given the reason of the first of them, and the remedy.
    """

    def __init__(self, told: Callable[[str, str], None]) -> None:
        self._told = told
        self.begin()

    def begin(self) -> None:
        """There is another boundary."""
        self.was_served = self.is_quiet = False
        """Whether any call came with a loader's batch; and whether the last ones all did."""
        self._why, self._num, self._same, self._of = "", 0, 0, object()

    def note(self, why: str, *, of: Any = None) -> None:
        """A call came plain; several calls of one batch `of` these samples count once."""
        if of is not None and of is self._of:
            self._same += 1
            if self._same == _MANY_ALIKE:
                self._told(why, _REMEDIES.get(why, _AS_THEY_COME))
            return
        if (why is _ALL_NEW) is not (self._why is _ALL_NEW):
            self._num = 0
        self._num, self._same, self._of, self.is_quiet = self._num + 1, 0, of, False
        if self._num == 1:
            self._why = why
        if self._num == (MAX_CHAINS + 1 if why is _ALL_NEW else _MAX_BARE):
            self._told(self._why, _REMEDIES.get(self._why, _AS_THEY_COME))

    def served(self, *, but: str = "") -> None:
        """A call came that can be served, as far as this reason is not the matter."""
        self.was_served = True
        if self._num < _MAX_BARE and self._why is not but:
            self._num = 0
        self.is_quiet = not self._num


class SkipHost(Protocol):
    """What the engine asks of its owner."""

    def cut_found(self, batch: Batch, cut: Cut) -> None:
        """A cut was proved for this batch's loader."""

    def captured(
        self, batch: Batch, cut: Cut, rows: np.ndarray | None, tensors: dict[str, Tensor]
    ) -> None:
        """Fresh activations of the masked rows (None: all); nobody changes the tensors later."""

    def called(self) -> None:
        """The model is called, with whatever."""

    def audited(self, batch: Batch, entry: Entry) -> tuple[np.ndarray, bool] | None:
        """Which of the hits to recompute from the raw sample: bool, shape (B,), and whether to wait
        for what that shows; None for none, or where they cannot be loaded again as they were."""

    def entry_at(self, batch: Batch, cut: Cut) -> Entry | None:
        """Where a batch that was planned for another cut enters at this one; None if not all of it
        is stored there."""

    def audit_leaves(self, batch: Batch, rows: np.ndarray, loaded: Mapping[str, Any]) -> bool:
        """Whether the stored leaves of these rows (labels, masks) are what was loaded again."""

    def audit_failed(self, batch: Batch, rows: np.ndarray, finding: str) -> bool:
        """A stored activation is not what the prefix computes; nothing of it was served. Whether it
        may be all the same, for it is the data that have changed since.
        """

    def prefix_changed(self, reason: str, *, unlink: bool = False) -> None:
        """The prefix is not what it was: everything stored is void. Nothing stale was served."""

    def thawed(self, name: str, cut: str | None) -> None:
        """The tensor `name` of the prefix is trained from now on; the model is cut before it."""

    def uncached(self, reason: str, remedy: str) -> None:
        """Several calls under a boundary came with batches that cannot be served."""

    def unproved(self, reason: str) -> None:
        """What is stored is not served as long as something has not been shown."""

    def refused(self, error: BoundaryError, *, at_first: bool = False) -> None:
        """The model cannot be cut here; the engine goes on uncached.

        It may be raised `at_first`: nothing was computed under this boundary yet.
        """

    def failed(self, error: Exception, batch: Batch | None = None) -> None:
        """What was done beside a call of the model went wrong; the call was computed."""

    def postpones(self, batch: Batch) -> Literal["timed", "plain"] | None:
        """Whether nothing should be proved on this batch: it is computed plainly, timed perhaps."""

    def timed(self, batch: Batch, front_s: float, forward_s: float) -> None:
        """A batch was computed plainly: its frozen front, and all of the model, took so long."""

    @property
    def idle(self) -> Mapping[str, str]:
        """Loaders whose batches come plain, for nothing is proved for them as yet, and why."""

    @property
    def is_idle(self) -> bool:
        """Whether those of all loaders do."""

    def is_refused(self) -> bool:
        """Whether the loaders that have given batches can all not be cached."""

    def note(self, kind: str, seconds: float) -> None:
        """Time of a "proof", of an "audit", or of all that was done "beside" a computed call.

        "compiled": the whole model is compiled, and what is compiled runs without being cached.
        """


_NUM_SIZES = 4
"""Numbers of rows that misses are computed in, as parts of a batch."""


class SkipEngine:
    """Wraps one model's `forward`. Used from the training thread only.

    Args:
        model: The model, possibly wrapped by DistributedDataParallel.
        host: Who keeps the activations.
        padding_unread: Whether the user says that the loop reads nothing where a batch is padded.
        method: What the loop calls of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        host: SkipHost,
        *,
        padding_unread: bool = False,
        method: str = "forward",
    ) -> None:
        self.model = self._whole = inner_model(model)
        self._method = method
        self.scout = Scout(self.model, self._entered_at)
        """Sees how the loop enters the model, until that has been called."""
        self._attached: calls.AttachedForward | None = None
        self.is_aside, self._may_step_aside = False, True
        """Whether the model's forward is its own now, and whether that is to be looked at."""
        self._compiled = is_compiled(model)
        self._is_traced = False
        self._padding_unread = padding_unread
        self.host = host
        self.boundary: str | None = None
        self.frozen: str | None = None
        self.cut: Cut | None = None
        self._forward: Callable[..., Any] = getattr(self.model, method)
        self._plans = PlanCache()
        self._held = FrozenPrefix(model=self.model)
        self._is_held = False
        """Whether all that runs before the boundary is known to be in inference mode."""
        self.has_run = False
        """Whether a call was computed like that, under this boundary."""
        self._is_told = False
        """Whether it was said what that changes."""
        self._audits = Answers()
        self._voided = set[Cut]()
        """Of what the prefix was before it changed: nothing of that is served under one of their
        addresses again, where the change is not in it (a function in a table has a name alone)."""
        self._free: dict[Any, frozenset[int]] = {}
        self._announced: set[tuple[int, str]] = set()
        """(id of a cut, loader) that the host was told of."""
        self._declared: tuple[str | None, str | None] = (None, None)
        """(cut, last frozen module) as they were asked for; nearer than that while a part of the
        prefix is trained."""
        self._thaw = RequiresGradWatch()
        self._auto: AutoBoundary | None = None
        self._sharded: ShardedFront | None = None
        self._num_even = self._num_escapes = 0
        self._completed: Callable[[], Missing | None] = lambda: None
        """The missing rows that were put beside hits last, as long as their batch is held."""
        self.is_awaited = False
        """Whether there are loaders of which none has begun a pass under this boundary: what the
        model is given meanwhile is an evaluation's, as like as not."""
        self._unserved = _Unserved(lambda why, remedy: host.uncached(why, remedy))
        self._running: dict[str, _OneCall] = {}
        """The call that is being served, if any."""
        self.trained_by = threading.get_ident()
        """That trains: where the cache was made, and from then on where batches are given."""
        self._num_calls = 0
        """Calls under this boundary that have returned."""

    # ---- the way of a batch -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `model.forward`."""
        if self.host.idle and self._is_held and self._is_loops_own(args, kwargs):
            self._num_calls, self.has_run = self._num_calls + 1, True
            if self._may_step_aside:
                self._step_aside()
            return self._forward(*args, **kwargs)
        has_modes = attempt.num_function_modes() or attempt.num_dispatch_modes()
        if torch._C._functorch.peek_interpreter_stack() is not None or (
            has_modes and attempt.has_other_operations()
        ):
            if self.boundary is not None:
                self.host.called()
                self._unserved.note(_TRANSFORMED)
            return self.computed(*args, **kwargs)
        if (self._declared[0] is not None or self._auto is not None) and (
            threading.get_ident() == self.trained_by or self._is_of_the_loop(args, kwargs)
        ):
            ours, depth, grad = _OneCall(), len(calls.LOCAL.active), torch.is_grad_enabled()
            started, failure = time.perf_counter(), None
            try:  # around everything: an interrupt may come between any two lines
                if self._running.setdefault("call", ours) is ours:
                    auto = self._auto
                    with nullcontext() if auto is None else auto.around(args, kwargs):
                        return self._called_with(args, kwargs)
            except BaseException as error:
                calls.heal(depth)
                torch.set_grad_enabled(grad)
                if error is ours.raised or not is_beside(error):
                    raise
                failure = without_us(error)
            finally:
                if self._running.get("call") is ours:
                    self._running.clear()
                    self.has_run |= self._is_held
                    self._num_calls += 1
                    if ours.is_done:
                        beside_s = time.perf_counter() - started - ours.seconds
                        with Attempt():  # a figure, and no error of the loop's
                            self.host.note("beside", beside_s)
            if failure is not None:
                return self._instead(ours, failure, args, kwargs)
        # Nothing is frozen; or this is a call within a call, or of another thread.
        return self.computed(*args, **kwargs)

    def _is_loops_own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is nothing to do beside a call while nothing is proved: the front is as it
        was, and it comes with no batch that knows its samples.
        """
        return (
            {Tensor}.issuperset(map(type, (*args, *kwargs.values())))
            and threading.get_ident() == self.trained_by
            and (self._auto is None or self._auto.is_still())
            and self._declared[0] == self.boundary
            and self._sharded is None
            and not any(map(_is_training, self._held.modules.values()))
            and not any(map(_requires_grad, self._thaw.tensors))
        )

    def _step_aside(self) -> None:
        """Leave the model to itself while nothing is proved, until a pass begins, or a batch is
        given out that knows its samples: our frames take 9 us of a step, and a front of PyTorch's
        own modules that do the same in training mode needs nobody, whatever is thawed.
        """
        self._may_step_aside = False
        is_on_top = self.model.__dict__.get(self._method) is self._attached
        is_alike = not self._held.around and are_alike(self._held)
        if self._attached is not None and is_on_top and self.host.is_idle and is_alike:
            self._attached.take_out()
            self.is_aside = True

    def stand_in(self) -> None:
        """Stand in for the model's forward again, if we have stepped aside, or if somebody has put
        its own back who took it then.
        """
        self._may_step_aside = True
        if self._attached is None:
            return
        top = self.model.__dict__.get(self._method)
        if top is None or top is self._attached.before:
            self._attached.attach()
            self.is_aside = False
        elif self.is_aside or top == self._attached.__wrapped__:
            self.attach()  # on top of who has taken the place meanwhile

    def look_out(self) -> None:
        """A batch is given out that knows its samples, with which the model is called somehow."""
        if self.is_aside:
            self.stand_in()
        self.scout.look_out()

    def _is_of_the_loop(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is the training's, and not one of a thread that is beside it: no such one
        may put back the random generators.
        """
        if batch_tensors((args, kwargs)):
            self.trained_by = threading.get_ident()
        return threading.get_ident() == self.trained_by

    def _instead(self, ours: _OneCall, error: Exception, args: Any, kwargs: Any) -> Any:
        """Something beside the call has failed: return what the model gave, or gives."""
        call = ours.call
        if ours.is_done:
            output = ours.output if call is None else call.hand_back(ours.output)
        else:
            output = self.computed(*args, **kwargs)
        if isinstance(error, BoundaryError) and call is not None:
            self._refuse(ours.key, error)  # a replay could not be finished: cut no more like this
        else:
            self.host.failed(error, None if call is None else call.batch)
        return output

    def _called_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.scout.is_done:
            self.scout.close()
        if self._sharded is not None:
            self._look_at_shards()
        if self._auto is not None:
            self._auto.follow(self._forward, args, kwargs)
        self._look()
        if self._sharded is not None and self.boundary is not None and not self._sharded.is_ready:
            self.host.called()
            return self.computed(*args, **kwargs)
        # Shapes of tagged tensors are read often: not through their `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            call = self._running["call"].call = Invocation.of(args, kwargs)
            free = self._free.get(call.kinds(), frozenset()) if self._free else frozenset()
            key = () if call.why_not else call.key(free)
        is_plain = self.boundary is None or call.why_not is not None
        result = self._uncached(call) if is_plain else self._cached(call, key)
        # Half a microsecond a module: after 1, 2, 4, 8, ... calls.
        if self._is_held and not (self._is_told or self._num_calls & (self._num_calls + 1)):
            self._is_told = tell_modes(self._whole, self._held)
        return call.hand_back(result) if call.lent else result

    def _uncached(self, call: Invocation) -> Any:
        """Compute a call that cannot be served; the prefix is in inference mode all the same."""
        self.host.called()
        if self.boundary is not None and call.why_not is not None and not self.host.idle:
            # Where others were served, or are to come, an evaluation may bring batches of its own.
            are_others = self._unserved.was_served or self.is_awaited
            if (self.model.training and torch.is_grad_enabled()) or not are_others:
                self._unserved.note(call.why_not)
            if not self.host.is_refused():
                self._hold(call)
            elif not self.has_run:
                self._held.release()  # it trains as without a cache, from its first batch on
        return self._plainly(call)

    def _cached(self, call: Invocation, key: tuple[Any, ...]) -> Any:
        self._compare()
        self.host.called()
        if not self._unserved.is_quiet:
            self._unserved.served(but=_KEPT if call.batch.was_computed else _ALL_NEW)
        self._running["call"].key = key
        entry = call.batch.entry
        if entry is None and not call.batch.may_be_stored and self._is_held:
            return self._plainly(call)
        plan = self._plans.find(key, call, boundary=self.boundary)
        if plan is None:
            return self._first(key, call)
        for name, read, value in plan.left:
            if read() != value:
                self._refuse(key, BoundaryError.leaves(plan.boundary, name))
                return self._plainly(call)
        if (id(plan.cut), call.batch.loader_name) not in self._announced:
            self._announce(plan, call)
        lengths, source = call.batch.lengths, None
        here = plan if lengths is None else plan.at(lengths)
        if entry is not None and entry.cut is plan.cut:
            source = here
        elif entry is not None:
            found = self._plans.find(key, call, cut=entry.cut)
            source = None if found is None else found.at(lengths)
        if entry is not None and source is None and plan.cut is not None and here is not None:
            # Planned for what the loop did before: a flag has another value in this epoch, say.
            entry = self.host.entry_at(call.batch, plan.cut)
            source = None if entry is None else here
        awaits = plan.growth is not None and self._awaits_proof(plan)
        if entry is None and call.batch.was_computed:
            self._unserved.note(_KEPT, of=call.batch.ids)
        elif not self._unserved.is_quiet:
            self._unserved.served()
        call.batch.was_computed = True
        if entry is None or source is None or awaits:
            return self._miss(here, call)
        try:
            stored = entry.load()
        except LookupError:
            return self._miss(here, call)
        chosen = self.host.audited(call.batch, entry)
        if chosen is not None and not self._audit(source, call, entry, stored, chosen[0]):
            return self._plainly(call)
        waits = chosen is not None and chosen[1]
        if self._audits.asked and not self._confirmed(wait=waits):
            return self._plainly(call)
        if not entry.hit.all():
            stored = self._complete(source, call, entry.hit, stored)
        return self._replay(source, here, call, stored)

    def _first(self, key: tuple[Any, ...], call: Invocation) -> Any:
        """Prove a cut on this batch; whatever comes of it, return the plain result."""
        assert self.boundary is not None
        lengths = call.batch.lengths
        # Samples of other lengths should come first: these show no padding at all.
        is_even = lengths is not None and not (lengths.own != lengths.whole).any()
        self._num_even += is_even
        waits = self._is_restless(key, call) or (is_even and self._num_even <= _MAX_EVEN)
        waits = waits or not self._plans.may_dry_run(key)
        how = None if waits or any(self._plans.all()) else self.host.postpones(call.batch)
        if not waits and how is None:
            return self._prove(key, call)
        self._hold(call)
        if how != "timed":
            return self._plainly(call)
        front = self.model.get_submodule(self.boundary)
        output, front_s, forward_s = replay.timed(self._once, front, call)
        self.host.timed(call.batch, front_s, forward_s)
        return output

    def _plainly(self, call: Invocation) -> Any:
        args, kwargs = call.plain()
        return self._once(*args, **kwargs)

    def _once(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward for the loop."""
        return self._running["call"].run(self._forward, *args, **kwargs)

    def _prove(self, key: tuple[Any, ...], call: Invocation) -> Any:
        """Cut the model on this batch if it can be, perhaps before that place, where it was found
        by itself; and compute the batch.
        """
        started = time.perf_counter()
        try:
            while True:
                found = self._dry_run(self.boundary, call).run()
                self._is_held = True
                self._thaw.watch(self._held)
                if not isinstance(found, BoundaryError) or not self._goes_earlier():
                    break
        except Exception as error:  # a signal of the user's came: a proof takes longer than a call
            self._plans.refuse(key)
            self.host.failed(error, call.batch)
            raise
        if isinstance(found, BoundaryError):
            output = self._plainly(call)  # if it raises, it is the loop's: the next call is tried
            self._plans.refuse(key)
            if self._is_evaluation():
                log.info("an evaluation is computed: %s", found)
            else:
                self._tell_refused(found)
            return output
        (plan, proved), plainly = found, time.perf_counter()
        output, capture = replay.full(self._once, plan, call)
        started += time.perf_counter() - plainly
        if len(call.tagged) < len(call.leaves):
            free = self._free[call.kinds()] = self._free.get(call.kinds(), plan.free) & plan.free
            key = call.key(free)
        plan.settle(key)
        self._share_padding(plan)
        self._publish(plan, call)
        self.host.note("proof", time.perf_counter() - started)
        # Not of another shape alone; and what is pinned has a reason of its own, which comes.
        if not plan.pinned and len(call.tagged) + len(plan.free) < len(call.leaves):
            self._unserved.note(_ALL_NEW, of=call.batch.ids)
        rows, why, most = capture.rows, capture.deviation, plan.coarsest
        pairs = [(one, rows[name]) for name, one in proved.items()] if rows is not None else ()
        if any(difference(known, ours) > tolerance(known, most) for known, ours in pairs):
            rows, why = None, "it gives other results than a copy of the model"
        return self._taken(plan, call, output, rows, why)

    def _goes_earlier(self) -> bool:
        """Whether there is another place to try; what an evaluation does is no reason to move what
        training has.

        Where nothing was computed yet under a boundary that was found by itself, the front is let
        go: its training is the one that it would be without a cache. Else it stays in inference
        mode, as it began.
        """
        if self._auto is None or self._is_evaluation():
            return False
        return self._auto.refuse(held=self.frozen if self.has_run else None)

    def _is_evaluation(self) -> bool:
        return not (self.model.training and torch.is_grad_enabled()) and self._plans.has_proved()

    def _share_padding(self, plan: ReplayPlan) -> None:
        """What training has shown of how the loop reads padding holds in its evaluations as well,
        where no gradient shows it.
        """
        if (growth := plan.growth) is None or not growth.outputs:
            return
        for known in self._plans.alike(plan.key, plan.boundary):
            if known.growth and known.growth.outputs.keys() == growth.outputs.keys():
                growth.proof = known.growth.proof

    def _is_restless(self, key: tuple[Any, ...], call: Invocation) -> bool:
        """Whether every call differs from those before it, so that nothing would be served."""
        assert self.boundary is not None
        alike = self._plans.alike(key, self.boundary)
        if len({tuple(plan.leaf_names.items()) for plan in alike}) > MAX_CHAINS:
            self._plans.refuse(key)  # the host has said so
            return True
        pinned = [plan.pinned for plan in alike if plan.pinned]
        if len(pinned) < 2:
            return False
        paths = call.layout.paths()
        names = ", ".join(paths[position] for position in pinned[-1])
        what = f"the prefix reads {names}, which is not a batch of an EgeriaLoader as it came and "
        what += "changes from call to call"
        self._refuse(key, BoundaryError.impure(self.boundary, what))
        return True

    def _miss(self, plan: ReplayPlan | None, call: Invocation) -> Any:
        """Compute every row, and hand what crosses the boundary to the host, where it is certain
        how that looks at these lengths.
        """
        if plan is None:
            return self._plainly(call)
        output, capture = replay.full(self._once, plan, call)
        return self._taken(plan, call, output, capture.rows, capture.deviation)

    def _taken(
        self, plan: ReplayPlan, call: Invocation, output: Any, rows: Rows | None, why: str | None
    ) -> Any:
        """Hand over what was captured of a computed batch; serve no more what goes another way."""
        self._captured(plan, call, None, rows)
        output = self._watched(plan, call, output)
        if why is not None:
            self._refuse(plan.key, BoundaryError.another_way(plan.boundary, why))
        return output

    def _audit(
        self, source: ReplayPlan, call: Invocation, entry: Entry, stored: Rows, mask: np.ndarray
    ) -> bool:
        """Recompute the chosen hits from their raw samples; False if what is stored besides is not
        what they have. Whether they are what was stored a device tells later: `_confirmed`.
        """
        started = time.perf_counter()
        loaded = call.batch.load_rows(mask)
        same, fresh = self.host.audit_leaves(call.batch, mask, loaded), Rows()
        if same:
            fresh = replay.prefix(self._forward, source, call.rows(mask, loaded), int(mask.sum()))
        rows = torch.from_numpy(np.flatnonzero(mask[entry.hit]))
        growth, lengths = source.row_growth(), call.batch.lengths
        for name, computed in fresh.items():
            known = stored[name][uploaded(rows, computed.device)]
            if name in growth and lengths is not None:
                of_these = lengths.select(np.flatnonzero(mask))
                computed = growth[name].blanked(computed, of_these, surely=True)
                known = growth[name].blanked(known, of_these, surely=True)
            alike = computed.shape == known.shape and computed.dtype == known.dtype
            error = gap(computed, known) if alike else torch.tensor(torch.inf)
            about = call.batch, mask, name, source.boundary, tolerance(computed, source.coarsest)
            self._audits.ask(error, about)
        self.host.note("audit", time.perf_counter() - started)
        return same

    def _confirmed(self, *, wait: bool = False) -> bool:
        """Whether recomputed hits were what was stored, as far as that is known by now."""
        for error, (batch, mask, name, boundary, most) in self._audits.come(wait=wait):
            if not float(error) <= most:
                for guard in self._plans.guards:  # written to since a device was last asked
                    if (reason := guard.changed(wait=True)) is not None:
                        self._void(reason, guard)
                        return False
                finding = f"{name} at {boundary!r} differs by {error:.3g} of its largest value"
                if not self.host.audit_failed(batch, mask, finding):
                    return False
        return True

    def _complete(
        self, source: ReplayPlan, call: Invocation, hit: np.ndarray, stored: Rows
    ) -> Rows:
        """Return all rows in order: those that hit, and the others, which the prefix computes."""
        missing = call.batch.missing
        if missing is None or source.draws:
            missing = Missing(None, len(hit) - int(hit.sum()))
        elif missing.known is None:
            with Attempt():  # if it is the model's own error, it raises it again
                self._compute(source, call, hit, missing, [*missing.behind()])
        if missing.known is None or missing.known[0] is not source:
            self._compute(source, call, hit, missing, None)
        assert missing.known is not None
        fresh: Rows = missing.known[1]
        # The loop may hold batches for long; one that it calls the model with again is the last.
        if (last := self._completed()) is not None and last is not missing:
            last.known = None, {}
        self._completed = weakref.ref(missing)
        if source.boundary == self.boundary:
            self._captured(source, call, ~hit, fresh)
        return {
            name: interleaved(hit, stored[name].to(rows.device), rows)
            for name, rows in fresh.items()
        }

    def _compute(
        self, source: ReplayPlan, call: Invocation, hit: np.ndarray, missing: Missing,
        behind: list[tuple[Missing, Leaves]] | None,
    ) -> None:  # fmt: skip
        """Run the prefix on the misses, and with them on those of the next batches; on a device on
        so many rows as in other runs, for kernels are chosen, and compiled, for their number.
        """
        parts, stop, size = [missing, *(one for one, _ in behind or ())], 0, call.batch.size
        num_rows = sum(one.size for one in parts)
        fill = 0
        if behind is not None and any(runs_late(one.device) for one in call.tagged.values()):
            fill = min(-num_rows % max(size // _NUM_SIZES, 1), size - num_rows)
        inputs = call.rows(~hit, behind=[leaves for _, leaves in behind or ()], fill=fill)
        found = replay.prefix(self._forward, source, inputs, num_rows + fill)
        for one in parts:
            start, stop = stop, stop + one.size
            one.known = source, {name: rows[start:stop] for name, rows in found.items()}

    def _replay(
        self, source: ReplayPlan, plan: ReplayPlan | None, call: Invocation, stored: Rows
    ) -> Any:
        """Enter at `source`'s cut; an older one than `plan`'s fills the newer one on the way."""
        try:
            output, rows = replay.replay(self._forward, source, plan, call, stored)
        except BaseException as raised:
            self._running["call"].note(raised)
            raise
        if (error := source.escaped) is None:
            self._num_escapes = 0
        else:
            # A hit has computed what it skips after all, now and then perhaps; where the next one
            # does so, too, what crosses is another thing now.
            self._num_escapes += 1
            key, took_another_way = self._running["call"].key, not isinstance(error, Escape)
            if took_another_way or (self._num_escapes > 1 and not self._plans.may_try_again(key)):
                self._refuse(key, error)
        if plan is not None and rows is not None:
            self._captured(plan, call, None, rows)
        return output if source.growth is None else self._watched(source, call, output)

    def _captured(
        self, plan: ReplayPlan, call: Invocation, mask: np.ndarray | None, rows: Rows | None
    ) -> None:
        if rows is not None and plan.cut is not None:
            self.host.captured(call.batch, plan.cut, mask, rows)

    def _hold(self, call: Invocation) -> None:
        """Take all that runs before the boundary into inference mode, once."""
        if not self._is_held and self.boundary is not None:
            started, known = time.perf_counter(), {*self._held}
            own = getattr(self._attached, "__wrapped__", None)
            if (before := before_in_sequence(self.model, self.boundary, own)) is not None:
                self._held.extend(before)
            elif not are_alike(self.model.modules()):
                with Attempt():  # if it is the model's own error, its forward raises it again
                    self._dry_run(self.boundary, call).discover()
            self.host.note("proof", time.perf_counter() - started)
            self._is_held = True
            self._is_told &= are_alike({*self._held} - known)
            self._thaw.watch(self._held)

    def is_beside(self) -> bool:
        """Whether the thread that trains, as far as is known, is there: it is not the caller's."""
        return any(thread.ident == self.trained_by for thread in threading.enumerate())

    # ---- sharded models -----------------------------------------------------------------------

    def _front(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Front:
        """Tell what runs before the last frozen module returns."""
        steps, around = self._dry_run(self.frozen, Invocation.of(args, kwargs)).discover()
        return list({id(step.module): step.module for step in steps}.values()), around

    def _dry_run(self, boundary: str | None, call: Invocation) -> DryRun:
        assert boundary is not None
        frozen = self.frozen or boundary
        return DryRun(self.model, self._forward, boundary, call, self._held, frozen)

    def _look_at_shards(self) -> None:
        """See whether a part of a gathered front is trained again, or it could not be gathered."""
        assert self._sharded is not None
        why, self._sharded.why_not = self._sharded.why_not, None
        if why is not None and self.boundary is not None:
            self._tell_refused(why)
        thawed, self._sharded.thawed = self._sharded.thawed, {}
        if thawed and self.boundary is not None:
            self.host.thawed(next(iter(thawed)), None)
            self._place(None, None)
            self._thaw.note(thawed.values())

    # ---- is the prefix what it was? -----------------------------------------------------------

    def _look(self) -> None:
        """See to the modes of what is held, and to what is trained of it."""
        # What is asked on each call is asked here, without a call of ours.
        if any(map(_is_training, self._held.modules.values())):
            self._held.put_back()  # trainers restore modes after a validation
        if any(map(_requires_grad, self._thaw.tensors)):
            self._retreat(self._thaw.thawed(self.model))
        elif self._declared != (self.boundary, self.frozen) and self._thaw.is_frozen_again():
            self._thaw.forget()
            self._place(*self._declared)

    def _compare(self) -> None:
        """Compare the prefix with what was proved, before anything of it is served."""
        for guard in self._plans.guards:
            if (reason := guard.changed()) is not None:
                self._void(reason, guard)
                break
        if not self._plans.guards:
            self._plans.unpark()

    def _retreat(self, name: str) -> None:
        """A part of the prefix is trained from now on: cut before it, or not at all."""
        plan = next((r for r in self._plans.all() if r.boundary == self.boundary), None)
        cut: str | None = None
        if plan is not None:
            inside = {id(p) for step in plan.steps for p in step.module.parameters()}
            glue = [tensor for *_, tensor in plan.reads if id(tensor) not in inside]
            for step in plan.steps if not any(t.requires_grad for t in glue) else ():
                if any(p.requires_grad for p in step.module.parameters()):
                    break
                cut = step.name
        self.host.thawed(name, cut)
        self._place(cut, cut)

    def _void(self, reason: str, guard: PrefixGuard) -> None:
        """What is stored is of another prefix; it may return, or another one be known."""
        self._voided |= {plan.cut for plan in self._plans.all() if plan.cut is not None}
        if has_joined := any(map(hook_of_training, self._held)):
            self._held.release()  # and it is refused in a moment
        if self._plans.park(guard, is_late=reason == SEEN_LATE) and not has_joined:
            return
        self._is_held = False  # other modules may run before the boundary now
        self.host.prefix_changed(reason, unlink=reason == SEEN_LATE)
        self._announced.clear()
        self._audits = Answers()
        self.cut = None
        if self._auto is not None:
            self._auto.look_again()

    # ---- the boundary -------------------------------------------------------------------------

    def computed(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as it is, past all that is served."""
        with Attempt() as tried:
            call = Invocation.of(args, kwargs)
        if tried.error is not None:
            return self._forward(*unwrap(args), **unwrap(kwargs))
        args, kwargs = call.plain()
        return call.hand_back(self._forward(*args, **kwargs))

    def attach(self) -> None:
        """Take over `model.forward`. The model's `state_dict`, copies and pickles stay plain."""
        self._attached = calls.AttachedForward(self.model, self.forward, self._traced, self._method)
        self._forward, self.is_aside = self._attached.attach(), False
        if self._method != "forward":
            self.scout.close()

    def _entered_at(self, model: nn.Module, method: str, *given: Any) -> None:
        """The loop calls this method of the model, or of a part of it: stand there instead.

        What it was `given` now passes us by: the front is taken into inference mode all the same.
        """
        is_part = model is not self.model
        if self._attached is None or (is_part and self._auto is None):
            return  # the boundary was named for the whole model
        log.info("the loop calls %s.%s", type(model).__name__, method)
        self._attached.take_out()
        if is_part:
            self.set_boundary(None)
            self.model, self._held = model, FrozenPrefix(model=model)
        self._method = method
        self.attach()
        if self._auto is not None:
            self.follow(self._auto.found)
        with self._auto.around(*given) if self._auto is not None else nullcontext():
            if self._auto is not None:
                self._auto.follow(self._forward, *given)
                self._look()
            if not self.host.is_refused():
                self._hold(Invocation.of(*given))

    def _traced(self) -> None:
        """The whole model is being compiled since we were attached: its calls pass us by."""
        self._is_traced = True
        self.scout.close()
        if self.boundary is not None:
            self.host.note("compiled", 0.0)

    def detach(self) -> None:
        """Give the model its own forward back, and let the prefix go. Idempotent."""
        self._confirmed(wait=True)
        self.scout.close()
        self._auto = None
        self.set_boundary(None)
        self._held.release()  # what an interrupted call left
        if self._attached is not None:
            self._attached.take_out()
        self._attached = None

    def follow(self, found: Callable[..., None] | None) -> None:
        """Find the boundary by itself, from the next call on; None: no more.

        Args:
            found: Is told where it is, or why not, and the last frozen module if that is another
                one; calls `set_boundary`.
        """
        self._auto = None if found is None else AutoBoundary(self.model, found)

    def set_boundary(self, name: str | None, *, frozen: str | None = None) -> None:
        """Name the module to cut at: the last frozen one, or an earlier one.

        Args:
            name: Where to cut; None: compute everything.
            frozen: The last frozen module if that is not `name`: what lies between stays in
                inference mode, though it is computed.

        Moving forward keeps what was proved: activations of an earlier cut stay right, and serve as
        entries. Moving back, or to None, voids every cut that lies beyond.

        Raises:
            BoundaryError: The model has no such module.
        """
        name = None if name is None else module_named(self.model, name)
        frozen = name if frozen is None else module_named(self.model, frozen)
        if (name, frozen) == self._declared == (self.boundary, self.frozen):
            return
        self._declared = (name, frozen)
        self._num_calls = 0
        self.stand_in()
        self._thaw.forget()
        self._place(name, frozen)

    def _place(self, name: str | None, frozen: str | None) -> None:
        """Cut there, and hold what is frozen."""
        if self._sharded is None and frozen is not None and states_in(self.model):
            self._sharded = ShardedFront(self.model, self._front)
        if self._sharded is not None:
            self._sharded.follow(frozen)
        before = self._plans.all()
        kept = [r for r in before if name is not None and not r.lies_beyond(name)]
        self._plans = PlanCache(kept)
        same_prefix = frozen is not None and frozen == self.frozen
        self.is_awaited |= self.boundary is not None
        self.boundary, self.frozen, self.cut = name, frozen, None
        self._free.clear()
        self._unserved.begin()
        if not same_prefix:
            self._held.release()
            self._is_held = self.has_run = False
        for plan in kept:
            self._held.extend(step.module for step in plan.steps if not step.run)
        if name is not None:
            self._held.extend([self.model.get_submodule(name)])
        self._thaw.watch(self._held)
        if name is None:
            self._announced.clear()
        elif self._compiled or is_compiled(self.model):
            self._tell_refused(BoundaryError.compiled_whole(name))
        elif self._is_traced:
            self.host.note("compiled", 0.0)

    def knows(self, cut: Cut) -> bool:
        """Whether batches may still enter at this cut."""
        return any(plan.cut is cut for plan in self._plans.all())

    # ---- plans ------------------------------------------------------------------------------

    @attempt.uncollected()
    def _publish(self, plan: ReplayPlan, call: Invocation) -> None:
        modules = [*plan.ancestors, *(module for _, module in plan.skipped_modules())]
        # The model's own hooks, and what wraps its forward since, run around us: what they change,
        # the call comes with.
        inner = (module for module in modules if module is not self.model)
        functions = [*hooks_of(inner), *plan.stored()]
        beneath = {id(self.model): self._attached and self._attached.__wrapped__}
        code = reached(modules, functions, plan.unread, plan.until, beneath, plan.given)
        plan.beside = code.others
        tensors, skipped, around = prefix_tensors(plan), plan.skipped_modules(), plan.around()
        plan.guard = PrefixGuard(tensors, skipped, around, code, by_content=True)
        leaves = {i: tagged.raws.keys() for i, tagged in call.tagged.items()}
        kept = {leaf for i in plan.kept for leaf in leaves[i]}
        dropped = {leaf for i in leaves.keys() - plan.kept for leaf in leaves[i]}
        fields = address(plan, call, plan.guard, code)
        if any(fields == cut.fields for cut in self._voided):
            fields["apart"] = os.urandom(8).hex()
        plan.cut = self.cut = Cut(
            boundary=plan.boundary,
            tensors={n: plan.tensor_spec(slot).row for n, slot in plan.slots().items()},
            devices={n: plan.tensor_spec(slot).device for n, slot in plan.slots().items()},
            dropped=frozenset(dropped - kept), tagged=frozenset(dropped | kept),
            read=frozenset(dropped.union(*(leaves[i] for i in plan.entered))), fields=fields,
            growth=plan.row_growth(), profile=plan.profile,
        )  # fmt: skip
        self._plans.add(plan)
        self._thaw.watch(self._held, plan.reads)
        self._announce(plan, call)

    def _announce(self, plan: ReplayPlan, call: Invocation) -> None:
        """Tell the host of a cut once for every loader whose batches may enter there."""
        cut, loader = plan.cut, call.batch.loader_name
        if cut is not None:
            self._announced.add((id(cut), loader))
            self.host.cut_found(call.batch, cut)

    def _awaits_proof(self, plan: ReplayPlan) -> bool:
        """Whether nothing shows yet that the loop leaves padding alone; say so if that lasts."""
        growth = plan.growth
        if growth is None or self._padding_unread or not growth.proof.missing:
            return False
        growth.proof.take_in()
        if growth.proof.missing and growth.proof.num_watched >= MAX_WATCHED:
            self.host.unproved(PaddingError.unseen(plan.boundary))
        return growth.proof.missing > 0

    def _watched(self, plan: ReplayPlan, call: Invocation, output: Any) -> Any:
        if self._padding_unread or plan.growth is None:
            return output

        def found() -> None:
            """The gradient of the loss comes from padding too: serve nothing like it any more."""
            if any(known.cut is plan.cut for known in self._plans.all()):
                self._refuse(plan.key, PaddingError.reads_padding(plan.boundary, "the loss"))

        return watched(plan.growth, call, output, found)

    def _refuse(self, key: tuple[Any, ...], error: BoundaryError) -> None:
        self._plans.drop(key)
        self._tell_refused(error)

    def _tell_refused(self, error: BoundaryError) -> None:
        """Tell the host, which may raise it where nothing was computed under this boundary."""
        if "call" in self._running:
            self._running["call"].raised = error
        self.host.refused(error, at_first=not self._num_calls)
