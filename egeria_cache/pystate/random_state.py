"""The global random generators, all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.device import random_states, seed_everywhere, set_random_states


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that a forward may draw from."""

    cpu: Tensor
    device: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """Copy the present states."""
        numpy = np.random.get_state()
        return cls(torch.get_rng_state(), random_states(), random.getstate(), numpy)

    @staticmethod
    def seed(number: int) -> None:
        """Begin all of them anew, somewhere else for every number."""
        seed_everywhere(number)
        random.seed(number)
        np.random.seed(number)

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.cpu)
        set_random_states(self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def equals(self, other: RandomState) -> bool:
        """Whether the same numbers would be drawn."""
        return (
            all(map(torch.equal, (self.cpu, *self.device), (other.cpu, *other.device)))
            and self.python == other.python
            and self.numpy[2:] == other.numpy[2:]
            and np.array_equal(self.numpy[1], other.numpy[1])
        )
