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
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class _Sent:
    """Stands for a tensor in what is sent as an object."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


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
        tensors = list(_own_tensors(block))
        outline = []
        for optimizer, parameter in _pairs(self.optimizers, list(block.parameters())):
            state = optimizer.state.get(parameter)
            outline.append(tree_map(_outline, state))
            tensors += [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        peer = dist.get_global_rank(self.group, target)
        dist.send_object_list([outline], dst=peer, group=self.group, device=self.wire)
        for tensor in tensors:
            dist.send(tensor.detach().to(self.wire).contiguous(), peer, group=self.group)
        return sum(tensor.nbytes for tensor in tensors)

    def receive(self, block: nn.Module, source: int) -> None:
        """Take a block from a rank of the group."""
        peer = dist.get_global_rank(self.group, source)
        received: list[Any] = [None]
        dist.recv_object_list(received, src=peer, group=self.group, device=self.wire)
        make_room(block, self.device)
        for tensor in _own_tensors(block):
            tensor.detach().copy_(self._take(tensor.shape, tensor.dtype, peer))

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, _Sent):
                return leaf
            taken = self._take(leaf.shape, leaf.dtype, peer)
            return taken if leaf.on_host else taken.to(self.device)

        pairs = _pairs(self.optimizers, list(block.parameters()))
        for outline, (optimizer, parameter) in zip(received[0], pairs, strict=True):
            state = tree_map(fill, outline)
            optimizer.state.pop(parameter, None)
            if state is not None:
                optimizer.state[parameter] = state

    def share(self, block: nn.Module, source: int) -> int:
        """Give a block's weights to all ranks of the group; return the bytes that this one took."""
        is_mine = dist.get_rank(self.group) == source
        if not is_mine:
            make_room(block, self.device)
        peer, num_bytes = dist.get_global_rank(self.group, source), 0
        for tensor in _own_tensors(block):
            data = tensor.detach().to(self.wire).contiguous()
            dist.broadcast(data, src=peer, group=self.group)
            if not is_mine:
                tensor.detach().copy_(data)
                num_bytes += tensor.nbytes
        return num_bytes

    def forget(self, block: nn.Module) -> None:
        """Drop this rank's optimizer state of a block."""
        for optimizer, parameter in _pairs(self.optimizers, list(block.parameters())):
            optimizer.state.pop(parameter, None)

    def _take(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.wire)
        dist.recv(tensor, peer, group=self.group)
        return tensor


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


def _pairs(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter]
) -> list[tuple[torch.optim.Optimizer, nn.Parameter]]:
    return [(optimizer, parameter) for parameter in parameters for optimizer in optimizers]


def _outline(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Sent(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu")
