"""Moves blocks between ranks, with their optimizer state; a rank without a block keeps its outline.

The outline is the same module with its tensors on the `meta` device: names, shapes and the identity
of every parameter stay, so optimizers and hooks need not be told. Parameters keep their identity by
`torch.utils.swap_tensors`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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
        states = [optimizer.state.get(own) for optimizer, own in self._pairs(block)]
        content = [tensor.detach() for tensor in (*block.parameters(), *block.buffers())], states
        file = io.BytesIO()
        torch.save(content, file)
        message = [file.getvalue()]
        dist.send_object_list(message, group=self.group, device=self.wire, group_dst=target)
        return sum(leaf.nbytes for leaf in tree_leaves(content) if isinstance(leaf, Tensor))

    def receive(self, block: nn.Module, source: int) -> None:
        """Take a block from a rank of the group."""
        received: list[Any] = [None]
        dist.recv_object_list(received, group=self.group, device=self.wire, group_src=source)

        def to_device(storage: Any, location: str) -> Any:
            # What an optimizer keeps on the host stays there.
            return storage if location == "cpu" else storage.to(device=self.device)

        file = io.BytesIO(received[0])
        tensors, states = torch.load(file, map_location=to_device, weights_only=False)
        place(block, self.device)
        for tensor, sent in zip((*block.parameters(), *block.buffers()), tensors, strict=True):
            tensor.detach().copy_(sent)
        self.forget(block)
        for state, (optimizer, parameter) in zip(states, self._pairs(block), strict=True):
            if state is not None:
                optimizer.state[parameter] = state

    def share(self, block: nn.Module, source: int) -> None:
        """Give a block's weights to all ranks of the group."""
        if dist.get_rank(self.group) != source:
            place(block, self.device)
        for tensor in (*block.parameters(), *block.buffers()):
            data = tensor.detach().to(self.wire).contiguous()
            dist.broadcast(data, group=self.group, group_src=source)
            tensor.detach().copy_(data)

    def forget(self, block: nn.Module) -> None:
        """Drop this rank's optimizer state of a block."""
        for optimizer, parameter in self._pairs(block):
            optimizer.state.pop(parameter, None)

    def _pairs(self, block: nn.Module) -> list[tuple[torch.optim.Optimizer, nn.Parameter]]:
        return [(optimizer, own) for own in block.parameters() for optimizer in self.optimizers]


def place(block: nn.Module, device: torch.device) -> None:
    """Give every tensor of a block memory on `device`, with nothing in it; on `meta` take it away.

    What has memory already keeps it.
    """
    is_room = device.type != "meta"
    for parameter in block.parameters():
        if parameter.is_meta == is_room:
            data = torch.empty_like(parameter.detach(), device=device)
            new = nn.Parameter(data, requires_grad=parameter.requires_grad)
            # What people hung on the parameter stays on it.
            new.__dict__.update(parameter.__dict__)
            new.__class__ = parameter.__class__
            torch.utils.swap_tensors(parameter, new)
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta == is_room:
                module._buffers[name] = torch.empty_like(buffer, device=device)
