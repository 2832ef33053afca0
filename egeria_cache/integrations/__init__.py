"""The loops of others: what makes an `EgeriaLoader` and its cache at home in their trainers.

Each library has a module of its own, which is the only place that imports it, and which is imported
by whoever uses that library: `accelerate`, `transformers`, `lightning`. This room never changes
what is cached or served.
"""

__all__ = ["keep_through_accelerate"]


def keep_through_accelerate() -> None:
    """Let loaders keep their cache where Accelerate rebuilds them; called once it asks for one."""
    from egeria_cache.integrations.accelerate import keep_caches

    keep_caches()
