"""What a dry run has seen of the model: shared by the steps of the proof.

And which parts of a batch the prefix is run on, to see any dependence between samples. A statistic
of any kind (a mean, a maximum, a quantile, a count, parity of the size) differs somewhere between
the whole batch, two parts of it, single rows and a repeated row. Where all samples happen to agree
in it, the largest token say, made-up neighbours do not.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from egeria_cache.device import synchronize
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import PLAIN, Content, RandomState, entries
from egeria_cache.skip.model.calls import CallRecord
from egeria_cache.skip.prove.model_copy import ModelCopies, ModelCopy, arguments, distinct
from egeria_cache.skip.serve.call import Layout
from egeria_cache.skip.serve.compare import same_content
from egeria_cache.skip.serve.replay import PrefixDone, PrefixRun
from egeria_cache.skip.serve.trace import PrefixTrace, known_tensors, leaves_behind
from egeria_cache.skip.state.surroundings import Surroundings
from egeria_cache.skip.state.watch import HOOKS, OF_EVERY_MODULE

_FEW = 3
"""Rows of a run that shows what does not depend on their number."""


def another(size: int) -> list[int]:
    """Return other rows than 0..B-1: another number, in another order.

    Rows from B on are made-up samples.
    """
    if size <= 3:
        return [[0, 1], [1, 0, 1, 0], [2, 1]][size - 1]
    return list(range(size - 1, max(size // 2 - 1, size - 1 - _FEW), -1))


def rest(size: int) -> list[int]:
    """Return the rows that `another` leaves; all of a batch of three or fewer.

    Both are reversed: each sample meets another first, last and next one than in the whole.
    """
    return list(range(size)) if size <= 3 else list(range(size - len(another(size))))[::-1]


_NOT_STATE = frozenset({"_modules", "_parameters", "_buffers", "train", "forward", *HOOKS})
Held = dict[Any, Content]
"""What modules hold, by (module, attribute), and words outside of the model, by place."""


def moved(before: Held, after: Held) -> dict[Any, bool]:
    """Return where something is another, and whether tensors or arrays that were there are."""
    found = {}
    for mark, held in after.items():
        then = before[mark].texts if mark in before else {}
        if then != held.texts:
            paths = {path for path, _ in then.items() ^ held.texts.items()}
            found[mark] = not held.arrays.isdisjoint(paths & then.keys() if then else paths)
    return found


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = module.__dict__
    for key, value in (*own.get("_buffers", {}).items(), *own.items()):
        is_own = key == "training" or key not in OF_EVERY_MODULE
        if key not in _NOT_STATE and (is_own or (isinstance(value, dict) and value)):
            yield key, value


@dataclass(slots=True)
class Recomputed:
    """The prefix on other rows."""

    rows: list[int]
    """Which rows of the batch, in which order."""
    leaves: list[list[Any]]
    """Per step, the leaves of its output."""
    drew: bool
    """Whether it has drawn from a global random generator."""
    given: list[list[Any]]
    """Per step, the leaves of what it was called with."""


@dataclass(eq=False)
class TracedBatch:
    """The plain run of the first batch, and the means to run the model again."""

    boundary: str
    """Qualified name of the last module of the prefix."""
    steps: list[CallRecord]
    """The calls that returned before the boundary did, and that one, in order."""
    ancestors: list[nn.Module]
    """The modules around it."""
    copies: ModelCopies
    """Of the model and its inputs as they are before the plain run."""
    surroundings: Surroundings
    """What the copies share with the model."""
    trace: PrefixTrace = field(init=False)
    """What a run of the prefix was seen to read."""

    def __post_init__(self) -> None:
        copies = self.copies
        self.model, self.call, self.size = copies.model, copies.call, copies.call.batch.size
        self.before = self.surroundings.now()
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self.known = known_tensors(self.model)
        self.grad = torch.is_grad_enabled()
        """Whether autograd records in the plain run."""
        self.modules = distinct(step.module for step in self.steps)
        self._contents = dict[int, tuple[Any, Content]]()
        self._num_runs = 0
        """How often the prefix was run again; each run draws other random numbers."""
        self.common: ModelCopy | None = None
        """The copy that runs share which differ in their rows alone, as batches share a model."""

    def run_plainly(self) -> None:
        """Run the whole model on a copy.

        Raises:
            BoundaryError: What is checkpointed would run again in backward; or the prefix went
                astray.
        """
        copied = self.called = self.copies.fresh()
        run, self.held = TracedRun(self, stop=False), self.held_by(copied)
        self.result = self.run(copied, run)
        """All that the call has brought, taken apart."""
        self.specs = [tree_structure(output) for output in run.outputs]
        """How each step's output is built."""
        leaves, self.seconds = [tree_leaves(output) for output in run.outputs], run.seconds
        """From the model's start until each step has returned."""
        self.plain = Recomputed(list(range(self.size)), leaves, False, run.given)
        """As it stood when the boundary returned."""
        self.given, self.moved = copied.call.leaves, copied.moved
        """The leaves of the call, as it has left them, and what parameters it has written to."""
        given, as_they_were = self.given, self.copies.leaves
        self.written = [i for i in self.call.tagged if not same_content(given[i], as_they_were[i])]
        """The positions of the loader's leaves that it has written to."""
        self.outside = self.replayed = self.before.outside.moved_whole(copied.of)
        """What it has counted outside of the model, by place; and what the last replay has."""
        after = self.held_by(copied)
        left = moved(self.held, after)
        self.left = {mark: (self.held.get(mark), after[mark]) for mark in left}
        """What it has left in modules that hits run, or outside, and hits leave otherwise: before
        and after it."""
        self.after = RandomState.now()

    def run(
        self,
        copied: ModelCopy,
        handler: Callable[..., Any],
        swap: Callable[[int, Any], Any] = lambda _, leaf: leaf,
    ) -> tuple[list[Any], Layout]:
        """Run all of a copy, the calls of the prefix by a handler; return what the call has
        brought, taken apart.
        """
        self.before.restore(for_a_copy=True)
        args, kwargs = copied.call.noted(copied.call.rebuild(swap))
        with copied.intercept(self.modules, handler):
            leaves, layout = copied.call.result(copied.forward(*args, **kwargs))
        return [*map(copied.real, leaves)], layout

    def recompute(
        self,
        rows: list[int] | None = None,
        *,
        trace: PrefixTrace | None = None,
        copied: ModelCopy | None = None,
        grad: bool | None = None,
        resize: Callable[[int, Tensor], Tensor] | None = None,
        goes_on: bool = False,
    ) -> Recomputed:
        """Run the prefix alone on other rows of the batch, under other random numbers.

        Args:
            rows: Which rows; by default another number of them, in another order.
            trace: Watches the run.
            copied: What to run it on; by default the common copy of the model.
            grad: Whether autograd records; by default as in the plain run.
            resize: Changes the lengths of the loader's leaves: position, rows -> rows.
            goes_on: Whether all outside of the model is as the run before has left it.

        Raises:
            BoundaryError: The prefix goes astray.
        """
        rows = another(self.size) if rows is None else rows
        copied, is_common = copied or self.common or self.copies.fresh(), copied is None
        if is_common:  # not there for the next run if this one ends in the middle
            self.common = None
        run = TracedRun(self, trace)
        if not goes_on:
            self.before.restore(for_a_copy=True)
        self._num_runs += 1
        RandomState.seed(self._num_runs)
        generators = RandomState.now()
        records = self.grad if grad is None else grad
        with torch.inference_mode(False), torch.set_grad_enabled(records):
            args, kwargs = arguments(copied.call, rows, resize)
            watched = nullcontext() if trace is None else trace.watching()
            try:
                with copied.intercept(self.modules, run), watched:
                    copied.forward(*args, **kwargs)
            except PrefixDone as done:
                if trace is not None:
                    trace.until = run.left_at(done)
        drew = not RandomState.now().equals(generators)
        for name in copied.moved.values():
            raise BoundaryError.moves(self.boundary, name)
        if is_common:
            self.common = copied
        return Recomputed(rows, [tree_leaves(output) for output in run.outputs], drew, run.given)

    def held_by(self, copied: ModelCopy) -> Held:
        """Return what a copy of the model holds now, and what words it has left outside."""
        own = {(m, k): self._content(v) for m in copied.modules for k, v in _state(copied.of(m))}
        world = self.before.outside
        words = {
            (i, name): Content(part)
            for i, place in enumerate(world.places)
            if place.has_names and id(place.where) not in world.apart
            for name, part in place.read(copied.of(place.where)).items()
            if type(part) in (bool, str)
        }
        return own | words

    def _content(self, value: Any) -> Content:
        """Return what an attribute holds; one that cannot change is looked at once."""
        if not PLAIN.issuperset(map(type, value if type(value) is tuple else (value,))):
            return Content(value, into_foreign=False)
        if id(value) not in self._contents:
            self._contents[id(value)] = value, Content(value, into_foreign=False)
        return self._contents[id(value)][1]

    def not_skipped(self) -> list[nn.Module]:
        """Return the modules around the boundary, and those that no module of the prefix holds."""
        inside = {id(m) for step in self.modules for m in step.modules()}
        others = (m for m in self.model.modules() if id(m) not in inside)
        return distinct([*self.ancestors, *others])

    def leaf(self, step: int, leaf: int) -> Any:
        """Return one leaf of one step's output."""
        return self.plain.leaves[step][leaf]

    def refuse_trained(self, tensor: Tensor) -> None:
        """Raise if autograd knows a trainable parameter that `tensor` was computed with."""
        both = (self.model, self.copies.first)  # whose parameters are others where they are sharded
        names = {id(p): name for model in both for name, p in model.named_parameters()}
        for one in (tensor, *leaves_behind(tensor)):
            if id(one) in names:
                raise BoundaryError.trainable(self.boundary, names[id(one)])


