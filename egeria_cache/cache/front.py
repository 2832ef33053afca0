"""A frozen front of its own: whole on this rank, called once per batch, served from the cache.

A cache knows whole batches by their samples' IDs. Where the model is cut into stages, or its
weights into shards, the front is taken out of them while it is frozen: a plain copy on every rank
runs on that rank's rows alone, outside all collectives, so that hits may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from egeria_cache.arguments import Codec, Gate, Padding, names_known
from egeria_cache.batch import unwrap
from egeria_cache.cache.cache import ActivationCache
from egeria_cache.errors import BoundaryError


class FrozenFront(nn.Module):
    """Runs the first `depth` of some blocks on this rank's rows, or reads what they gave before.

    The blocks run one after another, each on what the one before returned (a tuple as several
    arguments). Those of the front must be frozen, lie on this rank as plain modules, and hold the
    same weights on every rank; the others are never touched. Give `cache` to this rank's
    `EgeriaLoader`. With a sampler that keeps samples on their rank (`ShardAffineSampler`) each
    sample is computed once, on one rank, and is a hit from then on.

    Args:
        blocks: All blocks of the model in forward order, or those that may become the front.
        directory: Where this rank's activations live; ranks of a host may share it. None: the front
            is computed every time.
        device: Where the front runs; that of the blocks by default.
        gate: As for `ActivationCache`; but a rank that tries out whether hits pay would make all
            others wait for it.
        limit: As for `ActivationCache`, like all that follow.
        codec: How records are compressed.
        ring_batches: How many mini-batches are read ahead.
        audit_rate: Fraction of the hits that are recomputed and compared.
        force_network: Use a network filesystem all the same.
        padding: What the loop does with padding in the model's output.

    Raises:
        StoreError: The directory cannot be used.
        ValueError: An argument is out of its range.

    Not thread-safe.
    """

    @names_known
    def __init__(
        self,
        blocks: Sequence[nn.Module],
        directory: str | Path | None = None,
        *,
        device: torch.device | str | None = None,
        limit: int | str = "100GB",
        codec: Codec = "auto",
        ring_batches: int = 5,
        audit_rate: float = 0.001,
        gate: Gate = "always",
        force_network: bool = False,
        padding: Padding = "proved",
    ) -> None:
        super().__init__()
        # Blocks that lie on other ranks tell no device: this, found before them, does.
        self.register_buffer("anchor", torch.empty(0, device=device), persistent=False)
        self.blocks = nn.ModuleList(map(_Place, blocks))
        self.cache: ActivationCache | None = None
        """For this rank's loader; None where there is no directory."""
        if directory is not None:
            self.cache = ActivationCache(
                self, directory, limit=limit, codec=codec, ring_batches=ring_batches,
                audit_rate=audit_rate, gate=gate, force_network=force_network,
                padding=padding,
            )  # fmt: skip

    @property
    def depth(self) -> int:
        """How many blocks are frozen."""
        return sum(place.is_frozen for place in self._places)

    @property
    def _places(self) -> list[_Place]:
        return [place for place in self.blocks if isinstance(place, _Place)]

    def freeze(self, depth: int) -> None:
        """Make the first `depth` blocks the front, from the next batch on; 0: none.

        Raises:
            BoundaryError: One of their parameters is trainable, or is not on this rank.
            ValueError: There are fewer blocks.
        """
        if not 0 <= depth <= len(self.blocks):
            raise ValueError(f"depth must be in [0, {len(self.blocks)}], got {depth}")
        for name, parameter in self.blocks[:depth].named_parameters():
            if parameter.requires_grad or parameter.is_meta:
                what = "is not on this rank" if parameter.is_meta else "is trainable"
                raise BoundaryError(
                    f"parameter {name.replace('.block', '')!r} of the first {depth} blocks {what}; "
                    "a front must be frozen, and whole wherever it runs"
                )
        if depth == self.depth:
            return
        for index, place in enumerate(self._places):
            place.is_frozen = index < depth
        if self.cache is not None:
            self.cache.set_boundary(f"blocks.{depth - 1}" if depth else None)

    def forward(self, *args: Any) -> Any:
        """Return what the last block of the front gives for this rank's rows."""
        output: Any = args[0] if len(args) == 1 else args
        for place in self.blocks:
            output = place(*output) if isinstance(output, tuple) else place(output)
        return output

    def plain(self, rows: Any) -> Any:
        """Return leaves of a batch, or what the front gave, as ordinary tensors without a graph.

        A collective does not take the tensors that a loader gives out; what they hold may have to
        be loaded first.
        """
        return tree_map_only(Tensor, Tensor.detach, unwrap(rows))

    def close(self) -> None:
        """Close the cache; idempotent."""
        if self.cache is not None:
            self.cache.close()


class _Place(nn.Module):
    """Where a block stands; hands on what it is given until the block is frozen.

    Each place knows this of itself alone. A number of frozen blocks, kept for all of them, would be
    read before every boundary: what is stored at one would be void as soon as the next one froze.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.is_frozen = False

    def forward(self, *args: Any) -> Any:
        """Run the block, or pass its arguments on."""
        if self.is_frozen:
            return self.block(*args)
        return args[0] if len(args) == 1 else args
