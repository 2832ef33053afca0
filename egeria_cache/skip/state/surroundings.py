"""What copies of a model share with it, put back where a dry run has moved it.

Parameters with their gradients, globals, class attributes, global hooks, random generators.

A forward may write to parameters: averages of another encoder (MoCo, BYOL), noise, rows that are
normalised, `loss.backward()`. A dry run runs it many times, and the loop once. What else its code
may touch outside of the model is found by what that reads and assigns, through the helpers that it
calls, as far as the code is the user's own: what libraries keep in their globals is their affair.
The model's own state is not among it: a dry run runs on a copy (`prove/model_copy.py`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from egeria_cache import pystate
from egeria_cache.attempt import without_modes
from egeria_cache.device import room
from egeria_cache.pystate import CODE, MODELS, Names, OfClass, RandomState, Reach, Snapshot
from egeria_cache.skip.model.calls import ForwardSlot
from egeria_cache.skip.state.watch import GLOBAL_HOOKS, HOOKS, watched_attributes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class World:
    """All that copies of a model share with it, as it was at one moment."""

    generators: RandomState
    outside: Snapshot

    def restore(self, *, for_a_copy: bool = False) -> None:
        """Make it the present one; iterators can only be as they were for a copy of the model."""
        self.outside.put_back(copies=for_a_copy)
        self.generators.restore()


def _global_hooks() -> list[Any]:
    return [hook for hooks in GLOBAL_HOOKS for hook in hooks.values()]


class Surroundings:
    """Finds what the code of a model names.

    Args:
        model: The model.
        shared: Modules that are not copied for a dry run.
        given: Code that it is called with.
    """

    def __init__(
        self, model: nn.Module, shared: Iterable[nn.Module] = (), given: Iterable[Any] = ()
    ) -> None:
        self._shared, self._own = list(shared), frozenset(map(id, model.modules()))
        self._of_modules: list[Any] = [*given]
        """Their hooks, what they hold that is not copied with them, and what they are given."""
        code = _global_hooks()
        for module in model.modules():
            own = module.__dict__
            held = watched_attributes(module).values()
            code += [type(module), *held]
            here = (own[name] for name in pystate.entries(module) if name in own)
            code += [inspect.unwrap(f, stop=lambda f: not isinstance(f, ForwardSlot)) for f in here]
            for name in (*HOOKS, "_backward_hooks", "_backward_pre_hooks"):
                self._of_modules += own.get(name, {}).values()
            found = (one for value in held for one in pystate.found_in(value))
            self._of_modules += (
                m for m in found if isinstance(m, nn.Module) or pystate.is_put_back(m)
            )
        seen = Snapshot((("", one) for one in [*code, *self._of_modules]), reach=CODE)
        self._places = [one for one in seen.places if isinstance(one, Names | OfClass)]
        self._functions = [one for one in seen.alive.values() if isinstance(one, FunctionType)]

    def now(self) -> World:
        """Remember what they hold at present, and the random generators."""
        return World(RandomState.now(), self._snapshot([os.environ, *self._shared], [], MODELS))

    def but_modules(self, moving: Sequence[tuple[nn.Module, str]]) -> Snapshot:
        """Remember what code of the model may touch outside of it, what its hooks hold, and some
        attributes of modules.
        """
        own = [Names("", vars(module), (key,)) for module, key in moving]
        return self._snapshot([], own, Reach(self._is_beyond, follows_code=False))

    def _is_beyond(self, value: Any) -> bool:
        """Whether it is a module of the model, or what no forward of a frozen front writes to."""
        return isinstance(value, nn.Parameter) or id(value) in self._own or MODELS.lets_be(value)

    def _snapshot(self, roots: list[Any], own: list[Any], reach: Reach) -> Snapshot:
        roots = [*roots, *self._functions, *_global_hooks(), *self._of_modules]
        return Snapshot((("", root) for root in roots), [*self._places, *own], reach, self._own)


class Weights:
    """What some parameters hold now. Takes as much memory as they do, for as long as it lives."""

    def __init__(self) -> None:
        self.looks_closely = True
        """Whether contents are compared where no version counter has moved (`p.data.mul_()`): in
        the first runs; later of what was written so in one of them."""
        self._kept: dict[int, tuple[str, _Held, _Held | None]] = {}
        self._room: dict[torch.device, int] = {}

    def keep(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Remember these, too; those that lie elsewhere (cut over ranks, made later) are left."""
        for name, tensor in named:
            if id(tensor) in self._kept or not _is_plain(tensor) or tensor.is_inference():
                continue
            grad = None if tensor.grad is None else _Held(tensor.grad, self._room)
            self._kept[id(tensor)] = name, _Held(tensor, self._room), grad

    def put_back(self, *, wholly: bool = False) -> dict[int, str]:
        """Put back what differs; return id -> name of what did.

        Args:
            wholly: Whether to compare all contents.
        """
        moved = {}
        closely = wholly or self.looks_closely
        # Whoever watches the run (`trace.py`) or computes in float64 has no part in this.
        # Nor have classes of tensors, where no mode is on.
        with (
            torch._C.DisableTorchFunction(), without_modes(), torch.inference_mode(False),
            torch.no_grad(),
        ):  # fmt: skip
            for key, (name, held, grad) in self._kept.items():
                tensor = held.tensor
                if held.put_back(closely):
                    moved[key] = name
                if tensor.requires_grad is not held.requires_grad:
                    tensor.requires_grad_(held.requires_grad)
                before = None if grad is None else grad.tensor
                if has_another := tensor.grad is not before:
                    tensor.grad = before
                if (grad and grad.put_back(closely)) or has_another:
                    moved.setdefault(key, f"{name}.grad")
        return moved


