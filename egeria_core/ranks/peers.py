"""A collective that fails since a rank has ended says so, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from egeria_cache import EgeriaError

_OF_THE_NETWORK = ("gloo", "connection", "socket", "broken pipe", "timed out")


@contextmanager
def all_there(group: Any) -> Iterator[None]:
    """Say what it means where a collective of `group` fails inside the block.

    Raises:
        EgeriaError: A connection is gone. Anything else that was raised goes out as it is.
    """
    try:
        yield
    except RuntimeError as error:  # those of `torch.distributed`, and gloo's own
        is_typed = type(error).__name__.startswith("Dist")  # a backend's, or the store's
        if not is_typed and not any(word in str(error).lower() for word in _OF_THE_NETWORK):
            raise
        raise EgeriaError(
            f"a collective of {dist.get_world_size(group)} ranks failed: one of them has most "
            "likely ended, which its own output or the launcher's tells. The others cannot go on: "
            "start all of them again, from their last checkpoint"
        ) from error
