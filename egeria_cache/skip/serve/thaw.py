"""Notice that a part of the frozen front is to be trained again, or is frozen once more."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from torch import Tensor, nn

from egeria_cache.skip.model.frozen import FrozenPrefix
from egeria_cache.skip.serve.trace import Named

_requires_grad = attrgetter("requires_grad")


_MAX_WAIT = 1024


class ThawWatch:
    """Watches `requires_grad` of what is frozen: 40 ns a tensor and batch."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[str, Tensor]] = {}
        self._tensors: list[Tensor] = []
        self._thawed: list[Tensor] = []
        self._wait = self._num_still = 0

    def watch(self, model: nn.Module, held: FrozenPrefix, reads: Iterable[Named] = ()) -> None:
        """Watch the frozen parameters of all held modules, and what code around them reads."""
        found = [
            (f"{name}.{key}" if name else key, tensor)
            for name, module in model.named_modules()
            if module in held
            for key, tensor in module._parameters.items()
            if tensor is not None
        ]
        found += [(name, tensor) for name, _, tensor in reads]
        self._watched = {id(t): (name, t) for name, t in found if not t.requires_grad}
        self._tensors = [tensor for _, tensor in self._watched.values()]

    def is_due(self) -> bool:
        """Whether a tensor is to be trained from now on."""
        return any(map(_requires_grad, self._tensors))

    def thawed(self) -> str | None:
        """Name a tensor that is to be trained from now on; it is no longer watched then."""
        if not any(map(_requires_grad, self._tensors)):
            return None
        moved = [tensor for tensor in self._tensors if tensor.requires_grad]
        name = self._watched[id(moved[0])][0]
        self._thawed += moved
        self._tensors = [tensor for tensor in self._tensors if not tensor.requires_grad]
        # Who thaws and freezes in turns (a generator and its critic) is waited for ever longer.
        self._wait, self._num_still = min(2 * self._wait + 1, _MAX_WAIT), 0
        return name

    def note(self, tensors: Iterable[Tensor]) -> None:
        """These, which stand elsewhere meanwhile, were thawed."""
        self._thawed += tensors
        self._wait, self._num_still = min(2 * self._wait + 1, _MAX_WAIT), 0

    def is_frozen_again(self) -> bool:
        """Whether nothing of what was thawed has been trained for a while."""
        if any(map(_requires_grad, self._thawed)):
            self._num_still = 0
            return False
        self._num_still += 1
        return self._num_still > self._wait

    def forget(self) -> None:
        """What was thawed before does not matter any more."""
        self._thawed = []
