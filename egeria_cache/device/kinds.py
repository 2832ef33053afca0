"""Which devices there are, what they are called, what PyTorch names after them, and the states of
their random generators. The host's own are whoever's who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_NAMED = ("cuda", "xpu", "mps", "mtia", "hpu", "ipu", "maia")
"""Kinds after which `Tensor` has methods and flags whether or not there is such a device."""

FOREIGN_PACKAGES = ("torch.accelerator", *(f"torch.{kind}" for kind in _NAMED))
"""Packages whose objects are no part of a model's state."""

LEAF_FLAGS = tuple(
    flag for flag in ("is_cpu", *(f"is_{kind}" for kind in _NAMED)) if hasattr(Tensor, flag)
)
"""Properties of a tensor that say where it is."""


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that can be used, without an index; None: there is none."""
    kind = torch.accelerator.current_accelerator()
    try:
        return kind if torch.accelerator.is_available() else None
    except (RuntimeError, AttributeError):  # its module does not say
        return kind


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return accelerator() or torch.device("cpu")


def located(device: torch.device) -> torch.device:
    """Return the device that tensors are on which were moved there: never without an index."""
    if device.index is not None or not runs_late(device):
        return torch.device("cpu") if device.type == "cpu" else device
    kind = accelerator()
    is_ours = kind is not None and kind.type == device.type
    return torch.device(device.type, current_index() if is_ours else 0)


def device_of(model: nn.Module) -> torch.device:
    """Where the model is, as far as it is on this rank; the CPU if it has no tensor."""
    tensors = chain(model.parameters(), model.buffers())
    tensor = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return torch.device("cpu") if tensor is None else tensor.device


def current_index() -> int:
    """Return the number of the accelerator that this thread works with."""
    try:
        return max(0, torch.accelerator.current_device_index())
    except RuntimeError:  # it has but one
        return 0


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the calling thread's current one inside the block.

    The one before is set again only if it is in use by this process: to set a device begins a
    context there.
    """
    return torch.accelerator.device_index(device.index)


def runs_late(device: torch.device | str) -> bool:
    """Whether what a device is given to do may run after the call that gave it has returned.

    To read a value from it makes the host wait then, and time is not to be taken without waiting.
    """
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    return kind not in ("cpu", "meta")


def module_of(device: torch.device | str) -> ModuleType | None:
    """Return PyTorch's module for a kind of device; None where there is none."""
    try:
        module: ModuleType = torch.get_device_module(device)
    except (RuntimeError, AttributeError):
        return None
    return module


def initialised_module() -> ModuleType | None:
    """Return the module of the accelerator that is in use in this process; None without one.

    A forked child of a process that used it cannot.
    """
    kind = accelerator()
    module = None if kind is None else module_of(kind)
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return None
    return None if getattr(module, "_is_in_bad_fork", lambda: False)() else module


def synchronize() -> None:
    """Wait until the accelerator, if it is used, has done all it was given to do."""
    module = initialised_module()
    if module is None:
        return
    try:
        torch.accelerator.synchronize()
    except RuntimeError:  # it cannot be asked so
        getattr(module, "synchronize", lambda: None)()


def device_name(device: torch.device) -> str | None:
    """Return what a device is called by its maker; its kind where nobody says; None for the CPU."""
    if not runs_late(device):
        return None
    name = getattr(module_of(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of devices for which autocast may be on."""
    kind = torch.accelerator.current_accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute on a device in the numbers' own precision inside the block."""
    try:
        return torch.autocast(device.type, enabled=False)
    except (RuntimeError, AssertionError):  # a device that has no autocast
        return nullcontext()


def moved_to(func: Callable[..., Any]) -> str | None:
    """Return the kind of device that a method of `Tensor` is named after; None for others.

    `x.cuda()` and its like: a device that is registered from outside gives `Tensor` one, too.
    """
    name = getattr(func, "__name__", "")
    kind = torch.accelerator.current_accelerator() if name not in _NAMED else None
    if name not in _NAMED and (kind is None or name != kind.type):
        return None
    return name if getattr(Tensor, name, None) is func else None


def random_states() -> tuple[Tensor, ...]:
    """Copy the states of all devices' generators; nothing where none is used, or none has any."""
    module: Any = initialised_module()
    with suppress(Exception):  # of any kind: it has none, and draws from the host's
        if hasattr(module, "get_rng_state_all"):
            return tuple(module.get_rng_state_all())
        if hasattr(module, "get_rng_state"):
            return (module.get_rng_state(),)
    return ()


def seed_everywhere(number: int) -> None:
    """Begin the generators of the host and of the devices in use anew.

    `torch.manual_seed` also notes the seed, with a stack of frames, for every kind of device that
    is not in use: a hundred times as long, and more in deeper calls.
    """
    torch.default_generator.manual_seed(number)
    module: Any = initialised_module()
    for name in ("manual_seed_all", "manual_seed"):
        if hasattr(module, name):
            getattr(module, name)(number)
            return


def set_random_states(states: Sequence[Tensor]) -> None:
    """Put back what `random_states` gave. States of other devices than there are now are left."""
    module = initialised_module()
    if module is None or not states or len(states) != len(random_states()):
        return
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(list(states))
    elif hasattr(module, "set_rng_state"):
        module.set_rng_state(states[0])


def fp32_precision() -> Any:
    """Return how exactly kernels multiply numbers of 32 bits: "highest", if not told otherwise."""
    with suppress(RuntimeError):  # it was told by backend
        return torch.get_float32_matmul_precision()
    return _BY_BACKEND(torch.backends)


_BY_BACKEND = attrgetter("mkldnn.matmul.fp32_precision", "cuda.matmul.fp32_precision")
