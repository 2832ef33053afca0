"""The states of the accelerator's random generators. The host's own are whoever's who asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from egeria_cache.device.kinds import initialised_module


def random_states() -> tuple[Tensor, ...]:
    """Copy the states of all devices' generators; nothing where none is used, or none has any."""
    module: Any = initialised_module()
    try:
        if hasattr(module, "get_rng_state_all"):
            return tuple(module.get_rng_state_all())
        if hasattr(module, "get_rng_state"):
            return (module.get_rng_state(),)
    except Exception:  # of any kind: it has none, and draws from the host's
        pass
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
