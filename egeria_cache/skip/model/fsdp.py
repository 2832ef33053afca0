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
import xxhash
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from egeria_cache.attempt import Attempt

_HOOKS = (
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
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    home = getattr(hook if owner is None else type(owner), "__module__", None) or ""
    return str(home).startswith(_HOME)


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


def cast_hooks(state: Any) -> list[Cast]:
    """Return hooks that cast as a unit's own do; none without mixed precision."""
    policy = state._mp_policy
    given = policy.param_dtype if policy.cast_forward_inputs else None
    pairs = ((given, True), (policy.output_dtype, False))
    return [Cast(dtype, is_input) for dtype, is_input in pairs if dtype is not None]


def casts_of(modules: Iterable[nn.Module]) -> list[Cast]:
    """Return hooks that cast as those of the units among some modules do."""
    return [cast for state in map(state_of, modules) if state for cast in cast_hooks(state)]


def make_local(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Let copies of sharded modules run without the other ranks, on made-up weights.

    A dry run looks at how values travel, not at what they are: any weights will do as long as two
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
        hooks = {**copy._forward_pre_hooks, **copy._forward_hooks}
        for slot in _HOOKS:  # FSDP's own are left out
            kept = ((k, one) for k, one in vars(copy)[slot].items() if not is_fsdps(hooks[k]))
            vars(copy)[slot] = type(vars(copy)[slot])(kept)
        for cast in casts_of([real]):
            if cast.is_input:
                copy.register_forward_pre_hook(cast, with_kwargs=True)
            else:
                copy.register_forward_hook(cast)
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


log = logging.getLogger("egeria")

_LOOK_EVERY = 64
_SAMPLED = 16
Front = tuple[Sequence[nn.Module], Sequence[nn.Module]]


@dataclass(slots=True)
class _Held:
    """One parameter of the front."""

    parameter: Any
    """FSDP's own book-keeping of it."""
    places: list[tuple[nn.Module, str]]
    whole: nn.Parameter
    """What stands there in a forward, in the dtype that FSDP would compute in."""

    def put(self, value: Any) -> None:
        for module, key in self.places:
            module._parameters[key] = value


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
        self._held: list[_Held] = []
        self._undo = ExitStack()
        """Gives units their groups of parameters back, and groups their parameters."""
        self._handles: list[RemovableHandle] = []
        self._seen: list[tuple[int, int, int]] = []
        self._seen_values = torch.empty(0)
        self._num_calls, self._mode = 0, (False, False)
        self._frozen: str | None = None
        self._is_asked = False
        self._is_in = self._is_gathered = False
        self.thawed: list[Tensor] = []
        """What was thawed since the last forward; everything was given back then."""
        self.thawed_name = ""
        """Of the first of them."""
        self.why_not: str | None = None
        """Why the front cannot be gathered."""

    @property
    def is_ready(self) -> bool:
        """Whether the front is whole on this rank, in the forward that runs."""
        return self._is_gathered and not self._is_asked and self.why_not is None

    def follow(self, frozen: str | None) -> None:
        """Another module is the last frozen one; None: nothing is frozen."""
        if frozen is None:
            self.release()
        elif frozen != self._frozen:
            self._is_asked, self.why_not = True, None
            if not self._handles:
                add = self._model.register_forward_pre_hook
                before = add(self._before, prepend=True, with_kwargs=True)
                after = self._model.register_forward_hook(self._after, always_call=True)
                self._handles = [before, after]
        self._frozen = frozen

    def refused(self) -> str | None:
        """Return why the front cannot be gathered, once."""
        why, self.why_not = self.why_not, None
        self._is_gathered = self._is_gathered and why is None
        return why

    def release(self) -> None:
        """Give everything back; may be called twice. Needs no other rank."""
        self._give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frozen, self._is_asked = None, False

    # ---- around every forward -----------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_in:
            return
        mode = module.training, torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            if self._is_asked:
                self._is_asked = False
                self._give_back()
                self._gather(args, kwargs)
                self._is_gathered = True
            thawed = [one for one in map(_sharded, self._held) if one.requires_grad]
            if thawed:
                self.thawed = thawed
                names = {id(p): name for name, p in self._model.named_parameters()}
                self.thawed_name = names.get(id(thawed[0]), "a parameter")
                self._frozen = None
                self._give_back()
            elif self._held and self._were_written(mode):
                for one in self._held:
                    one.whole.copy_(_sharded(one).full_tensor())
                self._see()
        if self._held:
            self._is_in = True
            for one in self._held:
                one.put(one.whole)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_in:
            self._is_in = False
            for one in self._held:
                one.put(_sharded(one))

    # ---- gathering ----------------------------------------------------------------------------

    def _gather(self, args: Any, kwargs: Any) -> None:
        """Gather the front, or none of it: the same on all ranks."""
        for state in states_in(self._model):
            if state._is_root is None:
                state._lazy_init()  # its first forward would, which finds the front in place
        inside, around, self.why_not = self._asked(args, kwargs)
        modules = {id(m): m for top in inside for m in top.modules()}
        own = {**modules, **{id(m): m for m in around}}
        found: list[tuple[Any, Any]] = []
        for state in states_in(self._model):
            for group in groups_of(state):
                ours = (p for p in group.fsdp_params if any(id(m) in own for m, _ in _places(p)))
                found += [(state, one) for one in ours]
        frozen = [(s, one) for s, one in found if not one.sharded_param.requires_grad]
        self.why_not = self._disagreement([one for _, one in frozen]) or self.why_not
        if self.why_not is not None or not frozen:
            return
        for module in {id(m): m for state, _ in frozen for m in state._modules}.values():
            module.reshard()
        for state, one in frozen:
            self._held.append(_Held(one, _places(one), _whole(state, one)))
        self._see()
        held = {id(one) for _, one in frozen}
        for state in {id(s): s for s, _ in frozen}.values():
            self._take(state, held)
        log.info("egeria: %d parameters of the frozen front are whole on each rank", len(held))

    def _asked(self, args: Any, kwargs: Any) -> tuple[Any, Any, str | None]:
        """Return what belongs to the front, or why that is not known."""
        state = state_of(self._model)
        for hook in [] if state is None else cast_hooks(state):
            if hook.is_input:
                args, kwargs = hook(self._model, args, kwargs)
        with Attempt() as tried:
            return *self._ask(args, kwargs), None
        return (), (), str(tried.error)  # told by whoever asks `refused`

    def _disagreement(self, parameters: list[Any]) -> str | None:
        """Return why not, on all ranks if on one: they must ask for the same collectives."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        named = ";".join(names.get(id(one.sharded_param), "?") for one in parameters).encode()
        print_ = xxhash.xxh3_64_intdigest(named) >> 2
        state = next(iter(states_in(self._model)))
        ours = torch.tensor([print_, -print_, self.why_not is not None], device=state._device)
        dist.all_reduce(ours, dist.ReduceOp.MAX)
        high, low, failed = ours.tolist()
        if failed:
            return self.why_not or "another rank could not tell what lies before the boundary"
        return None if high == -low else "the ranks do not agree on what lies before the boundary"

    def _take(self, state: Any, held: set[int]) -> None:
        """Take held parameters out of a unit's collectives."""
        groups = groups_of(state)
        for group in groups:
            kept = [one for one in group.fsdp_params if id(one) not in held]
            if len(kept) < len(group.fsdp_params):
                self._undo.callback(set_parameters, group, group.fsdp_params)
                set_parameters(group, kept)
        if not all(group.fsdp_params for group in groups):
            self._undo.callback(set_groups, state, groups)
            set_groups(state, [group for group in groups if group.fsdp_params])

    def _give_back(self) -> None:
        if self._is_in:
            self._after(self._model, None, None)
        if self._held:
            for module in {id(m): m for s in states_in(self._model) for m in s._modules}.values():
                module.reshard()  # else some would be whole, and those that come back would not
        self._undo.close()
        self._held, self._is_gathered = [], False

    def _were_written(self, mode: tuple[bool, bool]) -> bool:
        """Whether the shards were written to, on all ranks: a checkpoint was loaded, say.

        A write through `.data` moves no version. It is looked for where the mode changes (an
        average of the weights is swapped in for an evaluation), and every so often: at calls that
        are the same on all ranks.
        """
        self._num_calls += 1
        is_due = mode != self._mode or self._num_calls % _LOOK_EVERY == 0
        self._mode = mode
        is_odd = self._state() != self._seen
        return is_odd or (is_due and not torch.equal(self._some(), self._seen_values))

    def _state(self) -> list[tuple[int, int, int]]:
        tensors = [(_sharded(one), _sharded(one)._local_tensor) for one in self._held]
        return [(t._version, local._version, local.data_ptr()) for t, local in tensors]

    def _some(self) -> Tensor:
        """Return a few elements of each shard, float64."""
        locals_ = [_sharded(one)._local_tensor.detach().flatten() for one in self._held]
        some = [part[:: max(1, len(part) // _SAMPLED)][:_SAMPLED].double() for part in locals_]
        return torch.cat(some)

    def _see(self) -> None:
        self._seen, self._seen_values = self._state(), self._some()


def _sharded(one: _Held) -> Any:
    return one.parameter.sharded_param


def _places(parameter: Any) -> list[tuple[nn.Module, str]]:
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def _whole(state: Any, parameter: Any) -> nn.Parameter:
    sharded = parameter.sharded_param
    dtype = state._mp_policy.param_dtype or sharded.dtype
    whole = sharded.full_tensor().to(state._device, dtype)
    if whole.data_ptr() == sharded._local_tensor.data_ptr():
        whole = whole.clone()
    return nn.Parameter(whole, requires_grad=False)
