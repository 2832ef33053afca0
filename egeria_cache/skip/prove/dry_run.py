"""Prove a cut on the first batch, before anything is stored.

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
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from egeria_cache.attempt import Attempt
from egeria_cache.device import synchronize
from egeria_cache.errors import BoundaryError, ParallelError
from egeria_cache.pystate import RandomState, is_compiled
from egeria_cache.skip.model.calls import CallRecord, Recorder
from egeria_cache.skip.model.frozen import FrozenPrefix, mode_asked_for
from egeria_cache.skip.model.fsdp import cut_otherwise
from egeria_cache.skip.prove.model_copy import ModelCopies, ModelCopy, shared_modules
from egeria_cache.skip.prove.proof import prove
from egeria_cache.skip.prove.purity import held_in, moved
from egeria_cache.skip.prove.traced_batch import (
    PrefixRun,
    TracedBatch,
    arguments,
    distinct,
    trainable,
)
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.trace import known_tensors
from egeria_cache.skip.state.hooks import hook_of_training, own_hooks
from egeria_cache.skip.state.surroundings import Surroundings, Weights, World
from egeria_cache.threads import in_turns, uncollected


def record(
    model: nn.Module,
    copied: ModelCopy,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    world: World,
    recorder: Recorder,
) -> None:
    """Run a copy of the model, and write down which of its modules are called."""
    world.restore(for_a_copy=True)
    try:
        with copied.intercept(patchable(model), recorder):
            recorder.begin()
            copied.forward(*given[0], **given[1])
    finally:
        world.restore()


FEW_ROWS = 2
"""Show which modules are called: BatchNorm takes no fewer."""


@dataclass(slots=True)
class Outcome:
    """What the first batch brought."""

    plan: ReplayPlan | None = None
    rows: dict[str, Tensor] | None = None
    """The first batch's activations, as a copy of the model gave them."""
    error: BoundaryError | None = None
    """Why there is no plan."""
    has_raised: bool = False
    """Whether a copy raised as it was run plainly: so may the model itself."""