class _Held:
    """One tensor: the memory that it lies in, and a copy of that where there is room."""

    def __init__(self, tensor: Tensor, rooms: dict[torch.device, int]) -> None:
        self.tensor, self.requires_grad = tensor, tensor.requires_grad
        self._data = tensor.data
        self._place = _place(self._data)
        self._copy = _copied(self._data, rooms) if _is_plain(tensor) else None
        self._is_written_unseen = False
        self._version = tensor._version
        self._preserved: Any = torch.autograd._unsafe_preserve_version_counter(tensor)

    def put_back(self, closely: bool) -> bool:
        """Put it back; return whether it was moved. `closely`: also where no version has moved."""
        was_replaced = _place(self.tensor) != self._place
        was_written = self.tensor._version != self._version
        if was_replaced:
            self.tensor.data = self._data
        closely |= was_written or self._is_written_unseen
        if self._copy is not None and closely:
            copy, had_version = self._copy.to(self._data.device), was_written
            was_written = not torch.equal(bits(self._data), bits(copy))
            if was_written:
                self._data.copy_(copy)
                self._is_written_unseen |= not had_version
        if self.tensor._version != self._version:
            self._preserved.__exit__(None, None, None)
        return was_replaced or was_written


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_dense and not (tensor.is_meta or tensor.is_quantized or is_lazy(tensor))


def _place(data: Tensor) -> tuple[Any, ...]:
    if data.layout != torch.strided:
        return (data.layout, data.shape)
    return (data.data_ptr(), data.device, data.dtype, data.shape, data.stride())


def bits(data: Tensor) -> Tensor:
    """Return it as integers: what is not a number is itself."""
    data = data.resolve_conj().resolve_neg()
    data = torch.view_as_real(data) if data.is_complex() else data
    return data.view(_BITS[data.element_size()])


def _copied(data: Tensor, rooms: dict[torch.device, int]) -> Tensor | None:
    """Copy it where it lies, or on the host; None if there is no room on either."""
    for device in (data.device, torch.device("cpu")):
        left = rooms[device] if device in rooms else _room(device)
        rooms[device] = left - data.nbytes
        if left >= data.nbytes:
            return data.to(device, copy=True)
        rooms[device] = left
    return None


def _room(device: torch.device) -> int:
    available: int = psutil.virtual_memory().available
    return available // 2 if device.type == "cpu" else room(device) or 0
