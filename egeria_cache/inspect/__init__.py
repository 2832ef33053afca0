"""`cache-inspect`: what a cache directory holds, whether it is intact, and what may go.

Owns the command line. It reads caches without disturbing a live run; only `prune` removes
anything, and only with `--yes`.
"""

from egeria_cache.inspect.cli import main

__all__ = ["main"]
