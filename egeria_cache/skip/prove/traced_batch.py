"""What a dry run has seen of the model: shared by the steps of the proof.

And which parts of a batch the prefix is run on, to see any dependence between samples. A statistic
of any kind (a mean, a maximum, a quantile, a count, parity of the size) differs somewhere between
the whole batch, two parts of it, single rows and a repeated row. Where all samples happen to agree
in it, the largest token say, made-up neighbours do not.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from egeria_cache.batch import Fold
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Moved, RandomState, entries
from egeria_cache.skip.model.calls import CallRecord
from egeria_cache.skip.model.frozen import Named
from egeria_cache.skip.prove.model_copy import ModelCopies, ModelCopy
from egeria_cache.skip.serve.call import Invocation, Layout
from egeria_cache.skip.serve.replay import PrefixDone
from egeria_cache.skip.serve.trace import PrefixTrace, leaves_behind
from egeria_cache.skip.state.surroundings import Surroundings, World

_FEW = 5
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


def few_rows(size: int) -> list[list[int]]:
    """Return single rows, and last of all a repeated one."""
    rows = dict.fromkeys([0, size - 1, size // 2])
    return [*([row] for row in rows if size > 1), [size // 2] * 2]


def with_made_up(size: int) -> list[list[int]]:
    """Return parts that hold made-up samples, in company and alone."""
    a, b, c = size, size + 1, size + 2
    return [[a, 0], [0, b], [b], [0, c, 0], [c]]


def take(leaf: Tensor, rows: list[int], size: int) -> Tensor:
    """Return some rows of a leaf of shape (B, ...), made-up ones included."""
    if max(rows) >= size:
        leaf = torch.cat([leaf, *_made_up(leaf[:1])])
    return leaf[torch.tensor(rows, device=leaf.device)]


def _made_up(row: Tensor) -> list[Tensor]:
    """Return three other samples than this one, of values that a sample may have."""
    if row.dim() < 2 or not row.numel():  # a label, a length: what is possible cannot be known
        return [row] * 3
    rolled = row.roll(1, -1)
    if row.is_floating_point() or row.is_complex():
        return [rolled, -row.flip(-1), 3 * row + 0.5]
    least, most = row.amin().expand_as(row), row.amax().expand_as(row)
    return [rolled, least, most]


@dataclass(slots=True)
class TracedBatch:
    """The plain run of the first batch, and the means to run the model again."""

    model: nn.Module
    boundary: str
    call: Invocation
    names: dict[int, str]
    steps: list[CallRecord]
    """The modules that returned before the boundary did, and the boundary, in order."""
    ancestors: list[nn.Module]
    copies: ModelCopies
    """Copies of the model and its inputs as they were before the plain run."""
    before: World
    """What the copies share with the model, at that time."""
    surroundings: Surroundings
    known: list[Named]
    """The model's tensors."""
    grad: bool
    """Whether autograd recorded in the plain run."""
    outputs: list[Any] = field(init=False)
    """Per step, as it stood when the boundary returned."""
    seconds: list[float] = field(init=False)
    """Per step, from the model's start until it returned."""
    result: tuple[list[Any], Layout] = field(init=False)
    """All that the call has brought, taken apart."""
    given: list[Any] = field(init=False)
    """The leaves of the call, as the plain run has left them."""
    moved: dict[int, str] = field(init=False)
    """Id -> name of the parameters that the plain run has written to."""
    held: dict[Any, Any] = field(init=False)
    """What the model held before the plain run: see `held_in`."""
    left: dict[Any, tuple[Any, Any]] = field(init=False)
    """What it has left in modules that hits run, or outside, and hits leave otherwise: before and
    after it."""
    counted: list[Moved] = field(init=False)
    """What it has written outside of the model, as far as that can be put ahead."""
    called: ModelCopy = field(init=False)
    """The copy that it was."""
    after: World = field(init=False)
    coarsest: float = 0.0
    """The `coarseness` of all that the prefix computes with."""
    num_runs: int = 0
    """How often the prefix was run again; each run draws other random numbers."""
    common: ModelCopy | None = None
    """The copy that runs share which differ in their rows alone, as batches share a model."""

    @property
    def size(self) -> int:
        """Rows of the batch."""
        return self.call.batch.size

    @property
    def modules(self) -> list[nn.Module]:
        """The distinct modules of the steps."""
        return distinct(step.module for step in self.steps)

    def prefix_modules(self) -> list[nn.Module]:
        """Return all modules of the prefix, at any depth, and those around it."""
        inside = (module for step in self.modules for module in step.modules())
        return distinct([*inside, *self.ancestors])

    def not_skipped(self) -> list[nn.Module]:
        """Return the modules around the boundary, and those that no module of the prefix holds."""
        inside = {id(m) for step in self.modules for m in step.modules()}
        others = (m for m in self.model.modules() if id(m) not in inside)
        return distinct([*self.ancestors, *others])

    def leaf(self, step: int, leaf: int) -> Any:
        """Return one leaf of one step's output."""
        return tree_leaves(self.outputs[step])[leaf]

    def trained_by(self, tensor: Tensor) -> str | None:
        """Name a trainable parameter that `tensor` was computed with, if autograd knows one."""
        both = (self.model, self.copies.model)  # whose parameters are others where they are sharded
        names = {id(p): name for model in both for name, p in model.named_parameters()}
        behind = (tensor, *leaves_behind(tensor))
        return next((names[id(one)] for one in behind if id(one) in names), None)


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
    """Per step, the leaves of what it was called with; empty unless that was asked for."""


