"""Ranks: one decision on all of them, and models that lie on several.

Rank 0 measures; what it read is broadcast at every evaluation point, and each rank feeds the same
numbers to the same pure policy. So all ranks freeze the same layers at the same step without a
message per step, and any rank's `state_dict()` is everyone's. A DistributedDataParallel is made to
follow a freeze.

Of a model that `fully_shard` cuts, what is frozen has to be frozen on the DTensors that the
optimizer has. A unit's own parts are named in `egeria_cache/skip/model/fsdp.py`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from egeria_cache import EgeriaError
from egeria_cache.skip import groups_of, is_sharded, states_in
from egeria_core.history import Verdict


def unwrap(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the bare model, and the wrapper if there is one."""
    return (model.module, model) if isinstance(model, DistributedDataParallel) else (model, None)


class Ranks:
    """The processes that train one model together; alone, everything here does nothing.

    Args:
        ddp: The wrapper whose group is meant; None: a single process, or a model that is sharded.
        model: The bare model; `fully_shard` may have cut it over ranks.
    """

    def __init__(self, ddp: DistributedDataParallel | None, model: nn.Module) -> None:
        self._group: Any = sharding_group(model) if ddp is None else ddp.process_group
        self.is_sharded = ddp is None and self._group is not None
        """Whether each rank has a part of every parameter."""
        self._device = torch.device("cpu")
        if self._group is not None:
            self._device = wire_of(self._group, next(model.parameters()).device)
        self.is_first = self._group is None or dist.get_rank(self._group) == 0
        """Whether this process writes the history."""
        self.measures = self.is_first or self.is_sharded
        """Whether this process may ever measure."""

    def agree(self, value: Any) -> Any:
        """Return what the first rank has; called by all ranks at the same step."""
        if self._group is None:
            return value
        message = [value]
        dist.broadcast_object_list(message, group=self._group, device=self._device, group_src=0)
        return message[0]

    def share(self, verdicts: list[Verdict], frozen: int) -> list[Verdict]:
        """Return the verdicts of the rank that measures; called by all ranks at the same step.

        Raises:
            EgeriaError: This rank has frozen another number of layers.
        """
        shared, first_frozen = self.agree((verdicts, frozen))
        if first_frozen != frozen:
            raise EgeriaError(
                f"rank {dist.get_rank(self._group)} has {frozen} frozen layers and rank 0 has "
                f"{first_frozen}; the learning rates or the policy differ between ranks"
            )
        return list(shared)


def wire_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where a group's messages lie: in the host's memory where it takes them from there."""
    host = torch.device("cpu")
    return host if host in group._device_types else device


def rebuild(ddp: DistributedDataParallel) -> None:
    """Make the wrapper reduce exactly the parameters that are trainable now.

    DDP settles at construction which parameters it reduces. Frozen ones would be waited for, and
    ones unfrozen later would silently stay unsynchronised. This does what unpickling a wrapper
    does (`DistributedDataParallel.__setstate__`): the user's object, its hooks and its process
    group stay; only the reducer is new. Call on every rank at the same step, between
    `optimizer.step()` and the next forward.

    Raises:
        EgeriaError: This version of PyTorch does it differently.
    """
    inner: Any = ddp
    hooks = list(inner._comm_hooks)
    try:
        parameters, sparse = inner._build_params_for_reducer()
        names = inner._build_debug_param_to_name_mapping(parameters)
        inner._ddp_init_helper(parameters, sparse, names, inner.static_graph)
    except (AttributeError, TypeError) as error:
        raise EgeriaError(
            f"cannot rebuild DistributedDataParallel of torch {torch.__version__} ({error}); wrap "
            "the model again after each BoundaryMoved event instead"
        ) from error
    inner._module_parameters = [
        p for n, p in inner.module.named_parameters() if n not in inner.parameters_to_ignore
    ]
    inner._has_rebuilt_buckets = False
    inner._comm_hooks = []
    for hook, state in hooks:
        # The errors that PowerSGD feeds back, and its factors, are of the old buckets' sizes; the
        # next step begins with an error of zero, as the first.
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            memory = getattr(state, name, None)
            if isinstance(memory, dict):
                memory.clear()
        ddp.register_comm_hook(state, hook)
    if inner.static_graph:
        inner.static_graph = False
        inner._set_static_graph()
    if inner.gradient_as_bucket_view:
        # These gradients are views into buckets that are gone; the step has used them.
        for parameter in ddp.parameters():
            parameter.grad = None


_HOOKS = {name for name in vars(nn.Module()) if re.search(r"ward(_pre)?_hooks", name)}
"""Of forward and backward, whichever this version of PyTorch has."""


def sharding_group(model: nn.Module) -> Any:
    """Return the process group that a model is sharded over; None if it is not.

    Of a mesh of several dimensions (HSDP) it is the group of all processes.
    """
    sharded = next((p for p in model.parameters() if is_sharded(p)), None)
    if sharded is None:
        return dist.group.WORLD if states_in(model) else None
    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's parameters, by id; also of those that stand in a forward in
    place of DTensors, which are what autograd has seen.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for group in (group for state in states_in(model) for group in groups_of(state)):
        for one in group.fsdp_params:
            name, there = names.get(id(one.sharded_param)), getattr(one, "_unsharded_param", None)
            if name is not None and there is not None:
                names[id(there)] = name
    return names


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


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have no hooks inside the block, so that they can be copied: a copy must not copy
    what other people hung on them.
    """
    before = [(m, dict(m.__dict__)) for module in modules for m in module.modules()]
    try:
        for module, own in before:
            module.__dict__.update({name: OrderedDict() for name in _HOOKS & own.keys()})
        yield
    finally:
        for module, own in before:
            module.__dict__.update(own)
