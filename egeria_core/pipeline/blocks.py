"""What may be the blocks of a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torch import nn

__all__ = ["as_model", "check_untied"]


def as_model(
    blocks: Sequence[nn.Module] | Mapping[str, nn.Module] | nn.Sequential,
) -> nn.Sequential:
    """Return the blocks by name."""
    if isinstance(blocks, nn.Sequential):
        return blocks
    if not isinstance(blocks, Mapping):
        blocks = {str(index): block for index, block in enumerate(blocks)}
    return nn.Sequential(OrderedDict(blocks))


def check_untied(model: nn.Module) -> None:
    """Refuse blocks that could not lie on different ranks.

    Raises:
        ValueError: Two of them share a parameter or a buffer.
    """
    owners: dict[int, str] = {}
    for name, block in model.named_children():
        for inner, tensor in [*block.named_parameters(), *block.named_buffers()]:
            other = owners.setdefault(id(tensor), name)
            if other != name:
                raise ValueError(
                    f"{inner!r} of block {name!r} is also part of block {other!r}; blocks of a "
                    "pipeline lie on different ranks and cannot share a tensor: untie them"
                )