class TracedRun(PrefixRun):
    """Keeps what the steps give. Where it does not stop when the boundary has returned, that is as
    it stands then; and the time from here until each has returned.

    Args:
        traced: What the prefix is.
        trace: Watches the run.
        stop: Whether it stops.
    """

    def __init__(
        self, traced: TracedBatch, trace: PrefixTrace | None = None, *, stop: bool = True
    ) -> None:
        super().__init__(traced.steps, traced.ancestors, stop=stop)
        self._traced, self._trace = traced, trace
        self._frames: set[FrameType] = set()
        """Of the code that calls the steps, where that is traced."""
        self.outputs: list[Any] = []
        self.given: list[list[Any]] = []
        self.seconds: list[float] = []
        synchronize()
        self._started = time.perf_counter()

    def goes_astray(self, module: nn.Module, step: CallRecord) -> None:
        """Refuse it."""
        how = f"{self._traced.names[id(module)]!r} runs for some batches only, or at random"
        raise BoundaryError.another_way(self._traced.boundary, how)

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what it is called with."""
        if self._trace is not None:
            self._frames.update(frame for frame, _ in walk_stack(sys._getframe(2)))
            self._trace.at = self.position
        self.given.append(tree_leaves((args, kwargs)))

    def ends(self, step: CallRecord, output: Any) -> None:
        """Keep what it gives."""
        if self._trace is not None:
            self._trace.at = -1
        self.outputs.append(tree_map(lambda leaf: leaf, output))  # what is put into it comes later
        if self.stop:
            return
        synchronize()
        self.seconds.append(time.perf_counter() - self._started)
        if self.position == len(self.steps) - 1:
            # Copies, as things stand now: the active part may write into what it is given.
            self.outputs = tree_map(_copied, self.outputs)

    def left_at(self, done: PrefixDone) -> dict[CodeType, int]:
        """Return the offset of the call that is never returned from, in each forward around the
        boundary that has run once.
        """
        inside = (module for step in self._traced.modules for module in step.modules())
        forwards = _forwards(self._traced.ancestors) - _forwards(inside)
        num = Counter(frame.f_code for frame in self._frames)
        self._frames.clear()
        found, at = dict[CodeType, int](), done.__traceback__
        while at is not None:
            code = at.tb_frame.f_code
            if code in forwards and num[code] == 1:
                found[code] = at.tb_lasti
            at = at.tb_next
        return found


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    with torch.inference_mode(False), torch.no_grad():
        return leaf.detach().clone()


def _forwards(modules: Iterable[nn.Module]) -> set[CodeType]:
    named = ((type(module), name) for module in modules for name in entries(module))
    functions = (inspect.unwrap(getattr(kind, name)) for kind, name in named)
    return {one.__code__ for one in functions if isinstance(one, FunctionType)}
