"""The three ways through a model: all of it, the prefix alone, and from the cut on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.attempt import is_ours
from egeria_cache.device import runs_late, synchronize
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.model import dropout
from egeria_cache.skip.model.calls import intercept
from egeria_cache.skip.serve.compare import difference, tolerance
from egeria_cache.skip.serve.invocation import Invocation, plain
from egeria_cache.skip.serve.placeholder import Source
from egeria_cache.skip.serve.recipe import Recipe, Unavailable
from egeria_cache.skip.serve.runs import CaptureRun, PrefixDone, ReplayRun, capturing
from egeria_cache.skip.state.quiet import quietly
from egeria_cache.skip.state.remembered import RandomState, Remembered

__all__ = ["alike", "full", "prefix", "replay", "timed"]

Forward = Callable[..., Any]
Rows = dict[str, Tensor]


def full(forward: Forward, recipe: Recipe, call: Invocation) -> tuple[Any, CaptureRun]:
    """Compute every row; what crosses the boundary is captured on the way."""
    capture = capturing(recipe, call.batch.lengths, call.batch.size)
    args, kwargs = call.plain()
    with intercept(recipe.modules, capture):
        return forward(*args, **kwargs), capture


def alike(rows: Rows, proved: Rows | None) -> bool:
    """Whether the model gave what its copies did when the cut was proved."""
    return proved is None or all(
        difference(known, rows[name]) <= tolerance(known) for name, known in proved.items()
    )


def timed(forward: Forward, module: nn.Module, call: Invocation) -> tuple[Any, float, float]:
    """Compute every row as without a cache; return how long it took until `module` returned, and
    in all: the device's time, or on the host this thread's own, which no other process changes.
    """
    is_late = any(runs_late(p.device) for p in module.parameters())

    def now() -> float:
        synchronize()
        return time.perf_counter() if is_late else time.thread_time()

    def note(module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        returned.append(now())
        return output

    args, kwargs = call.plain()
    returned = [now()]
    with intercept([module], note):
        output = forward(*args, **kwargs)
    return output, returned[-1] - returned[0], now() - returned[0]


def prefix(
    forward: Forward,
    source: Recipe,
    call: Invocation,
    rows: np.ndarray,
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Rows:
    """Run the prefix on the masked rows alone, and leave the model where the boundary returns.

    `inputs` are the arguments for these rows; by default the rows that the batch's entry misses.

    Raises:
        BoundaryError: The model took another way this time.
    """
    capture = capturing(source, call.batch.lengths, int(rows.sum()), stop=True)
    args, kwargs = inputs or call.rows(rows)
    generators = RandomState.now() if source.draws else None
    # The code around the boundary will run again, in the replay: let it count once.
    outside = source.surroundings.but_modules() if source.surroundings is not None else None
    if outside is not None:
        outside.restore(for_a_copy=True)
    state = Remembered(slots=[(module.__dict__, key) for module, key in source.moving])
    state.restore(for_a_copy=True)
    try:
        with intercept(source.modules, capture), dropout.only(np.flatnonzero(rows).tolist()):
            quietly(forward, *args, **kwargs)
    except PrefixDone:
        pass
    finally:
        state.restore()
        if outside is not None:
            outside.restore()
    if generators is not None:
        generators.restore()  # the replay draws what the whole forward would
    fresh = capture.rows()
    if fresh is None:
        raise BoundaryError.never_called(source.boundary)
    return fresh


def replay(
    forward: Forward,
    source: Recipe,
    recipe: Recipe | None,
    call: Invocation,
    stored: Mapping[str, Tensor],
) -> tuple[Any, Rows | None]:
    """Enter at `source`'s cut; if the boundary has moved on, capture `recipe`'s on the way.

    Both are those for batches of these lengths; None if such a batch has to be seen first.

    Returns:
        The model's output, and the rows of `recipe` if it is another one than `source`.

    Raises:
        BoundaryError: Something skipped was needed after all. What the replay did is undone, as it
            is where any other error is ours; the model's own are the loop's.
    """
    size = call.batch.size
    values = {
        slot: spec.from_rows(stored[name].clone() if source.copies else stored[name])
        for name, slot, spec in source.entries()
    }
    if source.wants_grad and torch.is_grad_enabled():
        for slot in source.wants_grad & values.keys():
            leaf = values[slot].detach().requires_grad_()
            # What the model writes into may not be a leaf.
            values[slot] = leaf.clone() if source.copies else leaf
    run = ReplayRun(source, size, values, proven=True)
    capture = CaptureRun(recipe, size) if recipe is not None and recipe is not source else None
    args, kwargs = call.noted(call.rebuild(lambda i, leaf: _input(source, run, i, leaf)))
    undo = _Undo(source)
    try:
        with intercept(*_handler(source, run, capture)):
            output = forward(*args, **kwargs)
    except Exception as error:
        if is_ours(error):
            undo.restore()
        raise
    finally:
        run.scene.finished = True
    if source.opaque_outputs:
        output = _hide(call, output, source.opaque_outputs)
    return output, capture.rows() if capture is not None else None


class _Undo:
    """Takes back what an abandoned replay did: random draws, and writes to active buffers."""

    def __init__(self, recipe: Recipe) -> None:
        self._rng = torch.get_rng_state()
        self._recipe = recipe
        recipe.save_buffers()

    def restore(self) -> None:
        torch.set_rng_state(self._rng)
        self._recipe.put_back_buffers()


def _input(source: Recipe, replay: ReplayRun, position: int, leaf: Tensor) -> Tensor:
    if position in source.kept or position not in source.leaf_names:
        result: Tensor = plain(leaf)
        return result
    return source.input_placeholder(position, leaf, replay.scene)


def _handler(
    source: Recipe, replay: ReplayRun, capture: CaptureRun | None
) -> tuple[list[nn.Module], Callable[..., Any]]:
    """Route calls to the replay, and around it to the capture of a later boundary."""
    if capture is None:
        return source.taken_over(), replay
    recipe = capture.recipe
    old, new = set(map(id, source.modules)), set(map(id, recipe.modules))

    def handle(module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in old:
            original = functools.partial(replay, module, original)
        if id(module) in new:
            return capture(module, original, *args, **kwargs)
        return original(*args, **kwargs)

    both = {id(m): m for m in (*source.modules, *recipe.modules)}
    return list(both.values()), handle


def _hide(call: Invocation, output: Any, opaque: frozenset[int]) -> Any:
    leaves, layout = call.result(output)
    hidden = Unavailable(frozenset({Source("step", "a skipped module")}))
    leaves = [hidden if i in opaque else leaf for i, leaf in enumerate(leaves)]
    return call.put(output, leaves, layout)
