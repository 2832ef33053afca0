"""`ActivationCache`: ties the model, the store and the loaders together, and owns their threads."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.batch import Batch, Entry, SampleId, take_rows
from egeria_cache.errors import BoundaryError, EgeriaError
from egeria_cache.events import BoundaryMoved
from egeria_cache.gate import Accounts, CacheStats, CostMeter, Gate
from egeria_cache.prefetch import PlannedEntry, View, record
from egeria_cache.samples import BatchContext
from egeria_cache.skip import MAX_CHAINS, Cut, SkipEngine, same_rows
from egeria_cache.store import ActivationStore
from egeria_cache.threads import compute_on_one_core

__all__ = ["ActivationCache"]

log = logging.getLogger("egeria")
NUM_READERS = 1 if (os.cpu_count() or 1) <= 4 else 2
"""A second one hides a slow disk, but where cores are few it takes the interpreter from training:
on two of them, small steps took half as long again. Large batches are decoded by several threads
either way."""
MAX_LIVE_BOUNDARIES = 2
"""What was stored two moves ago is not read any more: the last move has filled anew from it."""
MAX_LIVE_VIEWS = 16
"""Of one loader: a generation per boundary and shape of its batches."""
MAX_WAITS = 3


class ActivationCache:
    """Stores the output of a model's frozen prefix per sample, and skips the prefix from then on.

    Attach it to the model, give it to an `EgeriaLoader`, and train as before. Everything up to and
    including the module `boundary` must be frozen; it is kept in inference mode. An activation is
    served only while it is what the prefix would compute now: see `docs/correctness.md`.

    Args:
        model: The model that is trained; its `forward` is wrapped until `close()`.
        directory: Where activations live. Created with mode 0700; shared by runs and loaders.
        boundary: Qualified name of the last frozen module; None while nothing is frozen.
        limit: Hard bound on the directory's size: bytes, or text such as "100GB".
        codec: How records are compressed: "auto", "zstd", "raw", ...; see `docs/format.md`.
        ring_batches: How many mini-batches are read ahead; as many recent ones stay on a device.
        audit_rate: Fraction of the hits that are recomputed from the raw sample and compared.
        gate: "auto" skips while training steps are measured to be faster for it, "always" skips
            whatever can be skipped, "never" keeps the schedule of a cached run (inference mode,
            augmentation variants) but computes everything.
        force_network: Use a network filesystem all the same; one host at a time may.
        dropout: What dropout layers of the frozen prefix do in training mode: "off", they pass
            their input on; "stateless", they drop what seed, sample and variant decide, so that
            each sample has `augmentation_variants` masks.

    Raises:
        BoundaryError: The model has no such module, or it is trainable.
        StoreError: The directory cannot be used.
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        directory: str | Path,
        boundary: str | None = None,
        *,
        limit: int | str = "100GB",
        codec: str = "auto",
        ring_batches: int = 5,
        audit_rate: float = 0.001,
        gate: str = "auto",
        force_network: bool = False,
        dropout: str = "off",
    ) -> None:
        if ring_batches < 1:
            raise ValueError(f"ring_batches must be at least 1, got {ring_batches}")
        if not 0 <= audit_rate <= 1:
            raise ValueError(f"audit_rate must be in [0, 1], got {audit_rate}")
        if gate not in ("auto", "always", "never"):
            raise ValueError(f"gate must be 'auto', 'always' or 'never', got {gate!r}")
        if dropout not in ("off", "stateless"):
            raise ValueError(f"dropout must be 'off' or 'stateless', got {dropout!r}")
        self.model = model
        self.ring_batches = ring_batches
        self.audit_rate = audit_rate
        self.gate = gate
        self._store = ActivationStore(
            directory, limit=limit, codec=codec, force_network=force_network
        )
        self._readers: ThreadPoolExecutor | None = None
        self._accounts = Accounts()
        self._counts = self._accounts.counts
        self._boundary: str | None = None
        self._set_by_hand = True
        self._views: dict[str, list[View]] = {}
        self._uncacheable: dict[str, str] = {}
        self._waits: dict[str, int] = {}
        on_host = _device_of(model).type == "cpu"
        self._meter = CostMeter(max_overlap=0.5 if on_host else 0.95)
        self._cut_choice = Gate(self._meter)
        self._trial: Future[Any] | None = None
        self._stored: deque[tuple[View, list[SampleId], int]] = deque(maxlen=4)
        self._random = random.Random(0)
        self._closed = False
        self._engine = SkipEngine(model, self, stateless_dropout=dropout == "stateless")
        self._engine.attach()
        try:
            self.set_boundary(boundary)
        except BaseException:
            self.close()
            raise

    # ---- for the user -------------------------------------------------------------------------

    @property
    def boundary(self) -> str | None:
        """Qualified name of the last frozen module; None if nothing is frozen."""
        return self._boundary

    def set_boundary(self, name: str | None) -> None:
        """Declare that everything up to and including this module is frozen.

        Raises:
            BoundaryError: No module has this name, or one of its parameters is trainable. What
                shows only when the model runs is raised by its next call.
        """
        self._move(name, by_hand=True, reason="set by hand")

    def on_boundary_moved(self, event: BoundaryMoved) -> None:
        """Follow a freeze controller. A model that cannot be cut there trains on uncached."""
        self._move(event.boundary, by_hand=False, reason=event.reason)

    def stats(self) -> CacheStats:
        """Return the counts so far."""
        return self._accounts.stats(self._store, self._boundary, str(self._cut_choice))

    def report(self) -> str:
        """Return `stats()` as text for people."""
        return self.stats().report()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until what was handed to the writer is on disk."""
        self._store.flush(timeout_s=timeout_s)

    def close(self) -> None:
        """Give the model its own forward back, stop all threads, close the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._engine.detach()
        self._views.clear()
        if self._readers is not None:
            self._readers.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- for EgeriaLoader ---------------------------------------------------------------------

    @property
    def readers(self) -> ThreadPoolExecutor:
        """The threads that read ahead, shared by all loaders."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(
                NUM_READERS, "egeria-read", initializer=compute_on_one_core
            )
        return self._readers

    def views(self, loader_name: str) -> Sequence[View]:
        """The generations this loader's samples may be read from now, deepest boundary first."""
        return [view for view in self._views.get(loader_name, ()) if view.alive]

    def awaits(self, loader_name: str) -> bool:
        """Whether the next batch will show where the model is cut, and what is stored already."""
        if self._closed or self._boundary is None or self.gate == "never":
            return False
        if loader_name in self._uncacheable or loader_name in self._accounts.gated:
            return False
        if self.views(loader_name):
            return False
        waits = self._waits[loader_name] = self._waits.get(loader_name, 0) + 1
        return waits <= MAX_WAITS

    def tagged_leaves(self, loader_name: str) -> frozenset[str] | None:
        """The leaves that must know their samples; None for all."""
        views = self.views(loader_name)
        return views[0].cut.tagged if views else None

    def count_batch(self, ids: Sequence[SampleId], hit: np.ndarray | None) -> None:
        """Note what a batch consists of: yielded without hits, or served with some."""
        self._accounts.batch(len(ids), hit)

    def count_yielded(self) -> None:
        """Note that a batch was yielded which the model should see."""
        self._accounts.yielded()

    def wants_control(self, entry: PlannedEntry) -> bool:
        """Whether a batch of hits should be computed all the same, to know what that costs."""
        if self.gate != "auto" or self._boundary is None or not entry.hit.all():
            return False
        return self._accounts.wants_control(entry.view, self._boundary)

    def note_step(
        self,
        loader_name: str,
        seconds: float,
        num_samples: int,
        entry: PlannedEntry | None,
        *,
        is_control: bool = False,
    ) -> None:
        """Note what a whole training step cost, and stop skipping where it does not pay."""
        views = self.views(loader_name)
        if self._boundary is None or not views:
            return
        view, frozen = views[0], self._engine.frozen
        assert frozen is not None
        if entry is not None and entry.hit.any():
            self._meter.read(entry.read_s, entry.num_read, entry.cut.row_bytes)
            self._meter.waited(entry.waited_s, int(entry.hit.sum()))
        why = self._accounts.step(
            view, self._boundary, frozen, seconds, num_samples, entry, is_control
        )
        if self.gate != "auto":
            return
        if why is not None and self._cut_choice.undo(why):
            self._cut_at(None, why)
        elif why is not None:
            self._accounts.gated[loader_name] = f"off: {why}"
            log.info("loader %r is computed from now on: %s", _name(loader_name), why)
            self._void(lambda view: view.loader_name == loader_name, unlink=False)
        elif view.cut.boundary == frozen:
            was_served = self._accounts.was_served(view, self._boundary)
            earlier = self._cut_choice.look(view.cut.profile, was_served=was_served)
            if earlier is not None:
                self._cut_at(earlier, str(self._cut_choice))

    def _cut_at(self, earlier: str | None, why: str) -> None:
        """Enter the model before the frozen boundary, or at it again."""
        log.info("the model is cut at %s: %s", earlier or "the frozen boundary", why)
        self._engine.set_boundary(earlier or self._engine.frozen, frozen=self._engine.frozen)
        self._void(lambda view: not self._engine.knows(view.cut), unlink=False)
        self._waits.clear()

    def log_epoch(self, loader_name: str, epoch: int) -> None:
        """Write one line at the end of an epoch, through `logging` at level INFO."""
        if self._boundary is None or not log.isEnabledFor(logging.INFO):
            return
        stats = self.stats()
        log.info(
            "epoch %d of %r: boundary %s, %.0f %% hits so far, %.1f s saved, %.1f MB on disk%s",
            epoch, loader_name, stats.boundary, 100 * stats.hit_rate, stats.saved_s,
            stats.bytes_on_disk / 1e6, f"; not cached: {stats.why_not}" if stats.why_not else "",
        )  # fmt: skip

    def count_refetched(self, num_samples: int) -> None:
        """Note samples that were planned as hits, and had to be loaded after all."""
        self._counts.refetched += num_samples

    # ---- for SkipEngine (`SkipHost`) ----------------------------------------------------------

    def cut_found(self, batch: Batch, cut: Cut) -> None:
        """The model was cut for this batch's loader: open the generation that belongs to it."""
        context: BatchContext = batch.context
        name = batch.loader_name
        if self.gate == "never" or name in self._uncacheable or name in self._accounts.gated:
            return
        try:
            reason = self._restless(name, cut) or context.source.why_not_cacheable(batch)
            if reason is None:
                generation = self._store.open_generation(
                    {**cut.fields, **context.source.fields},
                    num_expected=len(context.source.dataset) * context.source.variants,
                )
        except Exception as error:  # of the data set's or the collate function's own, too
            reason = str(error) if isinstance(error, EgeriaError) else repr(error)
        if reason is not None:
            self._leave_uncached(name, reason)
            return
        view = View(
            loader_name=name,
            cut=cut,
            generation=generation,
            structure=context.structure,
            rows=context.metas,
            dropped=tuple(sorted(cut.dropped)),
            kept={p: kind for p, kind in context.kinds.items() if p not in cut.dropped},
            device=_device_of(self.model),
        )
        views = [view, *(old for old in self.views(name) if old.cut is not cut)]
        boundaries = list(dict.fromkeys(one.cut.boundary for one in views))[:MAX_LIVE_BOUNDARIES]
        kept = [one for one in views if one.cut.boundary in boundaries][:MAX_LIVE_VIEWS]
        for retired in [one for one in views if one not in kept]:
            self._accounts.retire(retired)
            retired.generation.release()
        self._views[name] = kept

    def _restless(self, loader_name: str, cut: Cut) -> str | None:
        """Say so if the loop does something else to every batch: nothing stored would come back."""
        cuts = [cut, *(v.cut for v in self.views(loader_name) if v.cut.boundary == cut.boundary)]
        chains = list(dict.fromkeys(_operations(one) for one in cuts))
        if len(chains) <= MAX_CHAINS:
            return None
        shown = ", ".join(repr("; ".join(chain)) for chain in chains[:3])
        return (
            f"the loop changes its batches before the model in more than {MAX_CHAINS} ways ({shown}"
            ", ...), so that what is stored would not be asked for again; do it after the boundary,"
            " or in the dataset"
        )

    def captured(
        self, batch: Batch, cut: Cut, rows: np.ndarray | None, tensors: dict[str, Tensor]
    ) -> None:
        """Store fresh activations of the masked rows (None: all)."""
        view = next((v for v in self.views(batch.loader_name) if v.cut is cut), None)
        if view is None or not self._fits(view, batch):
            return
        mask = np.ones(batch.size, bool) if rows is None else rows
        ids = [sample_id for sample_id, use in zip(batch.ids, mask, strict=True) if use]
        new = ~view.contains(ids, batch.variant)
        if not new.all() and not view.is_checked:
            self._check_reopened(view, batch, mask, ids, tensors)
        if not new.any() or not view.alive:
            return
        wanted = mask.copy()
        wanted[mask] = new
        kept = {path: batch.rows_of(path, wanted) for path in view.kept}
        if any(values is None for values in kept.values()):
            return
        if not new.all():
            ids = [sample_id for sample_id, use in zip(ids, new, strict=True) if use]
            tensors = {name: take_rows(values, new) for name, values in tensors.items()}  # type: ignore[misc]
        started = time.perf_counter()
        view.generation.put_batch(ids, record(tensors, kept), variant=batch.variant)  # type: ignore[arg-type]
        self._meter.wrote(time.perf_counter() - started, len(ids) * cut.row_bytes)
        self._try_reading(view, ids, batch.variant)

    def _try_reading(self, view: View, ids: list[SampleId], variant: int) -> None:
        """Measure reading before the first hits come: a reader reads back what was stored."""
        if self.gate != "auto" or self._meter.is_enough or self._cut_choice.is_settled:
            return
        if self._trial is not None and self._trial.done():
            done, self._trial = self._trial, None
            if done.exception() is None and done.result() is not None:
                self._meter.read(*done.result())
        self._stored.append((view, ids, variant))
        if self._trial is None and self._stored[0][0].alive:
            self._trial = self.readers.submit(_time_read, *self._stored[0])

    def _fits(self, view: View, batch: Batch) -> bool:
        """Whether the batch's rows look like those the view was opened with; if not, never again.

        Rows that are padded to the longest of their batch cannot be given back in another batch.
        """
        context: BatchContext = batch.context
        for path, meta in context.metas.items():
            expected = view.rows.get(path)
            if expected is not None and expected.shape != meta.shape:
                shapes = tuple(expected.shape[1:]), tuple(meta.shape[1:])
                self._leave_uncached(
                    batch.loader_name,
                    f"leaf {path!r} has rows of shape {shapes[0]} in one batch and {shapes[1]} in "
                    "another; pad all samples to the same size",
                )
                return False
        return True

    def _leave_uncached(self, loader_name: str, reason: str, *, unlink: bool = False) -> None:
        """Cache nothing for this loader, and say why, once."""
        self._uncacheable[loader_name] = self._counts.why_not = reason
        log.warning("loader %r is not cached: %s", _name(loader_name), reason)
        self._void(lambda view: view.loader_name == loader_name, unlink=unlink)

    def _check_reopened(
        self, view: View, batch: Batch, rows: np.ndarray, ids: list[SampleId],
        tensors: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Compare the first rows that a generation of an earlier run already holds with ours."""
        kept = {path: batch.rows_of(path, rows) for path in view.kept}
        stored, found = view.generation.get_batch(ids, variant=batch.variant)
        view.is_checked = bool(found.any())
        fresh = record(tensors, {p: r for p, r in kept.items() if r is not None})
        for name in fresh.keys() & stored.keys():
            if not same_rows(take_rows(stored[name], found), take_rows(fresh[name], found)):
                self.audit_failed(batch, rows, f"{name} is not what an earlier run stored")
                return

    def audited(self, batch: Batch, entry: Entry) -> np.ndarray | None:
        """Choose `audit_rate` of the hits, at random, to be recomputed from the raw sample."""
        hits = np.flatnonzero(entry.hit)
        count = min(len(hits), int(self.audit_rate * len(hits) + self._random.random()))
        if not count:
            return None
        rows = np.zeros(batch.size, bool)
        rows[self._random.sample(hits.tolist(), count)] = True
        self._counts.audited += count
        return rows

    def audit_leaves(self, batch: Batch, rows: np.ndarray, loaded: Mapping[str, Any]) -> bool:
        """Compare stored labels and the like with what was loaded again."""
        path = batch.context.source.first_difference(batch, rows, loaded)
        if path is not None:
            self.audit_failed(batch, rows, f"leaf {path!r} of the batch is not what was stored")
        return path is None

    def audit_failed(self, batch: Batch, rows: np.ndarray, finding: str) -> None:
        """What is stored is not what the prefix computes: void it, and cache nothing more."""
        ids = [sample_id for sample_id, is_one in zip(batch.ids, rows, strict=True) if is_one]
        self._counts.audit_failures += 1
        log.error(
            "AUDIT FAILED for loader %r: %s, among the samples %s (variant %d). What was stored is "
            "void, training goes on uncached. Was a sample edited without its sample_version, or "
            "does it differ each time it is loaded?",
            _name(batch.loader_name), finding, ids, batch.variant,
        )  # fmt: skip
        self._leave_uncached(batch.loader_name, f"an audit failed: {finding}", unlink=True)

    def prefix_changed(self, reason: str) -> None:
        """A weight of the prefix moved behind our back: nothing stored may be served any more.

        What is on disk stays, under the address of the weights it was computed with.
        """
        log.warning("the frozen prefix changed (%s): cached activations are void", reason)
        self._void(lambda view: True, unlink=False)

    def refused(self, error: BoundaryError) -> None:
        """The model cannot be cut here."""
        self._counts.why_not = str(error)
        if self._set_by_hand:
            raise error
        log.warning("training goes on uncached: %s", error)

    def note(self, kind: str, seconds: float, rows: int) -> None:
        """The model was called with a batch (its cost is taken by whole steps: `ledger.py`)."""
        if kind == "front":
            self._meter.computed(str(self._engine.boundary), seconds, rows)
        elif kind != "compiled":
            self._accounts.model_called()
        elif self._boundary is not None and self._counts.why_not is None:
            self._counts.why_not = str(BoundaryError.compiled_whole(self._boundary))
            log.warning("training goes on uncached: %s", self._counts.why_not)

    # ---- moves --------------------------------------------------------------------------------

    def _move(self, name: str | None, *, by_hand: bool, reason: str) -> None:
        if name == self._boundary:
            return
        if name is not None:
            self._check(name)
        previous, self._boundary, self._set_by_hand = self._boundary, name, by_hand
        self._counts.why_not = None
        self._waits.clear()
        self._accounts.gated.clear()
        self._cut_choice.reset()
        if name is None:
            self._void(lambda view: True, unlink=not by_hand)
        self._engine.set_boundary(name)
        self._void(lambda view: not self._engine.knows(view.cut), unlink=False)
        log.info("boundary moved from %s to %s: %s", previous, name, reason)

    def _check(self, name: str) -> None:
        modules = dict(self.model.named_modules())
        if name not in modules or not name:
            raise BoundaryError.unknown(name, [known for known in modules if known])
        for parameter_name, parameter in modules[name].named_parameters():
            if parameter.requires_grad:
                raise BoundaryError.trainable(name, f"{name}.{parameter_name}")

    def _void(self, stale: Callable[[View], bool], *, unlink: bool) -> None:
        """Serve nothing from these views any more, wherever their batches are by now."""
        for name, views in self._views.items():
            for view in filter(stale, views):
                view.is_void = True
                self._accounts.retire(view)
                self._counts.voided += 1
                if unlink:
                    view.generation.void("its activations are stale")
                else:
                    view.generation.release()
            self._views[name] = [view for view in views if not view.is_void]


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _time_read(view: View, ids: list[SampleId], variant: int) -> tuple[float, int, int] | None:
    """Return the seconds, samples and bytes per sample of one read; None if it is not there yet."""
    started = time.perf_counter()
    _, found = view.generation.get_batch(ids, variant=variant)
    if not found.all():
        return None
    return time.perf_counter() - started, len(ids), view.cut.row_bytes


def _operations(cut: Cut) -> tuple[str, ...]:
    """Return what the loop did to each of the model's inputs since the loader."""
    return tuple(leaf["operations"] for leaf in cut.fields["inputs"].values())


def _name(key: str) -> str:
    """Return the name that the user gave a loader (`LoaderSource.key` tells it from others)."""
    return key.rpartition("#")[0]
