"""What PyTorch's `fully_shard` hangs on a model, as far as we have to know it.

The only place that names FSDP2's private parts: a unit's state, its groups of parameters, the hooks
on its modules. Nothing here communicates.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_PRIMES = (1, 3, 5, 7, 11, 13, 17, 19)
_MARKS = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params"})
_HOME = "torch.distributed.fsdp"


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: this process holds a part of it."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def state_of(module: nn.Module) -> Any:
    """Return what `fully_shard` keeps for a unit; None if the module is none."""
    home = sys.modules.get(_HOME)
    kind = getattr(home, "FSDPModule", None)
    if kind is None or not isinstance(module, kind):
        return None
    state = module._get_fsdp_state()
    return state if groups_of(state) is not None else None


def states_in(model: nn.Module) -> list[Any]:
    """Return the states of all units of a model, each once."""
    found = (state_of(module) for module in model.modules())
    return list({id(state): state for state in found if state is not None}.values())


def marks() -> frozenset[str]:
    """Return the attributes by which PyTorch notes on a module what was applied to it.

    The names of some are drawn anew in every process.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    found = (getattr(contract, name, None) for name in ("STATE_KEY", "REGISTRY_KEY"))
    return _MARKS.union(key for key in found if isinstance(key, str))


def cut_otherwise(model: nn.Module) -> str | None:
    """Return the name of a parameter that not `fully_shard` alone has cut."""
    sharded = {
        id(one.sharded_param)
        for state in states_in(model)
        for group in groups_of(state)
        for one in group.fsdp_params
        if not one.is_dtensor
    }
    named = model.named_parameters()
    return next((name for name, p in named if is_sharded(p) and id(p) not in sharded), None)


def groups_of(state: Any) -> Any:
    """Return a unit's groups of parameters; None if this PyTorch names them otherwise."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None and hasattr(state, "_fsdp_param_group"):
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return groups


def set_parameters(group: Any, parameters: list[Any]) -> None:
    """Make these the parameters of a group, whose collectives then carry no others."""
    group.fsdp_params = parameters
    # Since PyTorch 2.15 a group keeps the numbers of its parameters in the order of reduction.
    getattr(group, "_init_reduce_scatter_param_order", lambda: None)()


def stripped_hooks(module: nn.Module, *further: Any) -> dict[str, Any]:
    """Return a module's dictionaries of forward hooks without FSDP's, and with further ones."""
    own = vars(module)
    theirs = {
        key
        for slot in ("_forward_pre_hooks", "_forward_hooks")
        for key, hook in own[slot].items()
        if _home_of(hook).startswith(_HOME)
    }
    hooks: dict[str, Any] = {}
    for slot in HOOKS:
        hooks[slot] = type(own[slot])(
            (key, value) for key, value in own[slot].items() if key not in theirs
        )
    for hook in further:
        slot = "_forward_pre_hooks" if isinstance(hook, CastInputs) else "_forward_hooks"
        hooks[slot][id(hook)] = hook
        if isinstance(hook, CastInputs):
            hooks["_forward_pre_hooks_with_kwargs"][id(hook)] = True
    return hooks


def _home_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return getattr(hook if owner is None else type(owner), "__module__", None) or ""


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast(item, dtype)) for key, item in value.items())
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_cast(item, dtype) for item in value)
    return value


class CastInputs:
    """What FSDP's mixed precision does to a unit's arguments, as a hook of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stand before a forward."""
        return _cast(args, self.dtype), _cast(kwargs, self.dtype)


class CastOutput:
    """What FSDP's mixed precision does to a unit's output, as a hook of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Stand behind a forward."""
        return _cast(output, self.dtype)


def cast_hooks(state: Any) -> list[Any]:
    """Return hooks that cast as a unit's own do; none without mixed precision."""
    policy = state._mp_policy
    hooks: list[Any] = []
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        hooks.append(CastInputs(policy.param_dtype))
    if policy.output_dtype is not None:
        hooks.append(CastOutput(policy.output_dtype))
    return hooks


def make_local(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Let copies of sharded modules run without the other ranks, on made-up weights.

    A rehearsal looks at how values travel, not at what they are: any weights will do as long as two
    runs have the same. They take next to no memory.

    Args:
        pairs: (module of the user's, its copy).
    """
    pairs = list(pairs)
    states = {id(state): state for state in (state_of(real) for real, _ in pairs) if state}
    if not states:
        return
    known = {
        id(one.sharded_param): state._mp_policy.param_dtype
        for state in states.values()
        for group in groups_of(state)
        for one in group.fsdp_params
    }
    made: dict[int, nn.Parameter] = {}
    for real, copy in pairs:
        state = state_of(real)
        casts = [] if state is None else cast_hooks(state)
        vars(copy).update(stripped_hooks(copy, *casts))
        own: dict[str, Any] = copy._parameters
        for key, parameter in own.items():
            if is_sharded(parameter):
                if id(parameter) not in made:
                    made[id(parameter)] = _made_up(parameter, known[id(parameter)])
                own[key] = made[id(parameter)]


def _made_up(parameter: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """Return a parameter of the whole shape whose elements share a little memory."""
    shape = parameter.shape
    strides = _PRIMES[: len(shape)][::-1]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    generator = torch.Generator().manual_seed(len(shape))
    memory = torch.randn(max(reach, 1), generator=generator)
    fan_in = max(1, math.prod(shape[1:]))
    memory = 1 + 0.1 * memory if len(shape) < 2 else memory / math.sqrt(fan_in)
    target = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    memory = memory.to(parameter.device, target)
    return nn.Parameter(memory.as_strided(shape, strides), requires_grad=parameter.requires_grad)
