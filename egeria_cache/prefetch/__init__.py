"""From a planned batch to its rows on the training device, ahead of need.

Owns the reader threads, and the ring on the device. It never decides what is served: `View` says
what may be read (`view.py`: who makes one, who voids it), and a `PlannedEntry` either has its rows
or says that it has not.
"""

from egeria_cache.prefetch.prefetcher import PlannedEntry, Prefetcher, ReaderThreads
from egeria_cache.prefetch.view import ACTIVATION, PRINT, View, Views, record

__all__ = [
    "ACTIVATION", "PRINT", "PlannedEntry", "Prefetcher", "ReaderThreads", "View", "Views", "record",
]  # fmt: skip
