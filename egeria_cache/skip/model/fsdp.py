"""The frozen front of a model that `fully_shard` has cut over ranks, whole on each of them.

While it is frozen, the front's parameters are gathered once, and every forward of the model finds
them in their places: plain tensors, the same on all ranks. No unit of the front takes part in a
collective then, so that it does not matter how many hits each rank has. Between two forwards the
model is what `fully_shard` made of it: the same DTensors stand in their places, for the optimizer,
for checkpoints, for whoever thaws them. It costs a copy of the front's weights on each rank.

All ranks have to set and lift the boundary before the same call of the model, as they have to make
the same calls.

The only place that names FSDP2's private parts: a unit's state, its groups of parameters, the hooks
on its modules. Only `ShardedFront` communicates.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from egeria_cache.attempt import Attempt
from egeria_cache.errors import BatchError, BoundaryError

_PRIMES = (1, 3, 5, 7, 11, 13, 17, 19)
_MARKS = "_is_fsdp_managed_module", "_fsdp_use_orig_params", "__composable_api_state_key"
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


def to_shards(model: nn.Module) -> None:
    """Put the DTensors in their places: after an evaluation, FSDP2 leaves some units whole."""
    for state in states_in(model):
        for module in state._modules:
            module.reshard()


def is_mark(key: str) -> bool:
    """Whether it is an attribute by which PyTorch notes on a module what was applied to it; the
    names of some end otherwise in every process.
    """
    return key.startswith(_MARKS)


def groups_of(state: Any) -> Any:
    """Return a unit's groups of parameters; None if this PyTorch names them otherwise."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None and hasattr(state, "_fsdp_param_group"):
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return groups


def set_groups(state: Any, groups: list[Any]) -> None:
    """Make these the groups of a unit, as this PyTorch names them."""
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups = groups
    else:
        state._fsdp_param_group = groups[0] if groups else None


def set_parameters(group: Any, parameters: list[Any]) -> None:
    """Make these the parameters of a group, whose collectives then carry no others."""
    group.fsdp_params = parameters
    # Since PyTorch 2.15 a group keeps the numbers of its parameters in the order of reduction.
    getattr(group, "_init_reduce_scatter_param_order", lambda: None)()


def is_fsdps(hook: Any) -> bool:
    """Whether a hook is one of those by which a unit takes part in collectives."""
    return home_of(hook).startswith(_HOME)


def home_of(hook: Any) -> str:
    """Return the module that a hook's code, or the class of its object, is of."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook if owner is None else type(owner), "__module__", ""))


@dataclass(frozen=True)
class Cast:
    """What FSDP's mixed precision does to a unit's arguments or to its output, as a hook."""

    dtype: torch.dtype
    is_input: bool

    def __call__(self, module: nn.Module, args: Any, given: Any) -> Any:
        """Stand before a forward, `given` named arguments, or behind it, `given` its output."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, (args, given) if self.is_input else given)


def casts_of(modules: Iterable[nn.Module]) -> list[Cast]:
    """Return hooks that cast as those of the units among some modules do; none without mixed
    precision.
    """
    casts = list[Cast]()
    for state in filter(None, map(state_of, modules)):
        policy = state._mp_policy
        given = policy.param_dtype if policy.cast_forward_inputs else None
        pairs = ((given, True), (policy.output_dtype, False))
        casts += [Cast(dtype, is_input) for dtype, is_input in pairs if dtype is not None]
    return casts


