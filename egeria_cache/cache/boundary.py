"""The state of a cache, beneath what its engine and its loaders ask, and who moves the boundary.
Written on the training thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from egeria_cache.errors import BoundaryError
from egeria_cache.gate import Counters, ServingPolicy
from egeria_cache.prefetch import Views
from egeria_cache.skip import Cut, SkipEngine, module_named

log = logging.getLogger("egeria")


@dataclass(frozen=True, slots=True)
class BoundaryMoved:
    """The frozen prefix changed: the one event that crosses from a freeze controller to the cache.

    Published between two training steps.
    """

    step: int
    """First training step whose forward uses the new prefix."""
    boundary: str | None
    """Qualified name of the last frozen module; None after an unfreeze."""
    previous: str | None
    """The boundary before this event."""
    reason: str
    """In words, for logs and history."""


@dataclass(eq=False, repr=False)
class Status:
    """The state of one cache, which moves its engine's boundary: by the user, by a freeze
    controller, by the gate.
    """

    policy: ServingPolicy
    """Whether serving pays, and whether a proof would."""
    engine: SkipEngine = field(init=False)
    """The model's, once it is made."""
    views: Views = field(default_factory=Views)
    """What may be read."""
    counters: Counters = field(default_factory=Counters)
    boundary: str | None = None
    """The last frozen module, as whoever set it named it."""
    set_by_hand: bool = True
    is_sought: bool = False
    """Whether the next call of the model finds the boundary."""
    is_proved: bool = False
    """Whether the model was cut under this boundary: it is no mistake of whoever set it."""
    num_moves: int = 0
    """How often the boundary, or the cut before it, has moved."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Loaders whose samples cannot be cached, and why."""
    together: dict[str, str] = field(default_factory=dict)
    """Loaders in whose batches not every leaf is the samples' own, and why."""
    is_closed: bool = False
    since: float = field(default_factory=time.time)
    """When the cache was made, in seconds since the epoch."""
    process: int = field(default_factory=os.getpid)
    """Where the cache was made. A forked child has none of its threads: it computes everything."""
    told: set[Hashable] = field(default_factory=set)
    """What was said already; see `is_news`."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that made the cache."""
        return os.getpid() != self.process

    def is_news(self, *what: Hashable) -> bool:
        """Whether something is to be told: each is told once."""
        is_news = what not in self.told
        self.told.add(what)
        return is_news

    def may_store(self, loader_name: str) -> bool:
        """Whether what the model computes for this loader may be stored."""
        is_off = self.is_closed or self.policy.mode == "never" or self.is_forked
        return not (is_off or loader_name in self.left_out or loader_name in self.policy.stopped)

    def move(self, name: str | None, *, by_hand: bool, reason: str) -> None:
        """Freeze up to and including this module; None unfreezes all; "auto": up to the deepest
        before which nothing trains, now and later.

        Raises:
            BoundaryError: No module has this name, or one of its parameters is trainable.
        """
        self.is_sought = name == "auto"
        self.engine.follow(self._found if name == "auto" else None)
        if name != "auto":
            self._move(name, by_hand=by_hand, reason=reason)

    def _found(self, name: str | None, why: str, frozen: str | None = None) -> None:
        self.is_sought = False
        self._move(name, by_hand=False, reason="what trains has been looked at", frozen=frozen)
        if name is None:
            why = why or (
                "boundary='auto': no module is frozen before the first one that trains; freeze the "
                "front with requires_grad_(False), and it is cached from then on"
            )
            # Said once where nothing ever was: later it is what the training wanted.
            level = logging.INFO if self.num_moves else logging.WARNING
            self.counters.tell(why, level=level)

    def _move(
        self, name: str | None, *, by_hand: bool, reason: str, frozen: str | None = None
    ) -> None:
        if name is not None:  # as the model itself names the module
            name = module_named(self.engine.model, name)
            for parameter, value in self.engine.model.get_submodule(name).named_parameters():
                if value.requires_grad:
                    raise BoundaryError.trainable(name, f"{name}.{parameter}")
        if name == self.boundary:
            return
        previous, self.boundary, self.set_by_hand = self.boundary, name, by_hand
        self.num_moves += 1
        self.is_proved = False
        self.told.discard(("the prefix changed",))
        self.counters.counts.why_not = next(iter(self.left_out.values()), None)
        self.policy.moved()
        if name is None:
            self.views.void(lambda view: True, unlink=not by_hand)
        self.engine.set_boundary(name, frozen=frozen)
        self._void_unknown()
        log.info("boundary moved from %s to %s: %s", previous, name, reason)

    def look_earlier(self, cut: Cut) -> None:
        """Cut before the last frozen module, if that is found to be better."""
        policy = self.policy
        if cut.boundary != self.engine.frozen or not (where := policy.look_earlier(cut.profile)):
            return
        log.info("the model is %s", policy.earlier)
        self.engine.set_boundary(where, frozen=self.engine.frozen)
        self.num_moves += 1
        self._void_unknown()

    def _void_unknown(self) -> None:
        """Void the views of cuts that lie beyond the boundary now."""
        self.views.void(lambda view: not self.engine.knows(view.cut), unlink=False)


def shown_name(loader_key: str) -> str:
    """Return the name that the user gave a loader (`LoaderSource.key` tells it from others)."""
    return loader_key.rpartition("#")[0]
