"""Find where a model can be cut, and prove it on the first batch, before anything is stored.

Copies of the model (`model_copy.py`) are run on that batch; the user's own model and tensors are
touched by one forward, the user's, when it is known whether the front is cut:
 1. *Discovery*: a forward that writes down the order of module calls. The modules that returned
    before the boundary did are the prefix; they are put into inference mode.
 2. *Plain*: a forward with every output of the prefix kept.
 3. *Recomposition* (traced_batch.py): the prefix alone, on parts of the rows in another order. It
    shows which dimension is the batch, and that no activation depends on its neighbours.
 4. *Probes* (probe.py): replays on placeholders until nothing escapes; each escape adds an input
    leaf, a light module or a tensor to what a hit needs.
 5. *Replay* (proof.py): from rows as they come back from the store; its output must be the plain.

The boundary that finds itself is the deepest module before which nothing trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from egeria_cache.attempt import Attempt, in_turns, uncollected
from egeria_cache.batch import BatchTensor
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import RandomState, is_compiled, names_in, reached
from egeria_cache.skip.model.calls import CallRecord, Recorder
from egeria_cache.skip.model.frozen import FrozenPrefix, mode_asked_for
from egeria_cache.skip.prove import model_copy
from egeria_cache.skip.prove.model_copy import ModelCopies, distinct, trainable
from egeria_cache.skip.prove.proof import prove
from egeria_cache.skip.prove.traced_batch import TracedBatch
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.trace import leaves_behind, tensors_in
from egeria_cache.skip.state.surroundings import Surroundings, Weights, World
from egeria_cache.skip.state.watch import hook_of_training, own_hooks

_requires_grad = attrgetter("requires_grad")
_STILL, _MAX_WAIT = 4, 64
"""Calls between two changes of `requires_grad` that are waited for where it goes back and forth."""
_MAX_TRIED = 4
"""Modules that are tried, deepest first, until the model can be cut."""
_MAX_RAISED = 8
"""Calls whose copies raise, after which it is not looked for any more."""
_FEW_ROWS = 2
"""Show which modules are called: BatchNorm takes no fewer."""


Proved = tuple[ReplayPlan, dict[str, Tensor]]
"""The plan, and the first batch's activations as a copy of the model gave them."""


def before_in_sequence(
    model: nn.Module, boundary: str, forward: Callable[..., Any] | None
) -> list[nn.Module] | None:
    """Return what runs before a boundary returns where that is known without a run, which takes
    10 ms: in sequences of PyTorch's, of frozen modules. Else None.
    """
    before, around = list[nn.Module](), model
    is_plain = getattr(forward, "__func__", None) is nn.Sequential.forward
    for name in boundary.split("."):
        if not is_plain or type(around) is not nn.Sequential or own_hooks(around):
            return None
        before += [*around][: list(around._modules).index(name)]
        around = around.get_submodule(name)
        is_plain = "forward" not in vars(around)
    before.append(around)
    inside = [module for one in before for module in one.modules()]
    is_known = not any(map(trainable, before)) and not any(map(hook_of_training, inside))
    return before if is_known else None


