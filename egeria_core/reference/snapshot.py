"""Copies of one layer's modules: their structure once, their weights as often as needed."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache import FrozenPrefix
from egeria_cache.device import runs_late, to_host
from egeria_core.ranks import plain_structure

Weights = list[dict[str, Tensor]]
"""Parameters and buffers (persistent or not) of each module, by name."""

_HOOKS = [name for name in vars(nn.Module()) if re.search(r"ward(_pre)?_hooks", name)]
"""Of forward and backward, whichever this version of PyTorch has."""


@contextmanager
def without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Take every hook off for a moment: a copy must not copy what other people hung on them."""
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for root in modules:
            for module in root.modules():
                saved.append((module, {k: module.__dict__[k] for k in _HOOKS}))
                module.__dict__.update({k: OrderedDict() for k in _HOOKS})
        yield
    finally:
        for module, hooks in reversed(saved):
            module.__dict__.update(hooks)


def copy_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return copies in inference mode, without gradients or hooks, on their device."""
    # Buffers are copied by operators of tensors: storages are copied by none that every device has.
    buffers = [b for module in modules for b in module.buffers() if runs_late(b.device)]
    with plain_structure(modules), without_hooks(modules):
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


@torch.no_grad()
def copy_between(source: Sequence[nn.Module], target: Sequence[nn.Module]) -> None:
    """Write the weights of `source` into modules of the same structure, of any type or device."""
    for ours, theirs in zip(source, target, strict=True):
        for (_, tensor), (_, copy_) in zip(_tensors(ours), _tensors(theirs), strict=True):
            copy_.copy_(tensor)
