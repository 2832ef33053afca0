"""One module call of the prefix, and what becomes of it on a hit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from egeria_cache.skip.serve.placeholder import Escape, Source
from egeria_cache.skip.serve.trace import Draw

__all__ = ["Slot", "StepPlan", "Unavailable"]

Slot = tuple[int, int]
"""(step, leaf of its output)"""


class Unavailable:
    """An object that a skipped module would have made, and whose content nobody may read."""

    def __init__(self, sources: frozenset[Source]) -> None:
        self.__dict__["_sources"] = sources

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Escape.at(self._sources, f".{name}")

    def _refuse(self, *args: Any) -> NoReturn:
        raise Escape.at(self._sources, "the caller")

    __getitem__ = __iter__ = __len__ = __bool__ = _refuse


@dataclass(slots=True)
class StepPlan:
    """One module call of the prefix."""

    module: nn.Module
    name: str
    spec: TreeSpec
    leaves: list[Any]
    """Per leaf of the output: a TensorSpec, or the plain value it always has."""
    run: bool = False
    """Not skipped: it costs little, is trained, or has hooks of the user inside."""
    real: bool = False
    """Whether it must be given real inputs: somebody reads what goes on inside."""
    cached: set[int] = field(default_factory=set)
    """Leaves of the output that are stored with the cut."""
    constants: dict[int, Tensor] = field(default_factory=dict)
    """Leaves that cross the boundary but do not depend on the samples."""
    draws: list[Draw] = field(default_factory=list)
    """Random numbers that it draws to no effect, drawn again so that later ones are the same."""
    single: bool = False
    """Whether the output is one leaf."""
    _sources: list[frozenset[Source]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single = self.spec.is_leaf()

    def sources(self, index: int) -> list[frozenset[Source]]:
        """Name the leaves of the output as step `index`."""
        if not self._sources:
            self._sources = [
                frozenset({Source("step", self.name, index, j)}) for j in range(len(self.leaves))
            ]
        return self._sources