@dataclass(eq=False)
class DryRun:
    """One attempt to cut a model for calls like one."""

    model: nn.Module
    forward: Callable[..., Any]
    """Its own."""
    boundary: str
    """Qualified name of the last frozen module."""
    call: Invocation
    """The first batch."""
    held: FrozenPrefix
    """Takes the prefix into inference mode."""
    frozen: str
    """The last frozen module, where that is not the boundary."""

    def __post_init__(self) -> None:
        shared = model_copy.shared_modules(self.model)
        given = self.call.code().values()
        self._surroundings, self._weights = Surroundings(self.model, shared, given), Weights()

    @in_turns()
    @uncollected()
    def run(self) -> Proved | BoundaryError:
        """Return the plan, or the reason why there is none; the model is as it was before."""
        before = self._surroundings.now()
        try:
            with Attempt() as tried:
                (steps, around), copies = self.discover(), self._copies()
                traced = TracedBatch(self.boundary, steps, around, copies, self._surroundings)
                traced.run_plainly()
                self._weights.looks_closely = False
                proved = prove(traced)
        finally:
            before.restore()
            moved = list(self._weights.put_back(wholly=True).values())
        if tried.error is None and not moved:
            return proved
        error = tried.error or BoundaryError.moves(self.boundary, moved[0])
        if isinstance(error, BoundaryError):
            return error
        # It comes from the model's code meeting a placeholder, or other rows.
        what = f"{type(error).__name__}: {error}"
        if "use_reentrant=True" in what:
            what = "what it checkpoints with use_reentrant=True shows no gradients; take False"
        refused = BoundaryError.not_proved(self.boundary, what)
        refused.__cause__ = error
        return refused

    def _copies(self) -> ModelCopies:
        return ModelCopies(self.model, self.forward, self.call, self._weights)

    @in_turns()
    @uncollected()
    def seen(self) -> tuple[Recorder, list[Any]]:
        """Return the calls of one forward, their outputs as autograd records them, and the leaves
        of what that was given.
        """
        with torch.inference_mode(False), torch.enable_grad():
            return self._recorded(self._surroundings.now(), keep_outputs=True)

    @uncollected()
    def discover(self) -> tuple[list[CallRecord], list[nn.Module]]:
        """Record the calls with the prefix in inference mode, as it will be from now on; return the
        steps of the prefix, and the modules around it.
        """
        world, boundary = self._surroundings.now(), self.model.get_submodule(self.boundary)
        for _ in range(3):
            recorder, _ = self._recorded(world)
            is_called = any(call.module is boundary for call in recorder.calls)
            if not is_called and self._hold_around(recorder):
                continue
            steps, _ = recorder.before(self._boundary_call(recorder))
            skipped = [step.module for step in steps if not trainable(step.module)]
            inside = distinct(m for module in skipped for m in module.modules())
            self._check_hooks(inside)
            before = [m.training for m in inside]
            self.held.extend(skipped)
            moved = before != [m.training for m in inside]
            if not (self._hold_around(recorder) or moved):
                break
        steps, around = recorder.before(self._boundary_call(recorder))
        return steps, distinct([self.model, *(call.module for call in around)])

    def _recorded(self, world: World, *, keep_outputs: bool = False) -> tuple[Recorder, list[Any]]:
        """Run a copy on the first rows of the batch, on all of them if it does not take so few; on
        none, which stands for all, of a call without a loader's batch: nobody knows what its rows
        are. Return which modules were called, which of them drew random numbers, and its inputs.
        """
        rows = [] if self.call.why_not is not None else list(range(self.call.batch.size))

        def run(rows: list[int]) -> tuple[Recorder, list[Any]]:
            recorder, copied = Recorder(keep_outputs, RandomState.now), self._copies().itself()
            given = model_copy.arguments(copied.call, rows)
            if keep_outputs:  # a gradient that is asked of an input trains nothing
                given = tree_map_only(Tensor, Tensor.detach, given)
            world.restore(for_a_copy=True)
            try:
                with copied.intercept(patchable(self.model), recorder):
                    recorder.begin()
                    copied.forward(*given[0], **given[1])
            finally:
                world.restore()
            return recorder, tree_leaves(given)

        with Attempt():
            return run(rows[:_FEW_ROWS])
        return run(rows)

    def _check_hooks(self, modules: list[nn.Module]) -> None:
        """Refuse what would be off in inference mode, and is no layer's own: noise by a hook."""
        for module in filter(mode_asked_for, modules):
            if (hook := hook_of_training(module)) is not None:
                self.held.release()  # it is to do what it does
                names = {id(one): name for name, one in self.model.named_modules()}
                how = f"the hook {hook!r} of {names.get(id(module))!r} asks whether it trains"
                raise BoundaryError.impure(self.boundary, f"{how}, which a frozen front does not")

    def _hold_around(self, recorder: Recorder) -> bool:
        """Hold code around the last frozen module that draws before that returns, or may have left
        it out at random; return whether it was not yet held.
        """
        module = self.model.get_submodule(self.frozen)
        calls = [i for i, call in enumerate(recorder.calls) if call.module is module]
        if any(recorder.calls[i].end < 0 for i in calls):
            return False
        if calls:
            drawing = recorder.drawing_around(calls[0], self.model)
        else:
            drew = sorted(recorder.drew)
            drawing = [recorder.calls[i].module if i >= 0 else self.model for i in drew]
            drawing = [m for m in drawing if any(n is module for n in m.modules())]
        return self.held.extend_around(module, [m for m in drawing if m.training])

    def _boundary_call(self, recorder: Recorder) -> int:
        """Choose the last call before which nothing trainable ran; else the very last."""
        module = self.model.get_submodule(self.boundary)
        calls = [i for i, call in enumerate(recorder.calls) if call.module is module]
        if not calls:
            raise BoundaryError.never_called(self.boundary)
        parameter = trainable(module)
        if parameter is not None:
            raise BoundaryError.trainable(self.boundary, f"{self.boundary}.{parameter}")
        trained = {i for i in calls if any(trainable(s.module) for s in recorder.before(i)[0])}
        return next((i for i in reversed(calls) if i not in trained), calls[-1])


