"""Freezes a prefix so that nothing moves in it, and gives it back as it was.

Frozen means three things: no gradient is asked for (`requires_grad`), none is lying around (`grad`
is None: with a zero tensor there, momentum and weight decay would still move the weight), and
BatchNorm and Dropout are in inference mode through every `model.train()`, also dropout in the code
of a module around the boundary, as far as it runs before it. The optimizer's parameter
groups are never touched, so its state and the learning-rate schedule go on as if nothing happened.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from egeria_cache import FrozenPrefix


class Freezer:
    """Owns what it froze. Call between `optimizer.step()` and the next forward.

    Args:
        model: What is trained on beside what is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: dict[int, Tensor] = {}
        self._prefix = FrozenPrefix(model=model)

    def freeze(self, parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
        """Freeze these too; what is frozen already stays so."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._parameters[id(parameter)] = parameter
                parameter.requires_grad_(False)
                parameter.grad = None
        self._prefix.extend(modules)

    def freeze_around(self, boundary: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Freeze the own code of these modules, up to where `boundary` returns in them."""
        self._prefix.extend_around(boundary, modules)

    def release(self) -> None:
        """Make all of it trainable again and restore the modules' modes; idempotent."""
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._parameters.clear()
        self._prefix.release()