def before_in_sequence(
    model: nn.Module, boundary: str, forward: Callable[..., Any] | None
) -> list[nn.Module] | None:
    """Return what runs before a boundary returns where that is known without a run: in sequences of
    PyTorch's, of frozen modules. Else None.
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


class DryRun:
    """One attempt to cut `model` at `boundary` for calls like `call`.

    Args:
        model: The model.
        forward: Its own forward.
        boundary: Qualified name of the last frozen module.
        call: The first batch.
        held: Takes the prefix into inference mode.
        frozen: The last frozen module, where that is not `boundary`.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        boundary: str,
        call: Invocation,
        held: FrozenPrefix,
        frozen: str | None = None,
    ) -> None:
        self.model = model
        self.forward = forward
        self.boundary = boundary
        self.call = call
        self.held = held
        self.frozen = frozen or boundary
        self._is_plain = False
        """Whether what runs is the whole model on what it is given."""
        self.names = {id(module): name for name, module in model.named_modules()}
        self._surroundings = Surroundings(model, shared_modules(model))
        self._weights = Weights()

    @in_turns()
    @uncollected()
    def run(self) -> Outcome:
        """Return the plan, or the reason why there is none; the model is as it was before."""
        before, outcome = self._surroundings.now(), Outcome()
        self._weights.looks_closely = True
        try:
            with Attempt() as tried:
                outcome = self._run()
        finally:
            before.restore()
            moved = list(self._weights.put_back(wholly=True).values())
        if tried.error is None and not moved:
            return outcome
        error = self._refusal(tried.error or BoundaryError.moves(self.boundary, moved[0]))
        return Outcome(error=error, has_raised=self._is_plain and error is not tried.error)

    def _run(self) -> Outcome:
        self._is_plain = True
        steps, ancestors = self._discover()
        copies = self._copies()
        traced = TracedBatch(
            model=self.model,
            boundary=self.boundary,
            call=self.call,
            names=self.names,
            steps=steps,
            ancestors=ancestors,
            copies=copies,
            before=self._surroundings.now(),
            surroundings=self._surroundings,
            known=known_tensors(self.model),
            grad=torch.is_grad_enabled(),
        )
        self._run_plainly(traced)
        plan, rows = prove(traced)
        return Outcome(plan, rows)

    def _run_plainly(self, traced: TracedBatch) -> None:
        """Run the whole model on a copy.

        Raises:
            BoundaryError: What is checkpointed would run again in backward; or the prefix went
                astray.
        """
        copied, before = traced.copies.fresh(), traced.before
        args, kwargs = copied.call.plain()
        before.restore(for_a_copy=True)
        run, traced.held = _PlainRun(traced, copied), held_in(traced, copied)
        with copied.intercept(traced.modules, run):
            traced.result = copied.call.result(copied.forward(*args, **kwargs))
        self._is_plain = self._weights.looks_closely = False
        traced.outputs, traced.seconds = run.outputs, run.seconds
        traced.given, traced.moved, traced.called = copied.call.leaves, copied.moved, copied
        traced.counted = [*before.outside.moved_whole(copied.copy_of).values()]
        after = held_in(traced, copied)
        left = moved(traced.held, after)
        traced.left = {mark: (traced.held.get(mark), after[mark]) for mark in left}
        traced.after = self._surroundings.now()

    def front(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules that are called before the boundary returns, and those around it.

        Raises:
            BoundaryError: It is not called, or trainable.
        """
        steps, ancestors = self._discover()
        return distinct(step.module for step in steps), ancestors

    def _copies(self) -> ModelCopies:
        name = cut_otherwise(self.model)
        if name is not None:
            raise ParallelError(self.boundary, name)
        return ModelCopies(self.model, self.forward, self.call, self._weights)

    def _refusal(self, error: Exception) -> BoundaryError:
        if isinstance(error, BoundaryError):
            return error
        # Any other error comes from the model's code meeting a placeholder, or other rows.
        what = f"{type(error).__name__}: {error}"
        if "use_reentrant=True" in what:
            what = "what it checkpoints with use_reentrant=True shows no gradients; take False"
        refusal = BoundaryError.not_proved(self.boundary, what)
        refusal.__cause__ = error
        return refusal

    @uncollected()
    def hold(self) -> None:
        """Only take the prefix into inference mode."""
        with Attempt():  # if it is the model's own error, its forward raises it again
            self._discover()

    def _discover(self) -> tuple[list[CallRecord], list[nn.Module]]:
        """Record the calls with the prefix in inference mode, as it will be from now on; return the
        steps of the prefix, and the modules around it.
        """
        world = self._surroundings.now()
        for _ in range(3):
            recorder = on_few_rows(self.call, functools.partial(self._record, world))
            if self._was_dropped(recorder):
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

    def _record(self, world: World, rows: list[int]) -> Recorder:
        """Run a copy; return which modules were called, and which of them drew random numbers."""
        recorder, copied = Recorder(watch=RandomState.now), self._copies().only()
        record(self.model, copied, arguments(copied.call, rows), world, recorder)
        return recorder

    def _check_hooks(self, modules: list[nn.Module]) -> None:
        """Refuse what would be off in inference mode, and is no layer's own: noise by a hook."""
        for module in filter(mode_asked_for, modules):
            hook = hook_of_training(module)
            if hook is not None:
                self.held.release()  # it is to do what it does
                raise BoundaryError.impure(
                    self.boundary,
                    f"the hook {hook!r} of {self.names.get(id(module))!r} asks whether that module "
                    "trains, and what it does then (noise, say) would be off in a frozen front",
                )

    def _was_dropped(self, recorder: Recorder) -> bool:
        """Whether the boundary may have been left out at random; what did so is now held."""
        module = self.model.get_submodule(self.boundary)
        if any(call.module is module for call in recorder.calls):
            return False
        drawing = [-1, *range(len(recorder.calls))]
        candidates = [recorder.calls[i].module if i >= 0 else self.model for i in drawing
                      if i in recorder.drew]  # fmt: skip
        around = [m for m in candidates if m.training and any(n is module for n in m.modules())]
        return self.held.extend_around(self.model.get_submodule(self.frozen), around)

    def _hold_around(self, recorder: Recorder) -> bool:
        """Hold code before the last frozen module that draws; return whether it was not yet."""
        module = self.model.get_submodule(self.frozen)
        calls = [i for i, call in enumerate(recorder.calls) if call.module is module]
        if not calls or any(recorder.calls[i].end < 0 for i in calls):
            return False
        drawing = recorder.drawing_around(calls[0], self.model)
        return self.held.extend_around(module, [m for m in drawing if m.training])

    def _boundary_call(self, recorder: Recorder) -> int:
        """Choose the last call before which nothing trainable ran; else the very last."""
        module = self.model.get_submodule(self.boundary)
        calls = [i for i, call in enumerate(recorder.calls) if call.module is module]
        if not calls:
            is_late = inspect.isgeneratorfunction(type(self.model).forward)
            raise BoundaryError.never_called(self.boundary, is_late=is_late)
        parameter = trainable(module)
        if parameter is not None:
            raise BoundaryError.trainable(self.boundary, f"{self.boundary}.{parameter}")
        for index in reversed(calls):
            steps, _ = recorder.before(index)
            if not any(trainable(step.module) for step in steps):
                return index
        return calls[-1]


class _PlainRun(PrefixRun):
    """Keeps every output of the prefix during one whole forward, as the boundary has left it."""

    def __init__(self, traced: TracedBatch, copied: ModelCopy) -> None:
        super().__init__(traced, stops=False)
        self._traced, self._copied = traced, copied
        self.seconds: list[float] = []
        """From the model's start until each step returned."""
        synchronize()
        self._started = time.perf_counter()

    def step(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run one step."""
        is_last = len(self.outputs) == len(self._traced.steps) - 1
        output = super().step(module, original, *args, **kwargs)
        synchronize()
        self.seconds.append(time.perf_counter() - self._started)
        if is_last:
            # Copies, as things stand now: the active part may write into what it is given.
            self.outputs = tree_map(_copied, self.outputs)
        return output


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    with torch.inference_mode(False), torch.no_grad():
        return leaf.detach().clone()


T = TypeVar("T")


def on_few_rows(call: Invocation, run: Callable[[list[int]], T]) -> T:
    """Run something on the first rows of a batch; on all of them if it does not take so few.

    On none, which stands for all, of a call that comes without a loader's batch: nobody knows what
    its rows are.
    """
    rows = [] if call.why_not is not None else list(range(call.batch.size))
    with Attempt():
        return run(rows[:FEW_ROWS])
    return run(rows)


def patchable(model: nn.Module) -> list[nn.Module]:
    """Return every module but the model itself, and but what lies inside compiled ones."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if id(child) not in found and child is not model:
                found[id(child)] = child
                if not is_compiled(child):
                    visit(child)

    visit(model)
    return list(found.values())
