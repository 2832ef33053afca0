"""What a program of the corpus imports besides its own: see `corpus.py`.

Skipping is judged by what it serves, not by whether it paid: steps of toys are too short for that.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from egeria_cache import ActivationCache, EgeriaLoader

__all__ = ["found", "hold", "watch"]

_CACHES: list[ActivationCache] = []
_init, _iter = ActivationCache.__init__, EgeriaLoader.__iter__


@functools.wraps(_init)
def _watched_init(self: ActivationCache, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **{"gate": "always", **kwargs})
    _CACHES.append(self)


@functools.wraps(_iter)
def _settled_iter(self: EgeriaLoader[Any]) -> Any:
    """What was computed in one pass is on disk in the next, however busy the machine is."""
    if self.cache is not None:
        self.cache.flush()
    return _iter(self)


def watch() -> None:
    """Note each cache that is made from now on."""
    _CACHES.clear()
    ActivationCache.__init__ = _watched_init  # type: ignore[method-assign]
    EgeriaLoader.__iter__ = _settled_iter  # type: ignore[method-assign]


def found() -> dict[str, Any]:
    """Return what the caches did, and close them."""
    ActivationCache.__init__ = _init  # type: ignore[method-assign]
    EgeriaLoader.__iter__ = _iter  # type: ignore[method-assign]
    all_stats = [cache.stats() for cache in _CACHES]
    for cache in _CACHES:
        cache.close()
    why = next((s.why_not for s in all_stats if s.why_not), None)
    audits = sum(s.audit_failures for s in all_stats)
    _CACHES.clear()
    hits, misses = (sum(getattr(s, name) for s in all_stats) for name in ("hits", "misses"))
    return {"hits": hits, "misses": misses, "why_not": why, "audit_failures": audits}


def hold(model: nn.Module, *names: str) -> None:
    """Compute these modules, as far as nothing in them trains, in inference mode."""
    fronts = [model.get_submodule(name) for name in names]
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            # Its fast path asks the first layer alone whether it trains.
            module.use_nested_tensor = False

    def set_modes(model: nn.Module, args: Any) -> None:
        for front in fronts:
            trains = any(parameter.requires_grad for parameter in front.parameters())
            for module in front.modules():
                module.training = model.training and trains

    model.register_forward_pre_hook(set_modes)