def patchable(model: nn.Module) -> list[nn.Module]:
    """Return every module but the model itself, and but what lies inside compiled ones."""
    pending, found = [model], {id(model)}
    for module in pending:  # what lies beside a compiled one, too, may be called as it is
        inside = module.children() if module is model or not is_compiled(module) else ()
        pending += (new := [child for child in inside if id(child) not in found])
        found.update(map(id, new))
    return pending[1:]


# ---- the boundary that finds itself --------------------------------------------------------------


class AutoBoundary:
    """Looks for the boundary on the first call, and again when `requires_grad` has changed.

    Args:
        model: The model.
        found: Is told the qualified name of the module, or None if nothing is frozen in front; why
            that could not be seen; and the last frozen module if that is another one.
    """

    def __init__(self, model: nn.Module, found: Callable[..., None]) -> None:
        self._model = model
        self.found = found
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._is_trained = not self._trainable
        """Whether the model was trained here."""
        self._versions: list[int] | None = None
        self._places: list[str] = []
        """Where the model might be cut, the one that is tried now first."""
        self._wait = 0
        self.look_again()

    def look_again(self) -> None:
        """The model is another one: adapters have joined it, say."""
        self._parameters = list(self._model.parameters())
        self._seen: list[bool] = []
        self._is_due, self._num_still, self._num_raised = True, 0, 0

    def refuse(self, *, held: str | None) -> bool:
        """The model cannot be cut where it was tried last; return whether there is another place.

        Args:
            held: The last frozen module, which stays that; None if nothing was computed with it
                yet: where there is no place, nothing is frozen until something else trains.
        """
        del self._places[:1]
        if self._places or held is None:
            self.found(self._places[0] if self._places else None, "", held)
        return bool(self._places)

    def is_still(self) -> bool:
        """Whether the same trains as at the last call, and the boundary was looked for."""
        self._num_still += 1
        is_known = self._is_trained and not self._is_due
        return is_known and list(map(_requires_grad, self._parameters)) == self._seen

    @contextmanager
    def around(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """While a call computes features, and nothing else, nothing of the model trains."""
        are_features = self._computes_features(args, kwargs)
        marked = [p for p in self._trainable if are_features and p.requires_grad]
        try:
            for parameter in marked:
                parameter.requires_grad = False
            yield
        finally:
            for parameter in marked:
                parameter.requires_grad = True

    def follow(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Look whether something else trains than at the last call (40 ns a parameter).

        Args:
            forward: The model's own.
            args: What it is called with now.
            kwargs: And by name.
        """
        if self._is_trained and not torch.is_grad_enabled():
            return  # nothing trains in this call, whatever is switched off for it
        flags = list(map(_requires_grad, self._parameters))
        if flags != self._seen:
            is_restless = self._seen and self._num_still < max(_STILL, 2 * self._wait)
            self._wait = min(2 * self._wait + 1, _MAX_WAIT) if is_restless else 0
            self._seen, self._is_due, self._num_still = flags, True, 0
        self._num_still += 1
        if not self._is_due or self._num_still <= self._wait:
            return  # what was thawed is trained meanwhile: the engine sees to that
        self._is_due = False
        self._places = []
        with Attempt() as tried:
            if not all(flags):
                call, held = Invocation.of(args, kwargs), FrozenPrefix(model=self._model)
                seen = DryRun(self._model, forward, "auto", call, held, "").seen()
                self._places = _frozen_cut_points(self._model, *seen)[:_MAX_TRIED]
        is_ours = isinstance(tried.error, BoundaryError)
        if tried.error is not None and not is_ours and self._num_raised < _MAX_RAISED:
            self._num_raised += 1
            self._is_due = True  # the call will raise, too, and the next one is another
            return
        place = self._places[0] if self._places else None
        why = f"boundary='auto': the forward cannot be run on a copy of the model: {tried.error!r}"
        self.found(place, "" if tried.error is None else str(tried.error) if is_ours else why)

    def _computes_features(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call computes features, of a loader's batch, or comes after such a call.

        Nothing trains through a call in evaluation mode under `no_grad` of a model that was never
        trained here, and which nobody may have frozen.
        """
        if self._is_trained or torch.is_grad_enabled() or self._model.training:
            self._is_trained |= torch.is_grad_enabled()
            return False
        given = (*args, *kwargs.values())
        if self._versions is None and not any(isinstance(one, BatchTensor) for one in given):
            return False
        versions = [p._version for p in self._trainable]
        self._is_trained = self._versions not in (None, versions)
        self._versions = versions
        return not self._is_trained


# ---- where a model might be cut ------------------------------------------------------------------


def _frozen_cut_points(model: nn.Module, recorder: Recorder, given: Iterable[Tensor]) -> list[str]:
    """Return where the model might be cut now, deepest first: into none of them anything that
    trains leads, as autograd shows.

    Args:
        model: The model.
        recorder: Has seen one forward with autograd recording, and kept the outputs.
        given: What that was called with: a gradient that is asked of an input trains nothing.
    """
    names = {id(module): name for name, module in model.named_modules()}
    outputs = [tensors_in(call.output) for call in recorder.calls]
    made_here = {id(leaf) for leaves in (*outputs, tensors_in(list(given))) for leaf in leaves}
    frozen = []
    for i, call in enumerate(recorder.calls):
        if call.end < 0 or id(call.module) not in names or not outputs[i]:
            continue
        steps, _ = recorder.before(i)
        has_frozen = any(not p.requires_grad for step in steps for p in step.module.parameters())
        if not has_frozen or trainable(call.module) or _ends_in_training(steps):
            continue
        # A hook may ask for a gradient of an output (`enable_input_require_grads`): nothing trains.
        if all(id(leaf) in made_here for leaf in leaves_behind(outputs[i])):
            frozen.append(i)
    frozen.sort(key=lambda i: recorder.calls[i].end)
    known = set(blocks(model))
    modules = [call.module for call in recorder.calls]
    chosen = [i for i in frozen if names[id(modules[i])] in known]
    # Behind the norm, the ReLU and the pooling that follow a block more is skipped, less is stored.
    joins = [
        isinstance(modules[i], _NORMS) or next(modules[i].parameters(), None) is None
        for i in chosen
    ]
    chosen = [i for i, joined in zip(chosen, [*joins, False][1:], strict=True) if not joined]
    return list(dict.fromkeys(names[id(modules[i])] for i in reversed(chosen or frozen)))


def _ends_in_training(steps: list[CallRecord]) -> bool:
    """Whether a front of these steps would end with one that trains although it has no parameter.

    The front is what is frozen and what lies between. Nobody has frozen a norm without parameters,
    or a dropout, that comes behind the last frozen parameter: in training mode it goes on updating
    its statistics, or drawing, whatever stands before it.
    """
    for step in reversed(steps):
        if next(step.module.parameters(), None) is not None:
            return False
        for module in step.module.modules():
            code = getattr(type(module).forward, "__code__", None)  # PyTorch's own is not followed
            own = names_in(code).all if code is not None else ()
            if module._buffers or "training" in {*own, *reached([module]).names}:
                return True
    return False


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def holds_stage(module: nn.Module) -> bool:
    """Whether a list inside has two or more composite members of one class.

    A block whose shortcut is `Sequential(conv, norm)` has none, and stays whole.
    """
    lists = [[*inner.children()] for inner in module.modules() if _is_list(inner)]
    composite = ([c for c in held if [*c.children()] and not _is_list(c)] for held in lists)
    return any(len(held) > len(set(map(type, held))) for held in composite)


def blocks(
    module: nn.Module, prefix: str = "", *, opens: Callable[[nn.Module], bool] = holds_stage
) -> Iterator[str]:
    """Yield the names of the members of a model's lists, and of what lies between the lists.

    Args:
        module: The model.
        prefix: What its names begin with.
        opens: Whether a member of a list is a stage, whose own members are meant.
    """
    listed = _is_list(module)
    for name, child in module.named_children():
        if _is_list(child) or (opens(child) if listed else _holds_list(child)):
            yield from blocks(child, f"{prefix}{name}.", opens=opens)
        else:
            yield prefix + name


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _holds_list(module: nn.Module) -> bool:
    """Whether a list of two or more members with parameters lies anywhere inside."""
    lists = [inner.children() for inner in module.modules() if _is_list(inner)]
    return any(sum(any(True for _ in child.parameters()) for child in held) > 1 for held in lists)
