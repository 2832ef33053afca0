"""Moves blocks between ranks, with their optimizer state; a rank without a block keeps its outline.

The outline is the same module with its tensors on the `meta` device: names, shapes and the identity
of every parameter stay, so optimizers and hooks need not be told. Parameters keep their identity by
`torch.utils.swap_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


@dataclass(slots=True)
class Carrier:
    """Sends blocks within one group of processes; all its ranks call in the same order."""

    group: dist.ProcessGroup
    device: torch.device
    """Where blocks live on this rank."""
    wire: torch.device
    """Where the group's messages lie."""
    optimizers: Sequence[torch.optim.Optimizer]

    def send(self, block: nn.Module, target: int) -> int:
        """Give a block to a rank of the group; return the bytes of its tensors."""
        states = [optimizer.state.get(parameter) for optimizer, parameter in self._pairs(block)]
        # Of an optimizer's tensors some are on the host wherever the block is: a count of steps.
        message = [
            _on_host(list(_own_tensors(block))),
            _on_host(states),
            tree_map(_is_on_host, states),
        ]
        peer = dist.get_global_rank(self.group, target)
        dist.send_object_list(message, dst=peer, group=self.group, device=self.wire)
        return _num_bytes(message)

    def receive(self, block: nn.Module, source: int) -> int:
        """Take a block from a rank of the group; return the bytes of its tensors."""
        message: list[Any] = [None, None, None]
        peer = dist.get_global_rank(self.group, source)
        dist.recv_object_list(message, src=peer, group=self.group, device=self.wire)
        tensors, states, on_host = message
        self._fill(block, tensors)
        for (optimizer, parameter), state, is_there in zip(
            self._pairs(block), states, on_host, strict=True
        ):
            optimizer.state.pop(parameter, None)
            if state is not None:
                optimizer.state[parameter] = tree_map(self._placed, state, is_there)
        return _num_bytes(message)

    def share(self, block: nn.Module, source: int) -> int:
        """Give a block's weights to all ranks of the group; return the bytes that this one took."""
        is_mine = dist.get_rank(self.group) == source
        message = [_on_host(list(_own_tensors(block))) if is_mine else None]
        peer = dist.get_global_rank(self.group, source)
        dist.broadcast_object_list(message, src=peer, group=self.group, device=self.wire)
        if is_mine:
            return 0
        self._fill(block, message[0])
        return _num_bytes(message)

    def forget(self, block: nn.Module) -> None:
        """Drop this rank's optimizer state of a block."""
        for optimizer, parameter in self._pairs(block):
            optimizer.state.pop(parameter, None)

    def _fill(self, block: nn.Module, tensors: Any) -> None:
        make_room(block, self.device)
        for own, taken in zip(_own_tensors(block), tensors, strict=True):
            own.detach().copy_(taken)

    def _placed(self, leaf: Any, is_on_host: bool) -> Any:
        return leaf if is_on_host or not isinstance(leaf, Tensor) else leaf.to(self.device)

    def _pairs(self, block: nn.Module) -> list[tuple[torch.optim.Optimizer, nn.Parameter]]:
        return [(one, parameter) for parameter in block.parameters() for one in self.optimizers]


def make_room(block: nn.Module, device: torch.device) -> None:
    """Give every tensor of a block that is on `meta` memory on `device`, with nothing in it."""
    _replace(block, lambda tensor: torch.empty_like(tensor, device=device), is_meta=True)


def drop_block(block: nn.Module) -> None:
    """Give the memory of a block's tensors back."""
    _replace(block, lambda tensor: torch.empty_like(tensor, device="meta"), is_meta=False)


def _replace(block: nn.Module, make: Any, *, is_meta: bool) -> None:
    for parameter in block.parameters():
        if parameter.is_meta == is_meta:
            new = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
            # What people hung on the parameter stays on it.
            new.__dict__.update(parameter.__dict__)
            new.__class__ = parameter.__class__
            torch.utils.swap_tensors(parameter, new)
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta == is_meta:
                module._buffers[name] = make(buffer)


def _own_tensors(block: nn.Module) -> Iterator[Tensor]:
    yield from block.parameters()
    yield from block.buffers()


def _on_host(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cpu


def _num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
