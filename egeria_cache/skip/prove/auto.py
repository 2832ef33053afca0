"""Find the boundary from what trains: the deepest module before which nothing does."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from egeria_cache.attempt import Attempt
from egeria_cache.errors import BoundaryError, ParallelError
from egeria_cache.skip.model.calls import Recorder
from egeria_cache.skip.model.fsdp import cut_otherwise
from egeria_cache.skip.prove.cut_points import frozen_cut_point
from egeria_cache.skip.prove.dry_run import on_few_rows, patchable
from egeria_cache.skip.prove.model_copy import ModelCopies, shared_modules
from egeria_cache.skip.prove.traced_batch import arguments
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.state.surroundings import Surroundings
from egeria_cache.skip.state.weights import Weights
from egeria_cache.threads import in_turns, uncollected

_requires_grad = attrgetter("requires_grad")
_STILL, _MAX_WAIT = 4, 64
"""Calls between two changes of `requires_grad` that are waited for where it goes back and forth."""
_MAX_RAISED = 8
"""Calls whose copies raise, after which it is not looked for any more."""


class AutoBoundary:
    """Looks for the boundary on the first call, and again when `requires_grad` has changed.

    Args:
        model: The model.
        found: Is told the qualified name of the module, or None if nothing is frozen in front, and
            why that could not be seen.
    """

    def __init__(self, model: nn.Module, found: Callable[[str | None, str], None]) -> None:
        self._model = model
        self.found = found
        self._wait = 0
        self.look_again()

    def look_again(self) -> None:
        """The model is another one: adapters have joined it, say."""
        self._parameters = list(self._model.parameters())
        self._seen: list[bool] = []
        self._is_due, self._num_still, self._num_raised = True, 0, 0

    def give_up(self) -> None:
        """The model cannot be cut there: nothing is cut until something else trains."""
        self.found(None, "")

    def is_still(self) -> bool:
        """Whether the same trains as at the last call, and the boundary was looked for."""
        self._num_still += 1
        return not self._is_due and list(map(_requires_grad, self._parameters)) == self._seen

    def follow(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Look whether something else trains than at the last call (40 ns a parameter).

        Args:
            forward: The model's own.
            args: What it is called with now.
            kwargs: And by name.
        """
        flags = list(map(_requires_grad, self._parameters))
        if flags != self._seen:
            is_restless = self._seen and self._num_still < max(_STILL, 2 * self._wait)
            self._wait = min(2 * self._wait + 1, _MAX_WAIT) if is_restless else 0
            self._seen, self._is_due, self._num_still = flags, True, 0
        self._num_still += 1
        if not self._is_due or self._num_still <= self._wait:
            return  # what was thawed is trained meanwhile: the engine sees to that
        self._is_due = False
        place = None
        with Attempt() as tried:
            place = None if all(flags) else self._look(forward, Invocation.of(args, kwargs))
        is_ours = isinstance(tried.error, BoundaryError)
        if tried.error is not None and not is_ours and self._num_raised < _MAX_RAISED:
            self._num_raised += 1
            self._is_due = True  # the call will raise, too, and the next one is another
            return
        self.found(place, str(tried.error) if is_ours else "")

    @in_turns()
    @uncollected()
    def _look(self, forward: Callable[..., Any], call: Invocation) -> str | None:
        """Run a copy on a few rows; return where the model might be cut.

        Raises:
            Exception: Its own code has.
        """
        name = cut_otherwise(self._model)
        if name is not None:
            raise ParallelError("auto", name)
        surroundings = Surroundings(self._model, shared_modules(self._model))
        world = surroundings.now()

        def run(rows: list[int]) -> str | None:
            recorder = Recorder(keep_outputs=True)
            copied = ModelCopies(self._model, forward, call, Weights()).fresh()
            # A gradient that is asked of an input trains nothing before the boundary.
            args, kwargs = tree_map_only(Tensor, Tensor.detach, arguments(copied.call, rows))
            world.restore(for_a_copy=True)
            try:
                with (
                    torch.inference_mode(False),
                    torch.enable_grad(),
                    copied.intercept(patchable(self._model), recorder),
                ):
                    copied.forward(*args, **kwargs)
            finally:
                world.restore()
            return frozen_cut_point(self._model, recorder, tree_leaves((args, kwargs)))

        return on_few_rows(call, run)
