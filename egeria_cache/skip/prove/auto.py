"""Find the boundary from what trains: the deepest module before which nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from egeria_cache.attempt import Attempt
from egeria_cache.batch import BatchTensor
from egeria_cache.errors import BoundaryError, ParallelError
from egeria_cache.skip.model.calls import Recorder
from egeria_cache.skip.model.fsdp import cut_otherwise
from egeria_cache.skip.prove.cut_points import frozen_cut_points
from egeria_cache.skip.prove.dry_run import on_few_rows, record
from egeria_cache.skip.prove.model_copy import ModelCopies, shared_modules
from egeria_cache.skip.prove.traced_batch import arguments
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.state.surroundings import Surroundings, Weights
from egeria_cache.threads import in_turns, uncollected

_requires_grad = attrgetter("requires_grad")
_STILL, _MAX_WAIT = 4, 64
"""Calls between two changes of `requires_grad` that are waited for where it goes back and forth."""
_MAX_TRIED = 4
"""Modules that are tried, deepest first, until the model can be cut."""
_MAX_RAISED = 8
"""Calls whose copies raise, after which it is not looked for any more."""


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
        self._features = Features(model)
        self._places: list[str] = []
        """Where the model might be cut, the one that is tried now first."""
        self._wait = 0
        self.look_again()

    def look_again(self) -> None:
        """The model is another one: adapters have joined it, say."""
        self._parameters = list(self._model.parameters())
        self._seen: list[bool] = []
        self._is_due, self._num_still, self._num_raised = True, 0, 0

    def refuse(self, *, spoils: Callable[[str], bool], held: str | None) -> bool:
        """The model cannot be cut where it was tried last; return whether there is another place.

        Args:
            spoils: Whether it cannot be cut at a module either, as was seen.
            held: The last frozen module, which stays that; None if nothing was computed with it
                yet: where there is no place, nothing is frozen until something else trains.
        """
        self._places = [name for name in self._places[1:] if not spoils(name)]
        if self._places or held is None:
            self.found(self._places[0] if self._places else None, "", held)
        return bool(self._places)

    def is_still(self) -> bool:
        """Whether the same trains as at the last call, and the boundary was looked for."""
        self._num_still += 1
        is_known = self._features.is_trained and not self._is_due
        return is_known and list(map(_requires_grad, self._parameters)) == self._seen

    @contextmanager
    def around(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """While a call computes features, and nothing else, nothing of the model trains."""
        are_computed = self._features.are_computed(args, kwargs)
        marked = [p for p in self._features.parameters if are_computed and p.requires_grad]
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
                self._places = self._look(forward, Invocation.of(args, kwargs))[:_MAX_TRIED]
        is_ours = isinstance(tried.error, BoundaryError)
        if tried.error is not None and not is_ours and self._num_raised < _MAX_RAISED:
            self._num_raised += 1
            self._is_due = True  # the call will raise, too, and the next one is another
            return
        place = self._places[0] if self._places else None
        self.found(place, str(tried.error) if is_ours else "")

    @in_turns()
    @uncollected()
    def _look(self, forward: Callable[..., Any], call: Invocation) -> list[str]:
        """Run a copy on a few rows; return where the model might be cut.

        Raises:
            Exception: Its own code has.
        """
        name = cut_otherwise(self._model)
        if name is not None:
            raise ParallelError("auto", name)
        surroundings = Surroundings(self._model, shared_modules(self._model))
        world = surroundings.now()

        def run(rows: list[int]) -> list[str]:
            recorder = Recorder(keep_outputs=True)
            copied = ModelCopies(self._model, forward, call, Weights()).fresh()
            # A gradient that is asked of an input trains nothing before the boundary.
            given = tree_map_only(Tensor, Tensor.detach, arguments(copied.call, rows))
            with torch.inference_mode(False), torch.enable_grad():
                record(self._model, copied, given, world, recorder)
            return frozen_cut_points(self._model, recorder, tree_leaves(given))

        return on_few_rows(call, run)


class Features:
    """Tells the calls of a model that compute features: nothing trains through a call in evaluation
    mode under `no_grad` of a model that was never trained here.

    Args:
        model: The model, which nobody may have frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.is_trained = not self.parameters
        """Whether the model was trained here."""
        self._versions: list[int] | None = None

    def are_computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call is one: of a loader's batch, or one after such a call."""
        if self.is_trained or torch.is_grad_enabled() or self._model.training:
            self.is_trained |= torch.is_grad_enabled()
            return False
        given = (*args, *kwargs.values())
        if self._versions is None and not any(isinstance(one, BatchTensor) for one in given):
            return False
        versions = [p._version for p in self.parameters]
        self.is_trained = self._versions not in (None, versions)
        self._versions = versions
        return not self.is_trained
