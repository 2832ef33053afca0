"""What an `EgeriaLoader` asks of its cache, and tells it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from egeria_cache.attempt import Attempt
from egeria_cache.cache.boundary import shown_name
from egeria_cache.cache.engine_callbacks import EngineCallbacks
from egeria_cache.errors import StoreError
from egeria_cache.gate import CacheStats, Kind, ServingPolicy
from egeria_cache.prefetch import PlannedEntry, ReaderThreads, View
from egeria_cache.samples import Clock, LoaderSource
from egeria_cache.store import ROOT_FORMAT, ActivationStore, read_json, write_json
from egeria_cache.tables import size

log = logging.getLogger("egeria")
_BESIDE = (
    "its batches are loaded in another thread than that which has trained so far, and the two "
    "share their random generators; give it num_workers=1 or more"
)
_CLOSED = (
    "the cache is closed, and its loader goes on without it: train inside `with "
    "ActivationCache(...) as cache:`, or close the cache when all epochs are done"
)
MAX_UNSEEN = 3
"""Batches that may be yielded without the model having been called, before that is said."""
_UNSEEN = (
    f"{MAX_UNSEEN} batches were yielded and the model was not called with any of them, so nothing "
    "is cached. Does the loop call a part of it (`self.net(x)`)? Make the cache of that part. Is "
    "the whole model compiled? Compile its blocks instead (block.compile()), and give it the "
    "loader's batches as they come"
)
_UNLIKE = "loader after loader was made over another data set, and none was passed again"
MAX_UNLIKE = 8
MAX_ALIKE = 4
"""Loaders of one name whose views are kept; scripts make one for every evaluation."""


class LoaderApi(EngineCallbacks):
    """One cache as its loaders see it. A loader is named by its `LoaderSource.key`.

    Args:
        store: As for `EngineCallbacks`, like the next two.
        policy: Whether serving pays.
        audit_rate: Fraction of the hits to be recomputed.
        ring_batches: How many mini-batches are read ahead.
    """

    def __init__(
        self, store: ActivationStore, policy: ServingPolicy, audit_rate: float, ring_batches: int
    ) -> None:
        super().__init__(store, policy, audit_rate)
        self.ring_batches = ring_batches
        self.readers = ReaderThreads()
        """The threads that read ahead, shared by all loaders."""
        self._num_calls, self._num_unseen = 0, 0
        """Calls of the model when a batch was yielded last, and batches since without one."""
        self._stepped: deque[bool] = deque(maxlen=1)
        """Not empty if an optimizer has stepped since: this is no pass for statistics."""
        self._steps: Callable[[], object] | None = None
        self._clocks: dict[str, Clock] = {}
        """Where random draws stand, by note: a note that cannot be written stops none of them."""
        self._num_unlike = 0
        """Loaders that have begun without anything of others to adopt."""
        with contextlib.suppress(OSError, StoreError):
            noted = read_json(store.directory / _EPOCHS, ROOT_FORMAT).items()
            policy.num_epochs |= {name: num for name, num in noted if type(num) is int}

    @property
    def is_asked(self) -> bool:
        """Whether something is frozen, or the first call is to find whether it is."""
        return self.is_sought or self.boundary is not None

    def beside(self, loader_name: str) -> Attempt:
        """Do something beside the loop: if it goes wrong, the loader is cached no more."""
        return Attempt(partial(self.failed_for, loader_name))

    def outlook(self, source: LoaderSource) -> tuple[Sequence[View], bool | None]:
        """Return what a loader may read at the moment, deepest first, and whether all generators
        are seeded; None if they are let be, in a thread beside the training.

        Of states of the front, or training and evaluation, in turns, one has stored more of what
        random samples are now.
        """
        if self.is_beside(source):
            return (), None
        if self.is_plain(source.key):
            return (), False
        views = [] if self.counters.is_compiled else self.views.of(source.key)
        views = [view for view in views if self.engine.knows(view.cut)] or views
        now = "train" if self.engine.model.training else "eval"
        views = [view for view in views if now in view.cut.fields["mode"][:1]] or views
        # What is computed to be timed is not stored: nobody reads its draws again.
        return views, bool(views) or not self.policy.wants_timing(source.key)

    def note_epochs(self) -> None:
        """Note for the next run in this directory how many epochs this one had."""
        if self.policy.num_epochs:
            self._note(_EPOCHS, self.policy.num_epochs)

    def _note(self, name: str, content: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, StoreError):
            write_json(self.store.directory / name, {**content, "format": ROOT_FORMAT})

    def adopt(self, source: LoaderSource) -> None:
        """Let a new loader read from its first batch on what others of its name have stored, if the
        data are the same: an evaluation that makes its loader anew, say.
        """
        self.loaders.add(source.key)
        if self.boundary is None or self.is_forked or self.views.of(source.key):
            return
        name = shown_name(source.key)
        alike = [v for v in self.views.everywhere() if shown_name(v.loader_name) == name]
        if not alike or source.key in self.left_out:
            return
        fields = source.fields
        for view in reversed(alike):
            theirs = view.generation.fields
            # Leaves and draws only some have.
            if all(theirs.get(key) == fields.get(key) for key in {*fields, "leaves", "draws"}):
                source.counts |= view.counts
                source.study.padding = source.study.padding or view.padding
                self.views.add(replace(view, loader_name=source.key))
        self._num_unlike += not self.views.of(source.key)
        if self._num_unlike == MAX_UNLIKE and not self.counters.counts.hits:
            self.uncached(_UNLIKE, "Let a sampler choose from one data set, of one loader")
        for key in list(dict.fromkeys(view.loader_name for view in alike))[:-MAX_ALIKE]:
            self.views.forget(key)  # it asks again when it begins another pass

    def note_pass(self, source: LoaderSource, clock: Clock) -> None:
        """All samples of a loader have been passed: note where the next pass stands."""
        if source.is_random and self.views.of(source.key):
            name, draws = _note_of(source)
            self._clocks[name] = after = Clock(clock.tick + 1, clock.since)
            self._note(name, {**draws, "tick": after.tick, "since": after.since})

    def next_pass_of(self, source: LoaderSource) -> Clock | None:
        """Return where a loader's first pass stands; None if nobody has passed its samples, or if
        they are not random.
        """
        if not self._clocks and not any(self.store.directory.glob(f"{NOTE}draws-*")):
            return None  # a fingerprint takes time
        name, _ = _note_of(source)
        return self._clocks.get(name) or next(_clocks(self.store.directory, name), (None, None))[0]

    def load_together(self, source: LoaderSource, why: str) -> None:
        """A sample's leaves are not all its own: the loader's batches are loaded whole from now on.

        Args:
            source: Of the loader.
            why: What is said if it turns out that the front reads the others.
        """
        source.study.load_together(why)
        self.together[source.key] = why
        self.void(source.key, unlink=True)

    def wants_control(self, entry: PlannedEntry) -> bool:
        """Whether a batch that can be served should be computed, to know what that costs."""
        boundary = self.boundary
        if boundary is None or not entry.serves_most or self.policy.mode != "auto":
            return False
        return self.policy.timers[entry.view.loader_name, boundary].wants_control()

    def is_beside(self, source: LoaderSource) -> bool:
        """Whether a loader without workers is passed in another thread than the training's: what
        that draws must not be seeded or put back meanwhile. If the model is called, say so.
        """
        is_trained_here = threading.get_ident() == self.engine.trained_by
        if source.side_worker is not None or is_trained_here or not self.engine.is_beside():
            return False
        if self.engine.has_run:
            self.leave_uncached(source.key, _BESIDE)
        return True

    def begins(self, loader_name: str, epoch: int, num_batches: int | None) -> None:
        """A loader's pass begins."""
        if self.is_asked:
            self.policy.begins(loader_name, epoch, num_batches)
            self.engine.stand_in()
            self.engine.is_awaited = False

    def took_beside(self, seconds: float) -> None:
        """What the cache asks for between two passes took so long: it belongs to no step."""
        if self.boundary is not None:
            self.policy.beside_s += seconds

    def is_plain(self, loader_name: str) -> bool:
        """Whether batches come as DataLoader's: nothing is frozen, or nothing proved as yet."""
        return loader_name in self.policy.idle or not self.is_asked

    def yields(self, loader_name: str) -> frozenset[str] | None:
        """Note that a batch is yielded which the model should see, if something is trained; return
        which of its leaves must know their samples, in whichever call; None for all.

        Others are for an average of it, or to be looked at: no optimizer steps between them. Nor
        does one while a trainer collects batches before it uses any.
        """
        calls, counts = self.counters.num_calls, self.counters.counts
        if self.is_closed:
            self.counters.tell(_CLOSED)
        elif self.engine.is_aside or not self.engine.scout.is_done:
            self.engine.look_out()
        if calls != self._num_calls or self.policy.idle:  # which nobody follows
            self._num_calls, self._num_unseen = calls, 0
            if self._steps is not None:
                self._steps()
                self._steps = None
                self._stepped.clear()
            if counts.why_not == _UNSEEN:
                counts.why_not = None
        elif self._num_unseen >= MAX_UNSEEN and self._stepped and counts.why_not is None:
            self.counters.tell(_UNSEEN)
        self._num_unseen += 1
        if self._num_unseen == 2 and self._steps is None:
            stepped = self._stepped  # and not `self`: the hook is the process's
            handle = register_optimizer_step_post_hook(lambda *_: stepped.append(True))
            self._steps = weakref.finalize(self, handle.remove)
        tagged: frozenset[str] | None = None
        for view in self.views.of(loader_name):
            tagged = view.cut.tagged | (tagged or frozenset())
        return tagged

    def note_step(
        self,
        loader_name: str,
        seconds: float,
        num_samples: float,
        entry: PlannedEntry | None,
        *,
        is_control: bool = False,
    ) -> None:
        """Note what a whole training step cost, and stop skipping where it does not pay."""
        policy, boundary = self.policy, self.boundary
        if boundary is None or not num_samples:
            return
        view = entry.view if entry is not None else next(iter(self.views.of(loader_name)), None)
        if view is None and not self.may_store(loader_name):
            return
        kind: Kind = "computed" if is_control or view is None else "captured"
        if entry is not None:
            kind = "served" if entry.serves_most else "partial"
        why = policy.step(loader_name, boundary, kind, seconds, num_samples)
        if why is not None:
            log.info("loader %r is computed from now on: %s", shown_name(loader_name), why)
            self.void(loader_name, unlink=False)
        elif policy.seeks_cut and kind != "served" and view is not None:
            self.look_earlier(view.cut)

    def stats(self) -> CacheStats:
        """Return the counts so far."""
        counts = replace(self.counters.counts, boundary=self.boundary, voided=self.views.num_voided)
        if self.is_forked:  # the store's locks may be held for ever
            why = "this is a forked child of the process that made the cache; call cache.reopen()"
            return replace(counts, why_not=why)
        return replace(
            counts, **asdict(self.store.stats()), proof_s=self.policy.proof_s,
            saved_s=self.policy.saved_s(self.store.writer.work_s),
            gate=self.policy.sentence(self.boundary),
        )  # fmt: skip

    def log_epoch(self, loader_name: str, epoch: int) -> None:
        """Write one line at the end of an epoch, through `logging` at level INFO."""
        if self.boundary is None or not log.isEnabledFor(logging.INFO):
            return
        stats = self.stats()
        log.info(
            "epoch %d of %r: boundary %s, %.0f %% hits so far, %.1f s saved, %s on disk%s",
            epoch, loader_name, stats.boundary, 100 * stats.hit_rate, stats.saved_s,
            size(stats.bytes_on_disk), f"; not cached: {stats.why_not}" if stats.why_not else "",
        )  # fmt: skip


