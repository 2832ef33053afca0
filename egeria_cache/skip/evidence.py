"""What a rehearsal has seen of the model: shared by the steps of the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from egeria_cache.errors import BoundaryError
from egeria_cache.skip import dropout
from egeria_cache.skip.calls import CallRecord, intercept, is_compiled
from egeria_cache.skip.invocation import Invocation, plain
from egeria_cache.skip.recipe import PrefixDone
from egeria_cache.skip.state import ModelState, RandomState
from egeria_cache.skip.trace import PrefixTrace, known_tensors

__all__ = ["Evidence", "Recomputed", "distinct", "observe", "recompute", "trainable"]


@dataclass(slots=True)
class Evidence:
    """The plain run of the first batch, and the means to run the model again."""

    model: nn.Module
    forward: Callable[..., Any]
    boundary: str
    call: Invocation
    names: dict[int, str]
    steps: list[CallRecord]
    """The modules that returned before the boundary did, and the boundary, in order."""
    ancestors: list[nn.Module]
    outputs: list[Any]
    """Per step, as it stood when the boundary returned."""
    seconds: list[float]
    """Per step, from the model's start until it returned."""
    result: Any
    """The user's."""
    rng_before: RandomState
    rng_after: RandomState
    state: ModelState
    """The model after the plain run; every later run is undone."""

    @property
    def size(self) -> int:
        """Rows of the batch."""
        return self.call.batch.size

    @property
    def modules(self) -> list[nn.Module]:
        """The distinct modules of the steps."""
        return distinct(step.module for step in self.steps)

    def leaf(self, step: int, leaf: int) -> Any:
        """Return one leaf of one step's output."""
        return tree_leaves(self.outputs[step])[leaf]

    def trained_by(self, tensor: Tensor) -> str | None:
        """Name a trainable parameter that `tensor` was computed with, if autograd knows one."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        if id(tensor) in names:
            return names[id(tensor)]
        pending, seen = [tensor.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                return names[id(variable)]
            pending.extend(following for following, _ in node.next_functions)
        return None


@dataclass(slots=True)
class Recomputed:
    """The prefix on other rows."""

    rows: list[int]
    """Which rows of the batch, in which order."""
    leaves: list[list[Any]]
    """Per step, the leaves of its output."""


def observe(evidence: Evidence) -> PrefixTrace | None:
    """Run the prefix once more and note what it reads and draws; None if it is compiled."""
    if any(is_compiled(m) for module in evidence.modules for m in module.modules()):
        return None
    # A run of its own: some modules choose another way where a dispatch mode is active.
    trace = PrefixTrace(known_tensors(evidence.model), evidence.names)
    recompute(evidence, trace=trace)
    return trace


def recompute(
    evidence: Evidence, rows: list[int] | None = None, *, trace: PrefixTrace | None = None
) -> Recomputed:
    """Run the prefix alone on other rows of the batch, under other random numbers.

    Args:
        evidence: The plain run.
        rows: Which rows; by default another number of them, in another order.
        trace: Watches the run.

    Raises:
        BoundaryError: The prefix writes to its buffers, leaves tensors behind, or goes astray.
    """
    size, tagged = evidence.size, evidence.call.tagged
    rows = _other_rows(size) if rows is None else rows
    index = torch.tensor(rows)

    def swap(position: int, leaf: Any) -> Any:
        whole = plain(leaf)
        if position not in tagged and (whole.dim() == 0 or whole.shape[0] != size):
            return whole
        taken = whole[index.to(whole.device)]
        if size == 1 and taken.dim() > 1:  # a batch of one: let its neighbour be another sample
            taken[1] = taken[1].roll(1, -1)
        return taken

    run = _OtherRun(evidence, trace)
    evidence.rng_after.restore()
    torch.rand(1)
    # With autograd on, whatever the user's mode: it tells which outputs are trained.
    with torch.inference_mode(False), torch.enable_grad():
        args, kwargs = evidence.call.rebuild(swap)
        try:
            with intercept(evidence.modules, run), trace or nullcontext(), dropout.only(rows):
                evidence.forward(*args, **kwargs)
        except PrefixDone:
            pass
    _check_state(evidence)
    evidence.state.restore()
    return Recomputed(rows, [tree_leaves(output) for output in run.outputs])


class _OtherRun:
    """Keeps the outputs of the prefix, and leaves the model at the boundary."""

    def __init__(self, evidence: Evidence, trace: PrefixTrace | None) -> None:
        self._evidence = evidence
        self._trace = trace
        self._inside = False
        self.outputs: list[Any] = []

    def __call__(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        steps, position = self._evidence.steps, len(self.outputs)
        if self._inside:
            return original(*args, **kwargs)
        if steps[position].module is not module:
            if any(module is ancestor for ancestor in self._evidence.ancestors):
                return original(*args, **kwargs)
            raise BoundaryError.another_way(
                self._evidence.boundary,
                f"{self._evidence.names[id(module)]!r} runs for some batches only, or at random",
            )
        self._inside = True
        try:
            with self._trace.step(position) if self._trace is not None else nullcontext():
                output = original(*args, **kwargs)
        finally:
            self._inside = False
        self.outputs.append(output)
        if len(self.outputs) == len(steps):
            raise PrefixDone
        return output


def _check_state(evidence: Evidence) -> None:
    """Refuse a prefix that writes to its own buffers or stashes tensors on modules."""
    skipped = [module for module in evidence.modules if trainable(module) is None]
    inside = {id(m) for module in skipped for m in module.modules()}
    inside |= {id(module) for module in evidence.ancestors}
    for module, key in evidence.state.changed_buffers():
        if id(module) in inside:
            name = _join(evidence.names[id(module)], key)
            raise BoundaryError.impure(
                evidence.boundary, f"its prefix writes to the buffer {name!r}"
            )
    for module, key, value in evidence.state.changed_attributes():
        if id(module) in inside and _holds_tensor(value):
            name = _join(evidence.names[id(module)], key)
            raise BoundaryError.impure(
                evidence.boundary,
                f"the prefix leaves a tensor behind as the attribute {name!r}, which would be that "
                "of another batch when the prefix is skipped",
            )


def _join(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _other_rows(size: int) -> list[int]:
    """Return other rows than 0..B-1: another number, in another order."""
    if size == 1:
        return [0, 0]
    return [1, 0, 1] if size == 2 else list(range(size - 1, 0, -1))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules without repetition, in order."""
    return list({id(module): module for module in modules}.values())


def trainable(module: nn.Module) -> str | None:
    """Name one trainable parameter of `module`, if there is one."""
    return next((name for name, p in module.named_parameters() if p.requires_grad), None)
