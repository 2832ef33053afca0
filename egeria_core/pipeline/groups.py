"""Groups of some ranks, made when they are first wanted and kept as long as the processes meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["subgroup"]

_MADE: dict[tuple[int, ...], dist.ProcessGroup] = {}
_WORLD: list[Any] = []
"""The processes among which these were made."""


def subgroup(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of these ranks of `group`; only they call.

    PyTorch names a group that only its members make after its ranks, and a second one of the same
    name waits for ever: so there is one for all pipelines of a process.
    """
    world = dist.group.WORLD
    if not _WORLD or _WORLD[0] is not world:
        _MADE.clear()
        _WORLD[:] = [world]
    everywhere = tuple(dist.get_global_rank(group, rank) for rank in ranks)
    if len(everywhere) == dist.get_world_size(group):
        return group
    if everywhere not in _MADE:
        made = dist.new_group(list(everywhere), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _MADE[everywhere] = made
    return _MADE[everywhere]
