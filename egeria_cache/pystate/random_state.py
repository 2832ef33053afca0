"""The global random generators, all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from egeria_cache.device import random_states, seed_everywhere, set_random_states
from egeria_cache.pystate.foreign import SINGLES
from egeria_cache.pystate.places import Generator

_OF_THE_HOST = tuple(Generator("", single) for single in SINGLES)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that a forward may draw from."""

    host: tuple[bytes, ...]
    device: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """Copy the present states."""
        return cls(tuple(one.read(one.where) for one in _OF_THE_HOST), random_states())

    @staticmethod
    def seed(number: int) -> None:
        """Begin all of them anew, somewhere else for every number."""
        seed_everywhere(number)
        for one in _OF_THE_HOST:
            one.seed(one.where, number)

    def restore(self) -> None:
        """Make them the present ones."""
        for one, state in zip(_OF_THE_HOST, self.host, strict=True):
            one.write(one.where, state)
        set_random_states(self.device)

    def equals(self, other: RandomState) -> bool:
        """Whether the same numbers would be drawn."""
        return self.host == other.host and all(map(torch.equal, self.device, other.device))
