"""`cache-inspect`: what a cache directory holds, and what a cache would bring before any training.

Owns the command line. It reads caches without disturbing a live run; only `prune` and `clear`
remove anything, and only with `--yes`.
"""

from egeria_cache.inspect.cli import main

__all__ = ["main"]
