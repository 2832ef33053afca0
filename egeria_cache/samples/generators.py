"""The three global random generators that a sample may draw from, watched at little cost.

A look at one takes some microseconds, so that a data set that draws nothing is hardly slowed by
being watched; `np.random.get_state` alone would take 100.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from egeria_cache.threads import in_turns

_WORDS = 624
"""State of a Mersenne twister, in 32-bit words; the position in them comes on top."""


class Generator(Protocol):
    """One global generator."""

    def look(self) -> Any:
        """Return what moves whenever it is drawn from; None while a draw could leave no trace.

        That is while a second normal deviate is kept from the draw before: taking it moves nothing.
        """

    def put_back(self, look: Any) -> None:
        """Make it draw again what it would have drawn at the time of `look`."""

    def seed(self, seed: int) -> None:
        """Seed it with a 64-bit number."""

    def save(self) -> Any:
        """Return all of its state."""
        return self.look()

    def restore(self, saved: Any) -> None:
        """Put back what `save` returned."""
        self.put_back(saved)


class _Python(Generator):
    """The functions of `random`."""

    def look(self) -> Any:
        return random.getstate()  # with the deviate that is kept

    def put_back(self, look: Any) -> None:
        random.setstate(look)

    def seed(self, seed: int) -> None:
        random.seed(seed)


class _NumPy(Generator):
    """NumPy's global generator, that of `np.random.rand` and its like."""

    def __init__(self) -> None:
        self._without_deviate: bytes | None = None
        """Its words when it was last seen to keep no normal deviate."""

    def look(self) -> bytes | None:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            return None
        words = ctypes.string_at(generator.ctypes.state_address, 4 * (_WORDS + 1))
        if words != self._without_deviate:
            # Only a draw, which moves the words, makes a deviate to keep: no need to ask again.
            if np.random.get_state(legacy=False)["has_gauss"]:
                return None
            self._without_deviate = words
        return words

    def put_back(self, look: bytes) -> None:
        words = np.frombuffer(look, np.uint32)
        np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), 0, 0.0))

    def seed(self, seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    def save(self) -> Any:
        return np.random.get_state()

    def restore(self, saved: Any) -> None:
        np.random.set_state(saved)


class _Torch(Generator):
    """torch's default generator of the CPU."""

    def look(self) -> bytes | None:
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def put_back(self, look: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(look), dtype=torch.uint8))

    def seed(self, seed: int) -> None:
        # Not `torch.manual_seed`: it also reaches for every accelerator's generator, and costs
        # about fifty times as much.
        torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


GENERATORS: dict[str, Generator] = {"random": _Python(), "numpy": _NumPy(), "torch": _Torch()}


@contextmanager
def preserved() -> Iterator[None]:
    """Restore all three on exit, whatever was drawn or seeded inside."""
    with in_turns():
        saved = {name: generator.save() for name, generator in GENERATORS.items()}
        try:
            yield
        finally:
            for name, generator in GENERATORS.items():
                generator.restore(saved[name])
