"""The global generators of random numbers: Python's, NumPy's, torch's, and those of devices."""

from __future__ import annotations

import ctypes
import pickle
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.device import random_states, seed_devices, set_random_states

_BYTES = 4 * (624 + 1)
"""Of a Mersenne twister: its words, and the position in them."""


class _NumPy:
    """NumPy's global generator, that of `np.random.rand` and its like, whatever its kind.

    `np.random.get_state` takes 30 us; the words of a Mersenne twister, which any draw but that of
    a normal deviate that is kept moves, half a microsecond.
    """

    def __init__(self) -> None:
        self._words = b""
        """When it was last known to keep no deviate: only a draw that moves them makes one, or who
        puts a state back."""

    def _read(self) -> bytes:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        is_twister = type(generator) is np.random.MT19937
        return ctypes.string_at(generator.ctypes.state_address, _BYTES) if is_twister else b""

    def look(self) -> bytes:
        words = self._read()
        if not words or words != self._words:
            state = np.random.get_state(legacy=False)
            if not words or state["has_gauss"]:
                return pickle.dumps(state)
            self._words = words
        return words

    def whole(self) -> bytes:
        self._words = b""
        return self.look()

    @torch._disable_dynamo  # where compiled code has a sample loaded, it is no part of that
    def put_back(self, look: bytes) -> None:
        if len(look) != _BYTES:
            np.random.set_state(pickle.loads(look))
            self._words = b""  # with a deviate, perhaps, that was taken since
            return
        words = np.frombuffer(look, np.uint32)
        np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))
        self._words = look

    def seed(self, seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)
        self._words = self._read()


class _Torch:
    """torch's default generator of the CPU."""

    def look(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    whole = look

    def put_back(self, look: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(look), dtype=torch.uint8))

    def seed(self, seed: int) -> None:
        # Not `torch.manual_seed`: it also reaches for every accelerator's generator, and costs
        # about fifty times as much.
        torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


_PYTHON = SimpleNamespace(
    look=random.getstate, whole=random.getstate, put_back=random.setstate, seed=random.seed
)
GENERATORS: dict[str, Any] = {"random": _PYTHON, "numpy": _NumPy(), "torch": _Torch()}
"""What `look` gives of one moves whenever it is drawn from; once that is `put_back`, the same is
drawn again. `whole` sees as well that a state was put back. `seed` takes 64 bits."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that a forward may draw from."""

    host: tuple[Any, ...]
    device: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """Copy the present states."""
        return cls(tuple(one.whole() for one in GENERATORS.values()), random_states())

    @staticmethod
    def seed(number: int) -> None:
        """Begin all of them anew, somewhere else for every number."""
        seed_devices(number)
        for one in GENERATORS.values():
            one.seed(number)

    def restore(self) -> None:
        """Make them the present ones."""
        for one, look in zip(GENERATORS.values(), self.host, strict=True):
            one.put_back(look)
        set_random_states(self.device)

    def equals(self, other: RandomState) -> bool:
        """Whether the same numbers would be drawn."""
        return self.host == other.host and all(map(torch.equal, self.device, other.device))