NOTE, _EPOCHS = "note-", "note-epochs.json"
MAX_TICK = 1 << 31


def draws_noted(directory: Path, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, by loader whose samples are in a generation of these fields, for how many epochs a
    random draw of them is used (`reuse`), how many are `kept`, and how many `epochs` were passed.
    """
    return [
        {"reuse": note.get("reuse"), "kept": note.get("kept"), "epochs": clock.tick}
        for clock, note in _clocks(directory, f"{NOTE}*.json")
        if isinstance(of := note.get("of"), dict) and of.items() <= fields.items()
    ]


def _note_of(source: LoaderSource) -> tuple[str, dict[str, Any]]:
    """Return the name of a file, and what it says of a loader's random draws, but for the clock."""
    draws = {"of": source.fields, "reuse": source.draws.reuse, "kept": source.draws.kept}
    text = json.dumps(draws, sort_keys=True, default=repr)
    return f"{NOTE}draws-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json", draws


def _clocks(directory: Path, pattern: str) -> Iterator[tuple[Clock, dict[str, Any]]]:
    """Give what the notes of such names say; those that cannot be read are left out."""
    for path in sorted(directory.glob(pattern)):
        with contextlib.suppress(OSError, StoreError):
            note = read_json(path, ROOT_FORMAT)
            tick, since = note.get("tick"), note.get("since")
            if type(tick) is int and type(since) is int and 0 <= since <= tick < MAX_TICK:
                yield Clock(tick, since), note
