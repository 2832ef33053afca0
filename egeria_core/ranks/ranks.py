"""One decision on every rank, and a DistributedDataParallel that follows it.

Rank 0 measures; what it read is broadcast at every evaluation point, and each rank feeds the same
numbers to the same pure policy. So all ranks freeze the same layers at the same step without a
message per step, and any rank's `state_dict()` is everyone's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from egeria_cache import EgeriaError
from egeria_core.history import Verdict
from egeria_core.ranks.sharded import sharding_group


def unwrap(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the bare model, and the wrapper if there is one."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner, model
    return model, None


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

    @property
    def is_first(self) -> bool:
        """Whether this process writes the history."""
        return self._group is None or dist.get_rank(self._group) == 0

    @property
    def measures(self) -> bool:
        """Whether this process may ever measure."""
        return self.is_first

    @property
    def source(self) -> int:
        """The rank of the group that measures now, the same on all ranks."""
        return 0

    def _broadcast(self, value: Any) -> Any:
        """Return what the rank that measures has."""
        if self._group is None:
            return value
        message = [value]
        source = dist.get_global_rank(self._group, self.source)
        dist.broadcast_object_list(message, source, group=self._group, device=self._device)
        return message[0]

    def agree(self, *values: float) -> list[float]:
        """Return the values of the rank that measures."""
        return list(self._broadcast(values))

    def share(self, verdicts: list[Verdict], frozen: int) -> list[Verdict]:
        """Return the verdicts of the rank that measures; called by all ranks at the same step.

        Raises:
            EgeriaError: This rank has frozen another number of layers than the one that measures.
        """
        shared, first_frozen = self._broadcast((verdicts, frozen))
        if first_frozen != frozen:
            raise EgeriaError(
                f"rank {dist.get_rank(self._group)} has {frozen} frozen layers and rank "
                f"{self.source} has {first_frozen}; the learning rates or the policy differ "
                "between ranks"
            )
        return list(shared)


def wire_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where a group's messages lie: in the host's memory where it takes them from there."""
    host = torch.device("cpu")
    return host if host in group._device_types else device


def _forget_buckets(state: Any) -> None:
    """Empty what PowerSGD keeps for each bucket: errors to feed back, and factors P and Q.

    They are of the buckets' old sizes. The next step begins with an error of zero, as the first.
    """
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        memory = getattr(state, name, None)
        if isinstance(memory, dict):
            memory.clear()


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
        _forget_buckets(state)
        ddp.register_comm_hook(state, hook)
    if inner.static_graph:
        inner.static_graph = False
        inner._set_static_graph()
    if inner.gradient_as_bucket_view:
        # These gradients are views into buckets that are gone; the step has used them.
        for parameter in ddp.parameters():
            parameter.grad = None
