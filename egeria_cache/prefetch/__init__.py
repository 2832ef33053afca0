"""From a planned batch to its rows on the training device, ahead of need.

Owns the ring on the device and what reader threads do (the threads are the cache's). It never
decides what is served: a `View` says what may be read, an entry either has its rows or says that it
has not.
"""

from egeria_cache.prefetch.prefetcher import PlannedEntry, Prefetcher
from egeria_cache.prefetch.view import ACTIVATION, View, record

__all__ = ["ACTIVATION", "PlannedEntry", "Prefetcher", "View", "record"]
