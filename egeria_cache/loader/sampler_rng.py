"""The random generators that a loader's sampler draws from, and their states as plain values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

__all__ = ["SamplerRng"]


class SamplerRng:
    """The random generators that a loader's sampler may draw from."""

    def __init__(self, generator: torch.Generator | None, index_sampler: Any) -> None:
        sampler = getattr(index_sampler, "sampler", None)
        self._samplers = _samplers(index_sampler)
        own = [getattr(thing, "generator", None) for thing in self._samplers]
        found = [torch.default_generator, generator, *own]
        self._torch = list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))
        # torch's own samplers draw from torch alone; a user's may draw from anything.
        self._is_torch = type(index_sampler) is BatchSampler and isinstance(
            sampler, RandomSampler | SequentialSampler
        )

    def get(self) -> dict[str, Any]:
        """Return their states, as values that JSON can write."""
        state: dict[str, Any] = {
            "torch": [_text(generator.get_state().numpy()) for generator in self._torch]
        }
        if not self._is_torch:
            version, internal, gauss = random.getstate()
            state["python"] = [version, list(internal), gauss]
            name, keys, *rest = np.random.get_state()
            state["numpy"] = [name, _text(np.asarray(keys, "<u4")), *rest]
        return state

    def set(self, state: dict[str, Any]) -> None:
        """Put them back."""
        states = state["torch"]
        for sampler in self._samplers:
            if len(self._torch) < len(states) and getattr(sampler, "generator", 0) is None:
                # It makes one with its first pass, and had made it when the state was taken.
                sampler.generator = torch.Generator()
                self._torch.append(sampler.generator)
        for generator, value in zip(self._torch, states, strict=True):
            generator.set_state(torch.frombuffer(_bytes(value), dtype=torch.uint8))
        if "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.frombuffer(_bytes(keys), "<u4"), *rest))


def _samplers(index_sampler: Any) -> list[Any]:
    """Return an index sampler, those that it wraps, and the sampler that they draw from."""
    found: list[Any] = []
    pending = [index_sampler]
    while pending:
        thing = pending.pop()
        if thing is not None and all(thing is not other for other in found):
            found.append(thing)
            pending += [getattr(thing, name, None) for name in ("sampler", "batch_sampler")]
    return found


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))  # torch wants memory that can be written
