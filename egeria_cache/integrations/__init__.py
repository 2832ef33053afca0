"""Third-party loops: what makes an `EgeriaLoader` and its cache at home in their trainers.

Each library has a module of its own, which is the only place that imports it, and which is imported
by whoever uses that library: `accelerate`, `transformers`, `lightning`. This room never changes
what is cached or served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from egeria_cache.loader import take_over

if TYPE_CHECKING:
    from egeria_cache.cache import ActivationCache

__all__ = ["attach", "keep_through_accelerate"]


def attach(loader: Any, cache: ActivationCache, **options: Any) -> Callable[[], None]:
    """Let a loader that exists be served: see `take_over`. Looks into those of trainers."""
    if hasattr(loader, "base_dataloader"):
        from egeria_cache.integrations.accelerate import attach_prepared

        return attach_prepared(loader, cache, **options)
    is_fabric = type(loader).__name__ == "_FabricDataLoader"
    return take_over(loader._dataloader if is_fabric else loader, cache, **options)


def keep_through_accelerate() -> None:
    """Let loaders keep their cache where Accelerate rebuilds them; called once it asks for one."""
    from egeria_cache.integrations.accelerate import keep_caches

    keep_caches()
