"""Models that `fully_shard` cuts over ranks, as the controller has to see them.

A layer that is measured or copied has to be whole, and without what FSDP2 hangs on it; what is
frozen has to be frozen on the DTensors that the optimizer has. A unit's own parts are named in
`egeria_cache/skip/model/fsdp.py`.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from egeria_cache.skip import groups_of, is_sharded, states_in

_STATE_DICT_HOOKS = {name for name in vars(nn.Module()) if "state_dict" in name}
_HOOKS = {name for name in vars(nn.Module()) if re.search(r"ward(_pre)?_hooks", name)}
"""Of forward and backward, whichever this version of PyTorch has."""


def _units(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called with."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]


def sharding_group(model: nn.Module) -> Any:
    """Return the process group that a model is sharded over; None if it is not.

    Of a mesh of several dimensions (HSDP) it is the group of all processes.
    """
    sharded = next((p for p in model.parameters() if is_sharded(p)), None)
    if sharded is None:
        return None if not _units(model) else dist.group.WORLD
    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def to_shards(model: nn.Module) -> None:
    """Put the DTensors in their places: after an evaluation, FSDP2 leaves some units whole."""
    for unit in _units(model):
        unit.reshard()


def unsharded_names(model: nn.Module) -> dict[int, str]:
    """Return the names of the parameters that stand in a forward in place of the DTensors, by id.

    They are what autograd has seen.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in (group for state in states_in(model) for group in groups_of(state)):
        for one in group.fsdp_params:
            name, there = names.get(id(one.sharded_param)), getattr(one, "_unsharded_param", None)
            if name is not None and there is not None:
                found[id(there)] = name
    return found


def local_part(tensor: Tensor) -> Tensor:
    """Return what of a tensor lies on this rank."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def global_sums(sums: Tensor, like: Tensor) -> Tensor:
    """Add up what each rank summed over its part of tensors that are sharded like `like`.

    Called by all ranks. Where parts have replicas (HSDP), each part counts once.
    """
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(sums, group=mesh.get_group(dim))
    return sums


def _inside(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with all below them, each once."""
    return list({id(m): m for top in modules for m in top.modules()}.values())


def _places(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return where the modules' own sharded parameters stand: (dict, name, parameter)."""
    return [
        (module._parameters, key, parameter)
        for module in modules
        for key, parameter in module._parameters.items()
        if is_sharded(parameter)
    ]


@contextmanager
def whole(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have their whole parameters inside the block; called by all ranks."""
    places = _places(_inside(modules))
    try:
        with torch.no_grad():
            for slot, key, parameter in places:
                slot[key] = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
        yield
    finally:
        for slot, key, parameter in places:
            slot[key] = parameter


@contextmanager
def plain_structure(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have no hooks inside the block, and be what they were before `fully_shard`.

    So that they can be copied: a copy must not copy what other people hung on them. Parameters that
    are still sharded have their whole shape there, and no values. Local.
    """
    inside = _inside(modules)
    units = set(map(id, _units(nn.ModuleList(inside))))
    contract = sys.modules.get("torch.distributed._composable.contract")
    marks = [] if contract is None else [contract.STATE_KEY, contract.REGISTRY_KEY]
    hooks = _HOOKS | (_STATE_DICT_HOOKS if units else set())
    before = [(module, type(module), dict(module.__dict__)) for module in inside]
    sharded = _places(inside)
    try:
        for module, kind, own in before:
            if id(module) in units:
                module.__class__ = kind.__bases__[1]
            module.__dict__.update({name: OrderedDict() for name in hooks & own.keys()})
            for name in marks:
                module.__dict__.pop(name, None)
        for slot, key, p in sharded:
            empty = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            slot[key] = nn.Parameter(empty, p.requires_grad)
        yield
    finally:
        for slot, key, parameter in sharded:
            slot[key] = parameter
        for module, kind, own in before:
            module.__class__ = kind
            module.__dict__.update(own)
