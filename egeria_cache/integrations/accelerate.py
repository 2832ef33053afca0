"""Accelerate: an `EgeriaLoader` stays one in `accelerator.prepare` and `skip_first_batches`.

Both rebuild a loader from its attributes as a plain `DataLoader`, inside an adapter that moves
batches to the device and keeps the count. All of that is left to Accelerate: only the loader
inside the adapter is replaced, by one of the same samples around the batch sampler that Accelerate
made. There is no hook for it. So the adapter's constructor is wrapped, the first time that
Accelerate asks an `EgeriaLoader` whether it was prepared; other loaders pass through as before.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from accelerate import data_loader as accelerated
from torch.utils.data import IterableDataset

from egeria_cache.cache import ActivationCache
from egeria_cache.loader import EgeriaLoader, original_of, take_over

__all__ = ["attach_prepared", "keep_caches", "serve"]

log = logging.getLogger("egeria")


@functools.cache
def keep_caches() -> None:
    """From now on, where Accelerate rebuilds an `EgeriaLoader`, the result is served as well."""
    adapter = getattr(accelerated, "DataLoaderAdapter", None)
    if adapter is None:
        log.warning("this release of Accelerate is not known: its loaders are uncached")
        return
    original = adapter.__init__

    @functools.wraps(original)
    def init(
        self: Any,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        loader = original_of(batch_sampler, dataset, kwargs.get("collate_fn"))
        is_dispatched = issubclass(type(self), accelerated.DataLoaderDispatcher)
        if loader is not None and loader.cache is not None and is_dispatched:
            _say_dispatched(loader.cache, loader.name)
        if loader is None or is_dispatched:
            original(self, dataset, use_stateful_dataloader, batch_sampler, **kwargs)
            return
        # Not torchdata's loader, which draws random numbers while it is made.
        original(self, dataset, False, batch_sampler, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader
        serve(self, loader._around(batch_sampler))

    adapter.__init__ = init


def serve(prepared: Any, loader: EgeriaLoader[Any]) -> None:
    """Let a prepared loader take its batches from `loader`.

    Args:
        prepared: A `DataLoaderShard`: what `accelerator.prepare` makes of a DataLoader.
        loader: Draws from the batch sampler of `prepared`.
    """
    this = weakref.ref(prepared)
    loader._outer_epoch = lambda: getattr(this(), "iteration", 0)
    prepared.base_dataloader = loader
    prepared.dl_state_dict = loader.state_dict()

    def state_dict() -> dict[str, Any]:
        """Return where the batch in the loop's hands stands; the one after it is drawn already."""
        now = this()
        assert now is not None
        return {**now.dl_state_dict, "now": now.base_dataloader.state_dict()["now"]}

    prepared.state_dict = state_dict


def attach_prepared(prepared: Any, cache: ActivationCache, **options: Any) -> Callable[[], None]:
    """Do what `take_over` does, for a loader that was prepared."""
    plain, name = prepared.base_dataloader, options.get("name", "train")
    if not issubclass(type(prepared), accelerated.DataLoaderShard):
        _say_dispatched(cache, name)
        return lambda: None
    if isinstance(plain.dataset, IterableDataset) or plain.batch_sampler is None:
        log.warning("loader %r passes its batches through uncached: no sample IDs", name)
        return lambda: None
    keep_caches()
    undo = take_over(plain, cache, **options)
    serve(prepared, plain)
    return undo


def _say_dispatched(cache: ActivationCache, name: str) -> None:
    why = (
        "with dispatch_batches=True one process loads its batches for all, and the others cannot "
        "tell which samples they are. Leave it out, and each process loads its own"
    )
    cache.api.leave_uncached(f"{name}#dispatched", why)
