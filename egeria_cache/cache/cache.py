"""`ActivationCache`: what a user sees of a cache. It makes the parts, and closes them."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from egeria_cache import arguments
from egeria_cache.arguments import Codec, Gate, Padding
from egeria_cache.augment import Operation, distance, features
from egeria_cache.batch import forget_trials
from egeria_cache.cache.boundary import BoundaryMoved
from egeria_cache.cache.loader_api import LoaderApi
from egeria_cache.device import device_of, runs_late
from egeria_cache.errors import EgeriaError
from egeria_cache.gate import CacheStats, ServingPolicy
from egeria_cache.skip import RandomState, SkipEngine, inner_model, ordinary_arguments
from egeria_cache.store import ActivationStore
from egeria_cache.tables import size

log = logging.getLogger("egeria")
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ActivationCache]]
_ATTACHED = weakref.WeakKeyDictionary()


class ActivationCache:
    """Stores the output of a model's frozen prefix per sample, and skips the prefix from then on.

    Attach it to the model, give it to an `EgeriaLoader`, and train as before. Everything up to and
    including the module `boundary` must be frozen; it is kept in inference mode. An activation is
    served only while it is what the prefix would compute now: see `docs/correctness.md`.

    A cache that is attached to the same model already is closed. One that is pickled takes its
    model along, and opens anew with its first use; for a forked child see `reopen`.

    Args:
        model: The model that is trained; its `forward` is wrapped until `close()`.
        directory: Where activations live. Created with mode 0700; shared by runs and loaders.
        boundary: Qualified name of the last frozen module; None while nothing is frozen; "auto" for
            the deepest module before which nothing trains: it is found on the first call, and
            again whenever `requires_grad` has changed.
        loader: A DataLoader that exists, to be served: see `attach`.
        limit: Hard bound on the directory's size: bytes, or text such as "100GB".
        codec: How records are compressed: "auto", "zstd", "raw", ...; see `docs/format.md`.
        ring_batches: How many mini-batches are read ahead; as many recent ones stay on a device.
        audit_rate: Fraction of the hits that are recomputed from the raw sample and compared.
        gate: "auto" skips while training steps are measured to be faster for it, and in short runs
            begins when that may be won back; "always" skips whatever can be skipped; "never"
            keeps the schedule of a cached run (inference mode, random draws) but computes all.
        force_network: Use a network filesystem all the same; one host at a time may.
        padding: What the loop does with a tensor of the model's output that is as long as its
            padded batch: "proved", nothing is served before gradients have shown that the loss
            reads none of its padding; "unread", you say so.
        method: What the loop calls of the model: "encode_image", say. Where nothing is said and the
            first batch goes to another method than `forward`, or to a part of the model, that one
            is taken.

    Raises:
        BoundaryError: The model has no such module, or it is trainable.
        StoreError: The directory cannot be used.
        TypeError: The model is no module, the directory no path, or the boundary no name.
        ValueError: An argument is out of its range.
    """

    _takes_over: ClassVar[Callable[..., Callable[[], None]]]
    """Lets a loader be served from a cache, and returns what undoes it."""

    @arguments.names_known
    def __init__(
        self,
        model: nn.Module,
        directory: str | Path,
        boundary: str | None = None,
        *,
        loader: Any = None,
        limit: int | str = "100GB",
        codec: Codec = "auto",
        ring_batches: int = 5,
        audit_rate: float = 0.001,
        gate: Gate = "auto",
        force_network: bool = False,
        padding: Padding = "proved",
        method: str = "forward",
    ) -> None:
        _check_kinds(model, directory, boundary)
        arguments.check_whole_number("ring_batches", ring_batches)
        arguments.check_fraction("audit_rate", audit_rate)
        arguments.check_choice("codec", codec, Codec)
        arguments.check_choice("gate", gate, Gate)
        arguments.check_choice("padding", padding, Padding)
        if not callable(getattr(type(inner_model(model)), method, None)):
            raise ValueError(f"{type(inner_model(model)).__name__} has no method {method!r}")
        self.model = model
        self.directory = Path(directory).expanduser().absolute()
        self._make_store = partial(
            ActivationStore, self.directory, limit=limit, codec=codec, force_network=force_network
        )
        is_unread = padding == "unread"
        self._make_engine = partial(SkipEngine, model, padding_unread=is_unread, method=method)
        self._settings = gate, audit_rate, ring_batches
        self._asked: tuple[str | None, bool] = boundary, True
        """The boundary that was last asked for, and whether by hand."""
        self._attached: list[Callable[[], None]] = []
        """Give the loaders back that were attached."""
        self._open(loader)

    def _open(self, loader: Any = None) -> None:
        """Make the parts, in this process, and attach them to the model, and to a loader."""
        _close_other(self.model, self)
        store, (gate, audit_rate, ring_batches) = self._make_store(), self._settings
        overlap = 0.95 if runs_late(device_of(self.model)) else 0.5
        policy = ServingPolicy(gate, overlap, is_stored=store.was_used)
        self.api = LoaderApi(store, policy, audit_rate, ring_batches)
        """What its loaders and its engine ask; no part of what a user needs."""
        self.api.engine = engine = self._make_engine(self.api)
        forget_trials()
        engine.attach()
        _ATTACHED[engine.model] = weakref.ref(self)
        try:
            self._move(*self._asked, "set by hand")
            if loader is not None:
                self.attach(loader)
        except BaseException:
            self.close()
            raise

    def attach(self, loader: Any, **options: Any) -> Any:
        """Let the next passes over a loader that exists be served from this cache; return it.

        It stays the same object, in whoever's hands: a DataLoader becomes an `EgeriaLoader`, until
        `close()`. It gives the batches that it would have given, of the same samples in the same
        order; a pass that is under way goes on as it is.

        Args:
            loader: A DataLoader, an EgeriaLoader, or what Accelerate or Fabric made of one.
            options: What `EgeriaLoader` takes and DataLoader does not: `name`, `seed`,
                `reuse`, `augmentation_variants`, `sample_id`, `sample_version`.

        Raises:
            EgeriaError: Its class makes its passes itself.
            TypeError: It is no DataLoader, or its data set has no length.
        """
        self._attached.append(type(self)._takes_over(loader, self, **options))
        return loader

    def _move(self, boundary: str | None, by_hand: bool, reason: str) -> None:
        self.api.move(boundary, by_hand=by_hand, reason=reason)
        self._asked = boundary, by_hand

    def reopen(self) -> bool:
        """Take the cache up in this process, where it was made in another one; whether it was.

        A forked child has none of the threads, and computes everything until this is called. It may
        use the directory together with its parent. Where the cache is open, or was closed, nothing
        happens.

        Raises:
            StoreError: The directory cannot be used.
        """
        if "api" not in self.__dict__:  # it was unpickled
            return self.api is not None
        if self.api.is_closed or not self.api.is_forked:
            return False
        self._shut()
        self._open()
        return True

    @property
    def boundary(self) -> str | None:
        """Qualified name of the last frozen module; None if nothing is frozen."""
        return self.api.boundary

    def set_boundary(self, name: str | None) -> None:
        """Declare that everything up to and including this module is frozen; "auto": find it.

        Raises:
            BoundaryError: No module has this name, or one of its parameters is trainable. What
                shows only when the model runs is raised by its next call.
        """
        self._move(name, True, "set by hand")

    def on_boundary_moved(self, event: BoundaryMoved) -> None:
        """Follow a freeze controller. A model that cannot be cut there trains on uncached."""
        self._move(event.boundary, False, event.reason)

    def stats(self) -> CacheStats:
        """Return the counts so far."""
        return self.api.stats()

    def report(self) -> str:
        """Return `stats()` as text for people."""
        return self.stats().report()

    def fill(self, *_: Any, **__: Any) -> None:
        """Do nothing any more; it is accepted for one release."""
        what = "the first epoch of a training stores all that it computes"
        warnings.warn(
            f"ActivationCache.fill() does nothing any more: {what}", FutureWarning, stacklevel=2
        )

    def commutes(
        self, loader: Any, before: Operation, after: Operation | None = None, *, seed: int = 0
    ) -> float:
        """Measure how well augmenting the front's output stands for augmenting its input.

        Args:
            loader: Its first 64 samples are taken; the first tensor that the model is called with
                is augmented.
            before: An operation of `egeria_cache.augment` on the inputs.
            after: The one on the features; the same by default. Both draw the same numbers.
            seed: Of these.

        Returns:
            The distance between the two, in units of that between two samples: 0 where they are the
            same, about 1 where they have nothing to do with each other.

        Raises:
            EgeriaError: Nothing is frozen, or inputs or features are no batch of tensors.
        """
        name = self.api.engine.frozen
        if name is None:
            raise EgeriaError("nothing is frozen: set a boundary, and call the model once")
        generators, model = RandomState.now(), self.api.engine.model
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()  # what runs beside the front would else note these samples, or draw
            rows = [loader.dataset[index] for index in range(min(64, len(loader.dataset)))]
            first, *rest = ordinary_arguments(model, loader.collate_fn(rows)) or [None]
            if not isinstance(first, Tensor) or not first.is_floating_point():
                raise EgeriaError("the model's first argument is no batch of numbers to augment")
            front, computed = model.get_submodule(name), self.api.engine.computed
            moved = before(first, torch.Generator().manual_seed(seed))
            plain = features(front, partial(computed, first, *rest), len(rows))
            early = features(front, partial(computed, moved, *rest), len(rows))
            late = (after or before)(plain, torch.Generator().manual_seed(seed))
            if early.shape != late.shape:
                shapes = f"features of {tuple(early.shape)} and {tuple(late.shape)}"
                raise EgeriaError(f"augmenting before and after the front gives {shapes}")
            return distance(early, late) / max(distance(plain, plain.roll(1, 0)), 1e-12)
        finally:
            for module, training in modes:
                module.training = training
            generators.restore()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until what was handed to the writer is on disk."""
        if not self.api.is_forked:  # whose writer is not there
            self.api.store.flush(timeout_s=timeout_s)

    def close(self) -> None:
        """Give the model its own forward back, stop all threads, close the store. May be called
        again, also to finish what was interrupted. Attached loaders are as they were.
        """
        while self._attached:
            self._attached.pop()()
        self._shut()

    def _shut(self) -> None:
        self.api.is_closed = True
        self.api.engine.detach()
        self.api.views.clear()
        if self.api.is_forked:
            return  # threads and locks are the parent's
        self.api.readers.close()
        self.api.note_epochs()
        self.api.store.close()

    def __repr__(self) -> str:
        if "api" not in self.__dict__:
            return f"ActivationCache(in {str(self.directory)!r}, not opened yet)"
        stats = self.stats()
        boundary = f"frozen up to {stats.boundary!r}" if stats.boundary else "nothing frozen"
        closed = "closed, " if self.api.is_closed else ""
        return (
            f"ActivationCache({closed}{boundary}, {stats.hits} of {stats.hits + stats.misses} "
            f"samples from the cache, {size(stats.bytes_on_disk)} in {str(self.directory)!r})"
        )

    def __getattr__(self, name: str) -> Any:
        if name != "api":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Only now: while it was unpickled, its model need not have been complete.
        self._open()
        return self.api

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key != "api"}
        return kept | {"_attached": []}

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_kinds(model: Any, directory: Any, boundary: Any) -> None:
    if not isinstance(model, nn.Module) or not isinstance(directory, str | os.PathLike):
        raise TypeError(
            "ActivationCache takes the model first, then a directory: "
            f'ActivationCache(model, "runs/cache"); got {type(model).__name__} and '
            f"{type(directory).__name__}"
        )
    if not isinstance(boundary, str | None):
        named = (name for name, one in model.named_modules() if one is boundary)
        raise TypeError(
            f"boundary is the name of the last frozen module ({next(named, 'blocks.3')!r}, say), "
            f"'auto', or None; got {type(boundary).__name__} {boundary!r:.80}"
        )


def _close_other(model: nn.Module, but: ActivationCache) -> None:
    """Close the cache that is attached to this model: a cell of a notebook was run again."""
    known = _ATTACHED.get(inner_model(model))
    other = None if known is None else known()
    if other is not None and other is not but and not other.api.is_closed:
        log.info("%r is closed: its model is given to another cache", other)
        other.close()
