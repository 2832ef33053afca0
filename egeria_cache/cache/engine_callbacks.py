"""What the skip engine tells its cache, and asks of it: cuts, captured rows, audits, refusals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import compress
from typing import Any, Literal

import numpy as np
from torch import Tensor

from egeria_cache import samples
from egeria_cache.attempt import place_of
from egeria_cache.batch import Batch, Entry
from egeria_cache.cache.boundary import Status, shown_name
from egeria_cache.device import device_of, lock_ahead
from egeria_cache.errors import BatchError, BoundaryError, EgeriaError
from egeria_cache.gate import AuditPlan, ServingPolicy
from egeria_cache.prefetch import PRINT, PlannedEntry, View, record
from egeria_cache.samples import BatchContext, LoaderSource
from egeria_cache.skip import MAX_CHAINS, Cut
from egeria_cache.store import ActivationStore, Generation

log = logging.getLogger("egeria")
_FORKED = (
    "this process was forked from the one that made the cache, and has none of its threads; "
    "`cache.reopen()` takes it up (Lightning: `EgeriaCallback`)"
)
_OF_ANOTHER = "not for this model: it is of another cache; make one over its data with this cache"
_BESIDE = "what is done beside the training has failed"
_FIGURES = str.maketrans("", "", "0123456789.e-")
MAX_VALUES = 3
"""Of an argument that the front reads beside the same samples, given in one batch of theirs after
another, before they are not stored again."""
LOCKED_AHEAD = 4
"""Batches for whose activations page-locked memory is taken with the proof: being captured, or on
their way to the writer or to the device. To lock pages later would have training wait for that."""


class EngineCallbacks(Status):
    """Implements `SkipHost` for one model: opens generations for cuts, stores, audits.

    Args:
        store: Where captured rows go.
        policy: Whether serving pays.
        audit_rate: Fraction of the hits to be recomputed.
    """

    def __init__(self, store: ActivationStore, policy: ServingPolicy, audit_rate: float) -> None:
        super().__init__(policy)
        self.store, self.idle = store, policy.idle
        self._counts, self.called = self.counters.counts, self.counters.model_called
        self._audits = AuditPlan(audit_rate)
        self.audited = self._audits.choose
        self.loaders = set[str]()
        """Keys of those that have begun a pass."""

    @property
    def is_idle(self) -> bool:
        """Whether the batches of all loaders come plain, for nothing is proved as yet."""
        return self.policy.is_idle

    # ---- a cut, and what is captured at it ------------------------------------------------------

    def cut_found(self, batch: Batch, cut: Cut) -> None:
        """The model was cut for this batch's loader: open the generation that belongs to it."""
        context: BatchContext = batch.context
        name = batch.loader_name
        self.is_proved = True
        self.counters.goes_on()
        if not self.may_store(name):
            return
        found = self._open(batch, cut)
        if isinstance(found, str):
            self.leave_uncached(name, found)
            return
        # What was made since holds rows of this run, and of its other ranks.
        if found.created < self.since and found.totals.raw_bytes:
            self._audits.doubted.add((name, id(cut)))
        sizes = [batch.size * spec.num_bytes for spec in cut.tensors.values()]
        lock_ahead(LOCKED_AHEAD * sizes, device_of(self.engine.model))
        view = View(
            loader_name=name, cut=cut, generation=found, structure=context.structure,
            rows=context.metas, kept=self._kept_beside(batch, cut),
            device=next(iter(cut.devices.values()), device_of(self.engine.model)),
            constants=context.constants, counts=frozenset(context.source.counts),
            padding=None if batch.lengths is None else batch.lengths.padding,
        )  # fmt: skip
        self.views.add(view)

    def _kept_beside(self, batch: Batch, cut: Cut) -> dict[str, type]:
        """Return what is stored beside the activations, so that a hit needs no data set."""
        context: BatchContext = batch.context
        if context.source.is_steady or context.source.is_restless:
            return {PRINT: Tensor}
        if batch.loader_name in self.together:
            return {}
        kinds: dict[str, type] = dict.fromkeys(context.metas, Tensor)
        kinds |= {path: type(leaf) for path, leaf in batch.leaves.items()}
        return {p: kind for p, kind in kinds.items() if p not in {*cut.dropped, *context.constants}}

    def draws_count(self, source: LoaderSource) -> None:
        """What the front reads is another: by a random draw, or the data have changed."""
        if source.is_restless and not source.patience:
            why = f"{samples.RESTLESS}, and so does now what the frozen front reads of it"
            self.leave_uncached(source.key, why, unlink=True)
            return
        was_idle = source.is_restless
        source.unsettle()
        self.void(source.key, unlink=False)
        if was_idle:
            self.data_changed(source.key, "what the frozen front reads", unlink=False)
            self.counters.unserved = self._counts.why_not  # prints go on: until there are hits

    def void(self, loader_name: str, *, unlink: bool, is_outdated: bool = False) -> None:
        """Serve nothing that is stored for a loader; its next batches open generations anew."""
        self.views.void(
            lambda view: view.loader_name == loader_name, unlink=unlink, is_outdated=is_outdated
        )

    def _open(self, batch: Batch, cut: Cut) -> Generation | str:
        """Return the generation of this cut and loader, or why there is none."""
        source = batch.context.source
        is_own = batch.loader_name in self.loaders
        reason = self._restless(batch, cut) if is_own else _OF_ANOTHER
        reason = reason or source.why_not_cacheable(batch)
        # Do random draws change what the front reads?
        if reason is None and source.look_at_draws(batch, cut.read):
            self.void(source.key, unlink=False)
            if source.is_steady:
                log.info(
                    "loader %r: its samples draw random numbers (%s), which change nothing that "
                    "the frozen front reads: its output is stored once, and the samples are loaded "
                    "in every epoch, drawn anew", source.name, source.drawn_from,
                )  # fmt: skip
        reason = reason or source.why_not_served or source.why_not_compared(batch, cut.read)
        if reason is None and not source.is_restless:
            reason = source.fingerprint.why_not
        if reason is not None:
            return reason
        return self.store.open_generation(
            {**cut.fields, **source.fields},
            num_expected=len(source.dataset) * (source.draws.kept if source.is_random else 1),
        )

    def _restless(self, batch: Batch, cut: Cut) -> str | None:
        """Say so if the loop does something else to every batch, or gives the front another value
        with the same samples each time: nothing stored would come back.
        """
        views = [v for v in self.views.of(batch.loader_name) if v.cut.boundary == cut.boundary]
        ids, draws = list(batch.ids), batch.context.source.stored_as(batch.draws)
        # Not those of several calls with this very batch, which come again with it.
        before = (view for view in views if view.cut not in batch.cuts)
        again = [cut, *(view.cut for view in before if view.contains(ids, draws).any())]
        batch.cuts.append(cut)
        for name in cut.fields["arguments"]:
            if len({repr(one.fields["arguments"].get(name)) for one in again}) > MAX_VALUES:
                return (
                    f"the frozen front reads {name}, which has another value each time its samples "
                    "come; give it to what lies behind the boundary"
                )
        cuts = [cut, *(view.cut for view in views)]
        # What it did to each of the model's inputs since the loader.
        chains = {tuple(leaf["operations"] for leaf in c.fields["inputs"].values()) for c in cuts}
        if len(chains) <= MAX_CHAINS:
            return None
        shown = ", ".join(sorted(repr("; ".join(chain)) for chain in chains)[:3])
        return (
            f"the loop changes its batches before the model in more than {MAX_CHAINS} ways ({shown}"
            ", ...), so that what is stored would not be asked for again; do it after the boundary,"
            " or in the dataset"
        )

    def captured(
        self, batch: Batch, cut: Cut, rows: np.ndarray | None, tensors: dict[str, Tensor]
    ) -> None:
        """Store fresh activations of the masked rows (None: all)."""
        if batch.context.is_outdated:
            return  # it was loaded from data that are others by now
        if self.is_forked:
            self.counters.tell(_FORKED, "nothing is cached here: %s")
            return
        name = batch.loader_name
        is_void = all(view.cut is not cut for view in self.views.live.get(name, ()))
        if is_void and self.may_store(name) and self.engine.knows(cut):
            self.cut_found(batch, cut)
        view = self.views.at(name, cut)
        if view is None or not self._fits(view, batch) or not self._is_told(batch, cut):
            return
        entry = batch.entry
        if entry is not None and entry.cut is not cut and not entry.was_used:
            self.views.prefer(view)  # autocast was on for a while, say, and is off again
        mask = np.ones(batch.size, bool) if rows is None else rows
        source: LoaderSource = batch.context.source
        ids, draws = [*compress(batch.ids, mask)], source.stored_as(batch.draws[mask])
        # Those that hits leave were looked up when the batch was planned.
        is_missing = entry is not None and entry.cut is cut and rows is not None
        if not is_missing and view.contains(ids, draws).all():
            return
        lengths = None if batch.lengths is None else batch.lengths.select(np.flatnonzero(mask))
        kept = _kept(view, batch, mask, lengths)
        if changed := [path for path, values in kept.items() if values is None]:
            self._counts.why_not = f"the loop writes to leaf {changed[0]!r} before the model is run"
            return
        named = record(cut, tensors, kept, lengths)
        replaces = source.superseded(draws)
        view.generation.put_batch(ids, named, variant=draws, replaces=replaces)

    def _is_told(self, batch: Batch, cut: Cut) -> bool:
        """Say once what is done with a loader whose samples are random, or depend on their company;
        whether they are stored.
        """
        source = batch.context.source
        made = ", ".join(map(repr, sorted(source.study.made)))
        if made and self.is_news(source.name, made):
            log.warning(
                "loader %r: the collate_fn makes leaf %s of a sample from its company, or draws "
                "random numbers: batches are loaded whole in every epoch, and only the front's work"
                " is spared. Make it in the data set or behind the loader", source.name, made,
            )  # fmt: skip
        if not source.is_random or not self.is_news("random", batch.loader_name):
            return True
        if source.why_not_served is not None:
            self.leave_uncached(batch.loader_name, source.why_not_served)
            return False
        self._counts.reuse[source.name] = source.draws.reuse
        num_bytes = cut.row_bytes * len(source.dataset) * source.draws.kept
        # Who has chosen need not be told in every run, nor who makes a loader for each epoch.
        told = source.draws.told(source.drawn_from, num_bytes)
        is_news = source.draws.reuse == samples.DEFAULT_REUSE and self.is_news(source.name, told)
        log.log(logging.WARNING if is_news else logging.INFO, "loader %r: %s", source.name, told)
        return True

    def _fits(self, view: View, batch: Batch) -> bool:
        """Whether the batch's rows look like those that the view was opened with."""
        context: BatchContext = batch.context
        if view.padding != (None if batch.lengths is None else batch.lengths.padding):
            return False  # it was loaded before it was known how samples are padded
        shapes = {path: tuple(row.shape[1:]) for path, row in view.rows.items()}
        then = {**shapes, **view.constants_for(batch.size)}
        now = {**shapes, **context.constants}
        now |= {path: tuple(meta.shape[1:]) for path, meta in context.metas.items()}
        for path, value in then.items():
            if not samples.same_values(now.get(path), value):
                self.leave_uncached(
                    batch.loader_name,
                    f"leaf {path!r} is {value!r} in one batch and {now.get(path)!r} in another, "
                    "and that is no padding; give it to the model as an argument",
                )
                return False
        return True

    def entry_at(self, batch: Batch, cut: Cut) -> Entry | None:
        """Look for a whole batch at another cut than it was planned for, and plan for that one."""
        planned = batch.entry
        view = self.views.at(batch.loader_name, cut)
        if view is None or not isinstance(planned, PlannedEntry) or not planned.hit.all():
            return None
        located = view.generation.locate(planned.ids, variant=planned.draws)
        entry = PlannedEntry(view, planned.number, planned.ids, planned.draws, located)
        if entry.num_misses:
            return None
        self.views.prefer(view)
        entry.on_load, planned.on_load = planned.on_load, None
        entry.lengths, entry.whole = planned.lengths, planned.whole
        return entry

    # ---- audits ---------------------------------------------------------------------------------

    def audit_leaves(self, batch: Batch, rows: np.ndarray, loaded: Mapping[str, Any]) -> bool:
        """Compare stored labels and the like with what was loaded again."""
        self._counts.audited += int(rows.sum())
        path = batch.context.source.first_difference(batch, rows, loaded)
        return path is None or self.audit_failed(
            batch, rows, f"leaf {path!r} of the batch is not what was stored"
        )

    def audit_failed(self, batch: Batch, rows: np.ndarray, finding: str) -> bool:
        """What is stored is not what the prefix computes: void it, and cache nothing more.

        Returns:
            Whether it is the data that have changed since the batch was given out: it is served.
        """
        source, ids = batch.context.source, [*compress(batch.ids, rows)]
        what = source.fingerprint.changed(midway=True) if source.side_worker is None else None
        if what is not None:
            source.forget()
            self.data_changed(source.key, what, unlink=True)
        if batch.context.is_outdated:
            return True
        self._counts.audit_failures += 1
        log.error(
            "AUDIT FAILED for loader %r: %s, among the samples %s (draws %s). What was stored is "
            "void, training goes on uncached. Was a sample edited without its sample_version, or "
            "does it differ each time it is loaded?",
            shown_name(batch.loader_name), finding, ids, batch.draws[rows].tolist(),
        )  # fmt: skip
        self.leave_uncached(batch.loader_name, f"an audit failed: {finding}", unlink=True)
        return False

    def data_changed(self, loader_name: str, what: str, *, unlink: bool, give_up: str = "") -> None:
        """The loader's data set is another one than when it was looked at last.

        Args:
            loader_name: The loader's key.
            what: Where it differs.
            unlink: Whether rows of the new one may have been stored as rows of the old one.
            give_up: Why nothing is stored for this loader any more, if so.
        """
        if loader_name in self.left_out:
            return
        self.void(loader_name, unlink=unlink, is_outdated=True)
        if give_up:
            self.leave_uncached(loader_name, f"{give_up} ({what})", unlink=unlink)
            return
        text = f"the data set is another one ({what:.120}): what was stored of it is not served"
        level = logging.WARNING if self._counts.why_not is None else logging.INFO
        self._counts.why_not = text
        log.log(level, "loader %r: %s", shown_name(loader_name), text)

    # ---- what ends caching ----------------------------------------------------------------------

    def leave_uncached(self, loader_name: str, reason: str, *, unlink: bool = False) -> None:
        """Cache nothing for this loader, and say why, once; and what an audit has found."""
        if loader_name in self.left_out and not unlink:
            return
        self.left_out[loader_name] = self._counts.why_not = reason
        level = logging.WARNING if self.is_news(shown_name(loader_name), reason) else logging.INFO
        log.log(level, "loader %r is not cached: %s", shown_name(loader_name), reason)
        self.void(loader_name, unlink=unlink)

    def prefix_changed(self, reason: str, *, unlink: bool = False) -> None:
        """A weight of the prefix moved behind our back: nothing stored may be served any more.

        What is on disk stays, under the address of the weights it was computed with, unless that
        was seen late (`unlink`).
        """
        self.counters.passing = self._counts.why_not = f"the frozen prefix changed ({reason})"
        # What the first call has made is no news, nor is a prefix that goes on changing.
        is_early = self.counters.num_calls <= 2 and self.is_news("the first call has made it")
        is_news = not is_early and self.is_news("the prefix changed")
        level = logging.WARNING if is_news else logging.INFO
        log.log(level, "%s: cached activations are void", self.counters.passing)
        self.views.void(lambda view: True, unlink=unlink)

    def thawed(self, name: str, cut: str | None) -> None:
        """A part of the prefix is trained from now on; from there on nothing is served."""
        where = f"the model is cut after {cut!r} instead" if cut else "it is computed whole"
        reason = f"{name!r}, which was frozen, is trained again: {where}"
        self.counters.passing, self._counts.why_not = reason, None if cut else reason
        log.log(logging.WARNING if self.set_by_hand else logging.INFO, reason)
        self.views.void(lambda view: True, unlink=False)

    def uncached(self, reason: str, remedy: str) -> None:
        """The model is called, and nothing can be served or stored: say what came instead."""
        if self._counts.why_not in self.left_out.values():
            return  # why a loader's batches do not know their samples has been named
        if self._leave_together() or self._counts.why_not is not None:
            return  # whatever it is, it came first
        self.counters.unserved = self._counts.why_not = reason
        log.warning("a boundary is set, but these batches are computed: %s. %s", reason, remedy)

    def _leave_together(self) -> bool:
        """What the front reads is not the samples' own: cache such loaders no more, if any."""
        left = self.together.items() - self.left_out.items()
        for name, why in left:
            self.leave_uncached(name, why)
        return bool(left)

    def unproved(self, reason: str) -> None:
        """What is stored is not served as long as something has not been shown: say so, once."""
        if self.is_news(reason):
            log.warning(reason)
        self.counters.passing = self._counts.why_not = reason

    def refused(self, error: BoundaryError, *, at_first: bool = False) -> None:
        """The model cannot be cut here; where it could be before, that is no error of training."""
        if str(error) in self.together.values():
            self._leave_together()
            return
        self._counts.why_not = str(error)
        by_hand = self.set_by_hand and not self.is_proved
        if at_first and by_hand and not isinstance(error, BatchError):
            raise error
        # Other batches may be refused for the same reason, by other figures.
        if self.is_news(self.boundary, str(error).translate(_FIGURES)):
            log.warning("training goes on uncached: %s", error)

    def failed(self, error: Exception, batch: Batch | None = None) -> None:
        """What is done beside a call of the model went wrong; the call was computed."""
        if batch is not None:
            self.failed_for(batch.loader_name, error)
            return
        self._counts.failures += 1
        if self.is_news(_cause(error)):
            self._counts.why_not = _told(error)
            log.warning("calls of the model are computed: %s", _told(error))

    def failed_for(self, loader_name: str, error: Exception) -> None:
        """What is done beside the loop with a loader's batches went wrong: it is cached no more."""
        self._counts.failures += 1
        self.is_news(_cause(error))
        self.leave_uncached(loader_name, _told(error))

    def postpones(self, batch: Batch) -> Literal["timed", "plain"] | None:
        """Whether this loader's run is too short, as far as is known, to win back a proof: it is
        computed plainly for the rest of the epoch.
        """
        name, source = batch.loader_name, batch.context.source
        if source.why_not_served is not None:
            self.leave_uncached(name, source.why_not_served)
            return "plain"
        if batch.context.task.seed != source.seed:
            return "plain"  # it was loaded in a thread of which nobody knew whether it trains
        schedule = self.policy.schedules.get(name)
        if schedule is None or schedule.wants_timing:
            return None if schedule is None else "timed"
        schedule.padded, schedule.hits = batch.lengths is not None, source.served
        why = schedule.why_not()
        if why is None:
            return None
        self.policy.idle[name] = why
        if self.is_news("postponed", name):
            log.info("loader %r is computed as yet: %s", shown_name(name), why)
        return "plain"

    def timed(self, batch: Batch, front_s: float, forward_s: float) -> None:
        """A batch was computed plainly: its frozen front, and all of the model, took so long."""
        schedule = self.policy.schedules[batch.loader_name]
        schedule.fronts.append(front_s)
        schedule.forwards.append(forward_s)
        self.postpones(batch)  # the next one comes plain, if so

    def is_refused(self) -> bool:
        """Whether what loaders give cannot be cached, and nothing was."""
        return bool(self.left_out) and not self.views.everywhere()

    def note(self, kind: str, seconds: float) -> None:
        """What is done beside calls of the model has taken time; or it is compiled whole."""
        boundary = self.boundary
        if kind == "audit":
            self._audits.cost_s += seconds
        elif kind == "proof":
            self.policy.proof_s += seconds
        elif kind == "beside":
            self.policy.unnoted_s += seconds
        elif boundary is not None:
            self.counters.is_compiled = True
            why = str(BoundaryError.compiled_whole(boundary))
            self.counters.tell(why, "what is compiled goes uncached: %s")


def _kept(view: View, batch: Batch, rows: np.ndarray, lengths: Any) -> dict[str, Any]:
    """Return what is stored beside the masked rows; None for what the loop has written to."""
    if PRINT not in view.kept:
        return {path: batch.rows_of(path, rows) for path in view.kept}
    read = {path: batch.rows_of(path, rows) for path in sorted(view.cut.read)}
    if changed := {path: values for path, values in read.items() if values is None}:
        return changed
    return {PRINT: samples.row_prints(read, lengths)}


def _cause(error: Exception) -> Any:
    """Return what tells an error from others: its kind, and where it was raised."""
    place = place_of(error)
    return type(error), None if place is None else (place[0].f_code, place[1])


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, EgeriaError) else f"{_BESIDE}: {error!r}"
