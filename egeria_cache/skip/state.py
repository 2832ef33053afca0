"""Leave no trace: what a rehearsal's extra forwards change is put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["ModelState", "RandomState", "stashed"]

_OWN = frozenset(
    {"_parameters", "_buffers", "_modules", "training", "train", "forward", "_compiled_call_impl"}
)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that a forward may draw from."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """Copy the present states."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if cuda else (),
            random.getstate(),
            np.random.get_state(),
        )

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def equals(self, other: RandomState) -> bool:
        """Whether the same numbers would be drawn."""
        return (
            torch.equal(self.cpu, other.cpu)
            and all(torch.equal(a, b) for a, b in zip(self.cuda, other.cuda, strict=True))
            and self.python == other.python
            and self.numpy[2:] == other.numpy[2:]
            and np.array_equal(self.numpy[1], other.numpy[1])
        )


class ModelState:
    """Buffers and plain attributes of every module, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [
            (module, key, buffer, buffer.detach().clone())
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        # The user's graph may hold a buffer: neither content nor version may have moved for it.
        self._versions = torch.autograd._unsafe_preserve_version_counter(
            tuple(buffer for _, _, buffer, _ in self._buffers if not buffer.is_inference())
        )
        self._attributes = [(module, dict(module.__dict__)) for module in model.modules()]

    def restore(self) -> None:
        """Put back what differs, version counters included. May be called again and again."""
        for module, key, buffer, copy in self._buffers:
            if not torch.equal(buffer, copy):
                buffer.data.copy_(copy)
            if module._buffers.get(key) is not buffer:
                module._buffers[key] = buffer
        self._versions.__exit__(None, None, None)
        for module, before in self._attributes:
            now = module.__dict__
            for key in [key for key in now if key not in before and key not in _OWN]:
                del now[key]
            for key, value in before.items():
                if key not in _OWN and now.get(key) is not value:
                    now[key] = value

    def changed_buffers(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that were written to, or replaced.

        By content: BatchNorm moves its running statistics without moving their version counters.
        """
        return [
            (module, key)
            for module, key, buffer, copy in self._buffers
            if module._buffers.get(key) is not buffer or not torch.equal(buffer, copy)
        ]

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Return the plain attributes that were set, with their new values."""
        return [
            (module, key, value)
            for module, before in self._attributes
            for key, value in module.__dict__.items()
            if key not in _OWN and (key not in before or before[key] is not value)
        ]


@contextmanager
def stashed(model: nn.Module) -> Iterator[ModelState]:
    """Restore the model's buffers, its attributes and the random states when the block ends."""
    state, rng = ModelState(model), RandomState.now()
    try:
        yield state
    finally:
        state.restore()
        rng.restore()
