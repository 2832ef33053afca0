"""Let a `DataLoader` that exists be served: it becomes an `EgeriaLoader`, in place.

Programs build their loaders before their models, and hand them on: to a trainer, to functions, to
wrappers. So the object itself is changed, not replaced. Whoever iterates over it at the moment goes
on as before; its next pass is served. What it draws, loads and collates stays its own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from egeria_cache.errors import EgeriaError
from egeria_cache.loader.loader import OWN_OPTIONS, EgeriaLoader

if TYPE_CHECKING:
    from egeria_cache.cache import ActivationCache

log = logging.getLogger("egeria")
_OF_PASSES = ("__iter__", "_get_iterator", "_index_sampler", "__getattribute__")
"""What a subclass of DataLoader may not have of its own: it would not ask us."""


def take_over(loader: Any, cache: ActivationCache, **options: Any) -> Callable[[], None]:
    """Let the next passes over `loader` be served from `cache`; return what undoes it.

    Args:
        loader: A DataLoader, or an EgeriaLoader: of no cache, or of another one, which it leaves.
        cache: The cache of the model that is trained on its batches.
        options: The arguments of `EgeriaLoader` that `DataLoader` does not have.

    Raises:
        EgeriaError: It is a subclass of DataLoader that makes its passes itself.
        TypeError: It is no DataLoader, or its data set has no length.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"a cache is attached to a torch.utils.data.DataLoader; {type(loader).__name__} is "
            "none. Attach it to the DataLoader inside, or make an EgeriaLoader in its place"
        )
    if unknown := options.keys() - OWN_OPTIONS:
        raise TypeError(f"an EgeriaLoader has no option {min(unknown)!r}")
    mine: Any = loader
    if getattr(loader, "cache", None) is not None:
        # A cell of a notebook that makes the model was run again, say: what comes last counts.
        log.info("loader %r leaves %r", mine.name, mine.cache)
    if "taken_from" in vars(mine):
        mine.taken_from(mine)
    known, cls = set(vars(loader)), type(loader)
    before = {name: value for name, value in vars(loader).items() if name in OWN_OPTIONS}
    own = before if isinstance(loader, EgeriaLoader) else {}  # others may mean something else
    loader.__class__ = _served(cls)
    try:
        vars(loader).update(OWN_OPTIONS | own | options)
        mine._serve(cache)
    except BaseException:
        _restore(loader, cls, known, before)
        raise
    mine.taken_from = partial(_restore, cls=cls, known=known, before=before)
    return partial(_give_back, weakref.ref(loader), weakref.ref(cache))


def _give_back(loader: weakref.ref[Any], cache: weakref.ref[Any]) -> None:
    """Let a loader be what it was, if it is attached to this cache."""
    mine = loader()
    if mine is not None and "taken_from" in vars(mine) and mine.cache is cache():
        mine.taken_from(mine)


def _restore(loader: Any, cls: type, known: set[str], before: dict[str, Any]) -> None:
    goes_on = object.__new__(type(loader))
    vars(goes_on).update(vars(loader))
    for one in vars(loader).get("_passes", ()):
        one._loader = goes_on  # to its end, as it began
    vars(loader).update(before)
    if issubclass(cls, EgeriaLoader):
        loader._serve(None)
    for name in set(vars(loader)) - known:
        del loader.__dict__[name]
    loader.__class__ = cls


def _served(cls: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """Return the class that a loader of this class gets."""
    if cls is DataLoader or issubclass(cls, EgeriaLoader):
        return EgeriaLoader if cls is DataLoader else cls
    for base in cls.__mro__[: cls.__mro__.index(DataLoader)]:
        own = next((name for name in _OF_PASSES if name in vars(base)), None)
        if own is not None:
            raise EgeriaError(
                f"{base.__module__}.{base.__qualname__} has a {own} of its own, and would not ask "
                "the cache; make an EgeriaLoader with its arguments in its place"
            )
    return type(cls.__name__, (cls, EgeriaLoader), {"__module__": cls.__module__})
