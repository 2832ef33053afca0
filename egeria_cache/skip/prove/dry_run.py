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

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from egeria_cache.attempt import Attempt
from egeria_cache.errors import BoundaryError, ParallelError
from egeria_cache.pystate import RandomState, is_compiled
from egeria_cache.skip.model.calls import CallRecord, Recorder
from egeria_cache.skip.model.frozen import FrozenPrefix, mode_asked_for
from egeria_cache.skip.model.fsdp import cut_otherwise
from egeria_cache.skip.prove import model_copy
from egeria_cache.skip.prove.model_copy import ModelCopies, distinct, trainable
from egeria_cache.skip.prove.proof import prove
from egeria_cache.skip.prove.traced_batch import TracedBatch
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.state.hooks import hook_of_training, own_hooks
from egeria_cache.skip.state.surroundings import Surroundings, Weights, World
from egeria_cache.threads import in_turns, uncollected

FEW_ROWS = 2
"""Show which modules are called: BatchNorm takes no fewer."""


Proved = tuple[ReplayPlan, dict[str, Tensor]]
"""The plan, and the first batch's activations as a copy of the model gave them."""


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
        self._surroundings, self._weights = Surroundings(self.model, shared), Weights()

    @in_turns()
    @uncollected()
    def run(self) -> Proved | BoundaryError:
        """Return the plan, or the reason why there is none; the model is as it was before."""
        before = self._surroundings.now()
        self._weights.looks_closely = True
        try:
            with Attempt() as tried:
                found, copies = self.discover(), self._copies()
                traced = TracedBatch(self.boundary, found, copies, self._surroundings)
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
        name = cut_otherwise(self.model)
        if name is not None:
            raise ParallelError(self.boundary, name)
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
        world = self._surroundings.now()
        for _ in range(3):
            recorder, _ = self._recorded(world)
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

    def _recorded(self, world: World, *, keep_outputs: bool = False) -> tuple[Recorder, list[Any]]:
        """Run a copy on the first rows of the batch, on all of them if it does not take so few; on
        none, which stands for all, of a call without a loader's batch: nobody knows what its rows
        are. Return which modules were called, which of them drew random numbers, and its inputs.
        """
        rows = [] if self.call.why_not is not None else list(range(self.call.batch.size))

        def run(rows: list[int]) -> tuple[Recorder, list[Any]]:
            recorder, copied = Recorder(keep_outputs, RandomState.now), self._copies().fresh()
            # A gradient that is asked of an input trains nothing before the boundary.
            given = tree_map_only(Tensor, Tensor.detach, model_copy.arguments(copied.call, rows))
            world.restore(for_a_copy=True)
            try:
                with copied.intercept(patchable(self.model), recorder):
                    recorder.begin()
                    copied.forward(*given[0], **given[1])
            finally:
                world.restore()
            return recorder, tree_leaves(given)

        with Attempt():
            return run(rows[:FEW_ROWS])
        return run(rows)

    def _check_hooks(self, modules: list[nn.Module]) -> None:
        """Refuse what would be off in inference mode, and is no layer's own: noise by a hook."""
        for module in filter(mode_asked_for, modules):
            hook = hook_of_training(module)
            if hook is not None:
                self.held.release()  # it is to do what it does
                names = {id(one): name for name, one in self.model.named_modules()}
                raise BoundaryError.impure(
                    self.boundary,
                    f"the hook {hook!r} of {names.get(id(module))!r} asks whether that module "
                    "trains, and what it does then (noise, say) would be off in a frozen front",
                )

    def _was_dropped(self, recorder: Recorder) -> bool:
        """Whether the boundary may have been left out at random; what did so is now held."""
        module = self.model.get_submodule(self.boundary)
        if any(call.module is module for call in recorder.calls):
            return False
        drawing = sorted(recorder.drew)
        candidates = [recorder.calls[i].module if i >= 0 else self.model for i in drawing]
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


def patchable(model: nn.Module) -> list[nn.Module]:
    """Return every module but the model itself, and but what lies inside compiled ones."""
    found, pending = dict[int, nn.Module](), [model]
    for module in pending:
        for child in module.children():
            if id(child) not in found and child is not model:
                found[id(child)] = child
                if not is_compiled(child):
                    pending.append(child)
    return list(found.values())
