"""What loading a sample does besides: random generators that are drawn from, counters that move.

The three global generators are watched, seeded for each sample, and put back. What else loading
moves is put back where samples are loaded out of turn, or put ahead to see whether it decides what
a sample is.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from egeria_cache.attempt import Attempt, in_turns
from egeria_cache.pystate import DATA, Moved, Snapshot

_AHEAD = 1, 12, 130, 777, 12_345, 1_234_567
"""Of no common period."""
_MAX_ASKED = 32


_BYTES = 4 * (624 + 1)
"""Of a Mersenne twister: its words, and the position in them."""


class _NumPy:
    """NumPy's global generator, that of `np.random.rand` and its like, whatever its kind.

    `np.random.get_state` takes 30 us; the words of a Mersenne twister, which any draw but that of
    a normal deviate that is kept moves, half a microsecond.
    """

    def __init__(self) -> None:
        self._words = b""
        """When it was last known to keep no deviate: only a draw that moves them makes one."""

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

    def put_back(self, look: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(look), dtype=torch.uint8))

    def seed(self, seed: int) -> None:
        # Not `torch.manual_seed`: it also reaches for every accelerator's generator, and costs
        # about fifty times as much.
        torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


_PYTHON = SimpleNamespace(look=random.getstate, put_back=random.setstate, seed=random.seed)
GENERATORS: dict[str, Any] = {"random": _PYTHON, "numpy": _NumPy(), "torch": _Torch()}
"""What `look` gives of one moves whenever it is drawn from; once that is `put_back`, the same is
drawn again. `seed` takes 64 bits."""


@contextmanager
def preserved() -> Iterator[None]:
    """Restore all three on exit, whatever was drawn or seeded inside."""
    with in_turns():
        saved = {name: generator.look() for name, generator in GENERATORS.items()}
        try:
            yield
        finally:
            for name, generator in GENERATORS.items():
                generator.put_back(saved[name])


def kept_of(roots: Mapping[str, Any]) -> Snapshot:
    """Return what some objects are like now; from here on copies of iterators run."""
    kept = Snapshot(roots.items(), reach=DATA)
    kept.put_back(copies=True)
    return kept


@contextmanager
def unmoved(roots: Mapping[str, Any], kept: Snapshot | None = None) -> Iterator[Snapshot]:
    """Have what loading moves be what it was when this ends; `kept` is that, if it is known."""
    now = kept or kept_of(roots)
    try:
        yield now
    finally:
        now.put_back(copies=kept is not None)


def deciding(roots: Mapping[str, Any], load: Callable[[], Any]) -> str | None:
    """Name something that counts what is loaded, and decides what that is.

    The same samples are loaded three times; what that moves is put ahead, by little and much.

    Args:
        roots: The data set and the collate function by name, whose state may move.
        load: Loads some samples; returns what tells them from others.
    """
    given = load()  # what is opened, or filled, once
    with unmoved(roots) as kept:
        before, again, once = kept.now(), load(), kept.now()
        third, twice = load(), kept.now()
        found = list(itertools.islice(kept.moved(once, twice), _MAX_ASKED))

        def differs(some: list[Moved], by: int) -> bool:
            kept.put_back(copies=True)
            with Attempt():
                for i, one in enumerate(some):
                    one.put_ahead(by + i)
                return bool(load() != again)
            return False

        is_still = given == again == third
        if (is_still and not found) or differs([], 0):  # what draws, by itself
            return None
        if is_still and not any(differs(found, by) for by in _AHEAD):
            return None
        decide = (one for by in _AHEAD for one in found if differs([one], by))
        moved = itertools.chain(decide, found, kept.moved(before, once))
        return next((one.path for one in moved), None)