def recompute(
    traced: TracedBatch,
    rows: list[int] | None = None,
    *,
    trace: PrefixTrace | None = None,
    copied: ModelCopy | None = None,
    grad: bool | None = None,
    resize: Callable[[int, Tensor], Tensor] | None = None,
    keeps_given: bool = False,
    ahead: int | None = None,
    goes_on: bool = False,
) -> Recomputed:
    """Run the prefix alone on other rows of the batch, under other random numbers.

    Args:
        traced: The plain run.
        rows: Which rows; by default another number of them, in another order.
        trace: Watches the run.
        copied: What to run it on; by default the common copy of the model.
        grad: Whether autograd records; by default as in the plain run.
        resize: Changes the lengths of the loader's leaves: position, rows -> rows.
        keeps_given: Whether to keep what the modules are called with, too.
        ahead: How many calls to put ahead what the plain run has counted outside of the model.
        goes_on: Whether all outside of the model is as the run before has left it.

    Raises:
        BoundaryError: The prefix goes astray.
    """
    size = traced.size
    rows = another(size) if rows is None else rows
    is_common = copied is None
    if copied is None:  # not there for the next run if this one ends in the middle
        copied, traced.common = traced.common or traced.copies.fresh(), None
    run = PrefixRun(traced, trace, keeps_given=keeps_given)
    if not goes_on:
        traced.before.restore(for_a_copy=True)
    for counted in traced.counted if ahead is not None else ():
        counted.put_ahead(ahead or 0, copied.copy_of)
    traced.num_runs += 1
    RandomState.seed(traced.num_runs)
    generators = RandomState.now()
    with torch.inference_mode(False), torch.set_grad_enabled(traced.grad if grad is None else grad):
        args, kwargs = arguments(copied.call, rows, resize)
        try:
            with (
                copied.intercept(traced.modules, run),
                nullcontext() if trace is None else trace.watching(),
            ):
                copied.forward(*args, **kwargs)
        except PrefixDone as done:
            if trace is not None:
                trace.until = run.left_at(done)
    drew = not RandomState.now().equals(generators)
    for name in copied.moved.values():
        raise BoundaryError.moves(traced.boundary, name)
    if is_common:
        traced.common = copied
    return Recomputed(rows, [tree_leaves(output) for output in run.outputs], drew, run.given)


