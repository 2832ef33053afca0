"""The frozen front of a model that `fully_shard` has cut over ranks, whole on each of them.

While it is frozen, the front's parameters are gathered once, and every forward of the model finds
them in their places: plain tensors, the same on all ranks. No unit of the front takes part in a
collective then, so that it does not matter how many hits each rank has. Between two forwards the
model is what `fully_shard` made of it: the same DTensors stand in their places, for the optimizer,
for checkpoints, for whoever thaws them. It costs a copy of the front's weights on each rank.

All ranks have to set and lift the boundary before the same call of the model, as they have to make
the same calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria_cache.attempt import Attempt
from egeria_cache.skip.model.fsdp import (
    CastInputs,
    cast_hooks,
    groups_of,
    set_parameters,
    state_of,
    states_in,
    stripped_hooks,
)

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
        self._hooks: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        """Modules whose hooks of FSDP's are off in a forward: (module, those hooks, the others)."""
        self._taken: list[tuple[Any, list[Any]]] = []
        """(a group of parameters of which some are held, all that it had)"""
        self._groups: list[tuple[Any, list[Any]]] = []
        """(a state of which a group is held whole, all its groups)"""
        self._prefetch: list[tuple[Any, str, list[Any]]] = []
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

    @staticmethod
    def of(model: nn.Module, ask: Callable[[Any, Any], Front]) -> ShardedFront | None:
        """Return one for this model; None if nothing of it is sharded."""
        return ShardedFront(model, ask) if states_in(model) else None

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
                before = self._model.register_forward_pre_hook(
                    self._before, prepend=True, with_kwargs=True
                )
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
                self._read_again()
        if self._held:
            self._is_in = True
            for one in self._held:
                one.put(one.whole)
            self._exchange_hooks()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_in:
            self._is_in = False
            for one in self._held:
                one.put(_sharded(one))
            for owner, theirs, _ in self._hooks:
                vars(owner).update(theirs)

    def _exchange_hooks(self) -> None:
        for number, (owner, theirs, ours) in enumerate(self._hooks):
            now = {slot: vars(owner)[slot] for slot in theirs}
            if any(len(now[slot]) != len(theirs[slot]) for slot in now) or any(
                now[slot] is not theirs[slot] for slot in now
            ):  # the user has added or removed some
                casts = [hook for slot in ours.values() for hook in slot.values() if _is_ours(hook)]
                theirs, ours = now, stripped_hooks(owner, *casts)
                self._hooks[number] = owner, theirs, ours
            vars(owner).update(ours)

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
                found += [(state, one) for one in group.fsdp_params if _is_of(one, own)]
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
            self._take(state, held, modules)
        log.info("egeria: %d parameters of the frozen front are whole on each rank", len(held))

    def _asked(self, args: Any, kwargs: Any) -> tuple[Any, Any, str | None]:
        """Return what belongs to the front, or why that is not known."""
        state = state_of(self._model)
        for hook in [] if state is None else cast_hooks(state):
            if isinstance(hook, CastInputs):
                args, kwargs = hook(self._model, args, kwargs)
        with Attempt() as tried:
            return *self._ask(args, kwargs), None
        return (), (), str(tried.error)  # told by whoever asks `refused`

    def _disagreement(self, parameters: list[Any]) -> str | None:
        """Return why not, on all ranks if on one: they must ask for the same collectives."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        total = xxhash.xxh3_64()
        for one in parameters:
            total.update(names.get(id(one.sharded_param), "?").encode() + b";")
        print_ = total.intdigest() >> 2
        state = next(iter(states_in(self._model)))
        flags = [print_, -print_, self.why_not is not None]
        ours = torch.tensor(flags, device=state._device)
        dist.all_reduce(ours, dist.ReduceOp.MAX)
        high, low, failed = ours.tolist()
        if failed:
            return self.why_not or "another rank could not tell what lies before the boundary"
        if high != -low:
            return "the ranks do not agree on what lies before the boundary"
        return None

    def _take(self, state: Any, held: set[int], inside: dict[int, nn.Module]) -> None:
        """Take held parameters out of a unit's collectives."""
        groups = groups_of(state)
        is_whole = all(id(one) in held for group in groups for one in group.fsdp_params)
        if is_whole and all(id(module) in inside for module in state._modules):
            casts = cast_hooks(state)
            for module in state._modules:
                slots = stripped_hooks(module, *casts)
                self._hooks.append((module, {slot: vars(module)[slot] for slot in slots}, slots))
            for other in states_in(self._model):
                for slot in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
                    listed = getattr(other, slot)
                    if state in listed:
                        self._prefetch.append((other, slot, listed))
                        setattr(other, slot, [one for one in listed if one is not state])
            return
        for group in groups:
            kept = [one for one in group.fsdp_params if id(one) not in held]
            if len(kept) < len(group.fsdp_params):
                self._taken.append((group, group.fsdp_params))
                set_parameters(group, kept)
        if not all(group.fsdp_params for group in groups):
            self._groups.append((state, groups))
            left = [group for group in groups if group.fsdp_params]
            if hasattr(state, "_fsdp_param_groups"):
                state._fsdp_param_groups = left
            else:
                state._fsdp_param_group = None

    def _give_back(self) -> None:
        if self._is_in:
            self._after(self._model, None, None)
        for state, groups in reversed(self._groups):
            if hasattr(state, "_fsdp_param_groups"):
                state._fsdp_param_groups = groups
            else:
                state._fsdp_param_group = groups[0]
        if self._taken:
            for module in {id(m): m for s in states_in(self._model) for m in s._modules}.values():
                module.reshard()  # else some would be whole, and those that come back would not
        for group, parameters in reversed(self._taken):
            set_parameters(group, parameters)
        for state, slot, listed in reversed(self._prefetch):
            setattr(state, slot, listed)
        self._held, self._hooks, self._taken, self._groups = [], [], [], []
        self._prefetch = []
        self._is_gathered = False

    def _were_written(self, mode: tuple[bool, bool]) -> bool:
        """Whether the shards were written to, on all ranks: a checkpoint was loaded, say.

        A write through `.data` moves no version. It is looked for where the mode changes (an
        average of the weights is swapped in for an evaluation), and every so often: at calls that
        are the same on all ranks.
        """
        self._num_calls += 1
        is_due = mode != self._mode or self._num_calls % _LOOK_EVERY == 0
        self._mode = mode
        if self._state() != self._seen:
            return True
        return is_due and not torch.equal(self._some(), self._seen_values)

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

    def _read_again(self) -> None:
        for one in self._held:
            one.whole.copy_(_sharded(one).full_tensor())
        self._see()


def _sharded(one: _Held) -> Any:
    return one.parameter.sharded_param


def _is_ours(hook: Any) -> bool:
    return type(hook).__module__ == "egeria_cache.skip.model.fsdp"


def _places(parameter: Any) -> list[tuple[nn.Module, str]]:
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def _is_of(parameter: Any, modules: dict[int, nn.Module]) -> bool:
    return any(id(module) in modules for module, _ in _places(parameter))


def _whole(state: Any, parameter: Any) -> nn.Parameter:
    sharded = parameter.sharded_param
    dtype = state._mp_policy.param_dtype or sharded.dtype
    whole = sharded.full_tensor().to(state._device, dtype)
    if whole.data_ptr() == sharded._local_tensor.data_ptr():
        whole = whole.clone()
    return nn.Parameter(whole, requires_grad=False)
