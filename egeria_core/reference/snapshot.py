"""Copies of one layer's modules: their structure once, their weights as often as needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from egeria_cache import FrozenPrefix
from egeria_cache.device import runs_late, to_host
from egeria_core.ranks import plain_structure

Weights = list[dict[str, Tensor]]
"""Parameters and buffers (persistent or not) of each module, by name."""


def copy_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return copies in inference mode, without gradients or hooks, on their device."""
    # Buffers are copied by operators of tensors: storages are copied by none that every device has.
    buffers = [b for module in modules for b in module.buffers() if runs_late(b.device)]
    with plain_structure(modules):
        copies = copy.deepcopy(list(modules), {id(buffer): buffer.clone() for buffer in buffers})
    for module in copies:
        FrozenPrefix.thaw(module)
        module.eval().requires_grad_(False)
        for parameter in module.parameters():
            parameter.grad = None
    return copies


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def copy_weights(modules: Sequence[nn.Module]) -> Weights:
    """Return the modules' weights as they are now, on the host.

    From an accelerator the copies are only started where it has pinned memory and streams: wait for
    a `mark` of the device before reading them.
    """
    return [{name: to_host(tensor) for name, tensor in _tensors(module)} for module in modules]


@torch.no_grad()
def load_weights(modules: Sequence[nn.Module], weights: Weights) -> None:
    """Write `copy_weights` back into modules of the same structure."""
    for module, values in zip(modules, weights, strict=True):
        for name, tensor in _tensors(module):
            tensor.copy_(values[name])