def make_local(model: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Let copies of sharded modules run without the other ranks, on made-up weights.

    A dry run looks at how values travel, not at what they are: any weights will do as long as two
    runs have the same. They take next to no memory.

    Args:
        model: The user's.
        pairs: (module of it, its copy).

    Raises:
        BatchError: Not `fully_shard` alone has cut it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = {
        id(one.sharded_param): _made_up(one.sharded_param, state._mp_policy.param_dtype)
        for state in states_in(model)
        for group in groups_of(state)
        for one in group.fsdp_params
        if not one.is_dtensor
    }
    for real, copy in pairs:
        hooks = {**copy._forward_pre_hooks, **copy._forward_hooks}
        slots = [key for key in vars(copy) if key.startswith("_forward_") and "_hooks" in key]
        for slot in slots if state_of(real) is not None else ():  # FSDP's own are left out
            kept = ((k, one) for k, one in vars(copy)[slot].items() if not is_fsdps(hooks[k]))
            vars(copy)[slot] = type(vars(copy)[slot])(kept)
        for cast in casts_of([real]):
            if cast.is_input:
                copy.register_forward_pre_hook(cast, with_kwargs=True)
            else:
                copy.register_forward_hook(cast)
        own: dict[str, Any] = copy._parameters
        for key, parameter in own.items():
            if is_sharded(parameter) and id(parameter) not in made:
                raise BatchError(
                    f"the frozen front cannot be skipped: {names.get(id(parameter), key)!r} is cut "
                    "by tensor parallelism, and the model would have to be proved on all ranks at "
                    "once; make a `FrozenFront` of the frozen blocks, which is whole on each rank"
                )
            own[key] = made.get(id(parameter), parameter)


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


log = logging.getLogger("egeria")

_LOOK_EVERY = 64
Front = tuple[Sequence[nn.Module], Sequence[nn.Module]]


class ShardedFront:
    """Gathers the frozen front of one model, and gives it back.

    Args:
        model: Has at least one unit of `fully_shard`; the cache stands in for its `forward`.
        ask: Tells, without the other ranks, what belongs to the front in a call with these
            arguments: the modules in it, and those that run when the last of them returns, of
            which what they own and is frozen counts.
    """

    def __init__(self, model: nn.Module, ask: Callable[[Any, Any], Front]) -> None:
        self._model, self._ask = model, ask
        self._held: dict[Any, nn.Parameter] = {}
        """FSDP's own book-keeping of each parameter of the front -> what stands in its places in a
        forward, in the dtype that FSDP would compute in."""
        self._undo = ExitStack()
        """Gives units their groups of parameters back, and groups their parameters."""
        self._handles: list[RemovableHandle] = []
        self._num_calls, self._seen = 0, ((False, False), list[tuple[int, ...]]())
        self._frozen = ""
        self._is_asked = self._is_in = False
        self.is_ready = False
        """Whether the front is whole on this rank, in the forward that runs."""
        self.why_not: BoundaryError | None = None
        """Why it could not be gathered; for its owner to take."""
        self.thawed: dict[str, Tensor] = {}
        """What was thawed since the last forward, by name; everything was given back then."""

    def follow(self, frozen: str | None) -> None:
        """Another module is the last frozen one; None: nothing is frozen."""
        if frozen is None:
            self.release()
        elif frozen != self._frozen:
            self._frozen, self._is_asked, self.is_ready, self.why_not = frozen, True, False, None
            if not self._handles:
                add = self._model.register_forward_pre_hook
                before = add(self._before, prepend=True, with_kwargs=True)
                after = self._model.register_forward_hook(self._after, always_call=True)
                self._handles = [before, after]

    def release(self) -> None:
        """Give everything back; may be called twice. Needs no other rank."""
        self._give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frozen, self._is_asked = "", False

    # ---- around every forward -----------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_in:
            return
        self._num_calls += 1
        mode = module.training, torch.is_grad_enabled()
        thawed = [one.sharded_param for one in self._held if one.sharded_param.requires_grad]
        # A write through `.data` moves no version. It is looked for where the mode changes (an
        # average of the weights is swapped in for an evaluation), and every so often: at calls that
        # are the same on all ranks.
        is_due = self._num_calls % _LOOK_EVERY == 0 or self._seen != (mode, self._versions())
        with torch.inference_mode(False), torch.no_grad():
            if self._is_asked:
                self._is_asked = False
                self._give_back()
                self._gather(args, kwargs)
                self._seen = mode, self._versions()
            elif thawed:
                names = {id(p): name for name, p in self._model.named_parameters()}
                self.thawed = {names.get(id(p), "a parameter"): p for p in thawed}
                self._frozen = ""
                self._give_back()
            elif self._held and is_due:
                self._seen = mode, self._versions()
                for one, whole in self._held.items():
                    now = one.sharded_param.full_tensor().to(whole.device, whole.dtype)
                    if not torch.equal(now, whole):
                        whole.copy_(now)
        self._is_in = bool(self._held)
        for one, whole in self._held.items():
            one._setattr_on_modules(whole)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_in:
            self._is_in = False
            for one in self._held:
                one._setattr_on_modules(one.sharded_param)

    def _versions(self) -> list[tuple[int, ...]]:
        tensors = [(one.sharded_param, one.sharded_param._local_tensor) for one in self._held]
        return [(t._version, local._version, local.data_ptr()) for t, local in tensors]

    # ---- gathering ----------------------------------------------------------------------------

    def _gather(self, args: Any, kwargs: Any) -> None:
        """Gather the front, or none of it: the same on all ranks."""
        states = states_in(self._model)
        for state in states:
            if state._is_root is None:
                state._lazy_init()  # its first forward would, which finds the front in place
        front: Front = (), ()
        with Attempt() as tried:
            for cast in casts_of([self._model]):
                if cast.is_input:
                    args, kwargs = cast(self._model, args, kwargs)
            front = self._ask(args, kwargs)
        own = {id(m) for top in front[0] for m in top.modules()}.union(map(id, front[1]))
        frozen: list[tuple[Any, Any]] = []
        for state in states:
            for group in groups_of(state):
                ours = (p for p in group.fsdp_params if not own.isdisjoint(map(id, _modules(p))))
                frozen += [(state, p) for p in ours if not p.sharded_param.requires_grad]
        self._agree([one for _, one in frozen], tried.error)
        if self.why_not is None and frozen:
            to_shards(self._model)
            self._held = {one: _whole(state, one) for state, one in frozen}
            for state in states:
                self._take(state)
            log.info("egeria: %d parameters of the front are whole on each rank", len(frozen))
        self.is_ready = self.why_not is None

    def _agree(self, parameters: list[Any], error: Exception | None) -> None:
        """Note why not, on all ranks if on one: they must ask for the same collectives."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        ours = str(error or [names.get(id(one.sharded_param)) for one in parameters])
        told = [""] * dist.get_world_size()
        dist.all_gather_object(told, ours)
        if isinstance(error, BoundaryError):
            self.why_not = error
        elif error is not None or told != [ours] * len(told):
            why = error or "the ranks could not agree on what lies before the boundary"
            self.why_not = BoundaryError.not_proved(self._frozen, str(why))

    def _take(self, state: Any) -> None:
        """Take what is held out of a unit's collectives."""
        groups = groups_of(state)
        for group in groups:
            kept = [one for one in group.fsdp_params if one not in self._held]
            if len(kept) < len(group.fsdp_params):
                self._undo.callback(set_parameters, group, group.fsdp_params)
                set_parameters(group, kept)
        if not all(group.fsdp_params for group in groups):
            self._undo.callback(set_groups, state, groups)
            set_groups(state, [group for group in groups if group.fsdp_params])

    def _give_back(self) -> None:
        self._after(self._model, None, None)
        if self._held:
            to_shards(self._model)  # else some would be whole, and those that come back would not
        self._undo.close()
        self._held, self.is_ready = {}, False


def _modules(parameter: Any) -> list[nn.Module]:
    return [parameter._module_info.module, *parameter._module_info.shared_modules]


def _whole(state: Any, parameter: Any) -> nn.Parameter:
    sharded = parameter.sharded_param
    dtype = state._mp_policy.param_dtype or sharded.dtype
    whole = sharded.full_tensor().to(state._device, dtype)
    if whole.data_ptr() == sharded._local_tensor.data_ptr():
        whole = whole.clone()
    return nn.Parameter(whole, requires_grad=False)