def arguments(
    call: Invocation, rows: list[int], resize: Callable[[int, Tensor], Tensor] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other rows of its batch; as they are for none."""
    if not rows:
        return call.plain()
    size, tagged = call.batch.size, call.tagged

    def swap(position: int, leaf: Any) -> Any:
        if position not in tagged and (leaf.dim() == 0 or leaf.shape[0] != size):
            return leaf
        fold = tagged[position].fold if position in tagged else Fold()
        if fold == Fold():
            taken = take(leaf, rows, size)
        else:
            taken = fold.together(take(fold.apart(leaf), rows, size))
        return taken if resize is None or position not in tagged else resize(position, taken)

    return call.rebuild(swap)


class PrefixRun:
    """Handler for a forward that computes the prefix as it was discovered; keeps its outputs.

    Args:
        traced: What the prefix is.
        trace: Watches the run.
        stops: Whether to leave the model when the boundary has returned.
        keeps_given: Whether to keep what the modules are called with, too.
    """

    def __init__(
        self,
        traced: TracedBatch,
        trace: PrefixTrace | None = None,
        *,
        stops: bool = True,
        keeps_given: bool = False,
    ) -> None:
        self._traced = traced
        self._trace = trace
        self._stops = stops
        self._keeps_given = keeps_given
        self._inside = False
        self._around: set[FrameType] = set()
        """Of the code that calls the steps, where that is traced."""
        self.outputs: list[Any] = []
        self.given: list[list[Any]] = []

    def __call__(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Handle one call of a module of the prefix."""
        steps, position = self._traced.steps, len(self.outputs)
        if self._inside or position == len(steps):
            return original(*args, **kwargs)
        if steps[position].module is not module:
            if any(module is ancestor for ancestor in self._traced.ancestors):
                return original(*args, **kwargs)
            raise BoundaryError.another_way(
                self._traced.boundary,
                f"{self._traced.names[id(module)]!r} runs for some batches only, or at random",
            )
        if self._trace is not None:
            self._around.update(_frames(sys._getframe(1)))
        if self._keeps_given:
            self.given.append(tree_leaves((args, kwargs)))
        self._inside = True
        try:
            with self._trace.step(position) if self._trace is not None else nullcontext():
                output = self.step(module, original, *args, **kwargs)
        finally:
            self._inside = False
        if len(self.outputs) == len(steps) and self._stops:
            raise PrefixDone
        return output

    def step(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run one step."""
        output = original(*args, **kwargs)
        self.outputs.append(tree_map(lambda leaf: leaf, output))  # what is put into it comes later
        return output

    def left_at(self, done: PrefixDone) -> dict[CodeType, int]:
        """Return the offset of the call that is never returned from, in each forward around the
        boundary that has run once.
        """
        forwards = set(_forwards(self._traced.ancestors)) - {
            code for step in self._traced.modules for code in _forwards(step.modules())
        }
        num = Counter(frame.f_code for frame in self._around)
        self._around.clear()
        places = ((at.tb_frame.f_code, at.tb_lasti) for at in _places(done.__traceback__))
        return {code: at for code, at in places if code in forwards and num[code] == 1}


def _forwards(modules: Iterable[nn.Module]) -> Iterator[CodeType]:
    for module in modules:
        for name in entries(module):
            function = inspect.unwrap(getattr(type(module), name))
            if isinstance(function, FunctionType):
                yield function.__code__


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _places(at: TracebackType | None) -> Iterator[TracebackType]:
    while at is not None:
        yield at
        at = at.tb_next


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules without repetition, in order."""
    return list({id(module): module for module in modules}.values())


def trainable(module: nn.Module) -> str | None:
    """Name one trainable parameter of `module`, if there is one."""
    return next((name for name, p in module.named_parameters() if p.requires_grad), None)
