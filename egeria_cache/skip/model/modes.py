"""What inference mode of the frozen front changes, said once."""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from egeria_cache.skip.model.frozen import FrozenPrefix, mode_asked_for

__all__ = ["tell_modes"]

log = logging.getLogger("egeria.modes")


def tell_modes(model: nn.Module, held: FrozenPrefix, *, drops: bool) -> bool:
    """Say so if modules of the front that were in training mode do something else now.

    Args:
        model: The model, as its user names its parts.
        held: The front.
        drops: Whether its dropout layers stay active.

    Returns:
        Whether there was something to say.
    """
    changed = [m for m in held if mode_asked_for(m) and _differs(m, drops=drops)]
    if not changed:
        return False
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module) for module in held}
    own = [name for key, name in names.items() if key in inside]
    tops = _tops(own, [names[id(module)] for module in changed if id(module) in names])
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in changed))
    log.warning(
        "the frozen front runs in inference mode from now on, whatever model.train() says: %d of "
        "its modules (%s) would do something else in training mode. A run without a cache trains "
        "the same if it has this line here: egeria_cache.FrozenPrefix(map(model.get_submodule, "
        "%s))",
        len(changed), kinds, tops,
    )  # fmt: skip
    return True


def _differs(module: nn.Module, *, drops: bool) -> bool:
    """Whether a module itself does something else in training mode."""
    if isinstance(module, _NormBase):
        return module.track_running_stats
    if isinstance(module, _DropoutNd):
        return module.p > 0 and not drops
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return False


def _tops(held: list[str], changed: list[str]) -> list[str]:
    """Return the outermost held modules in which something changed."""
    outermost = [
        name for name in held if not any(other != name and _within(name, other) for other in held)
    ]
    return [top for top in outermost if any(_within(name, top) for name in changed)]


def _within(name: str, outer: str) -> bool:
    return name == outer or outer == "" or name.startswith(f"{outer}.")
