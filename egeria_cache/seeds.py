"""Stateless per-sample seeds.

A sample's augmentation depends on (seed, sample ID, variant) and on nothing else: not on the
worker that loads it, the number of workers, the order of the epoch, or a resume. That is what makes
an activation cacheable at all: the same key must always mean the same input.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["SampleId", "preserved_rng", "sample_seed", "seed_rngs", "seed_torch"]

SampleId = int | str | tuple  # type: ignore[type-arg]
"""What identifies a sample: an int, a string, or a (nested) tuple of them."""


def sample_seed(seed: int, sample_id: SampleId, variant: int = 0) -> int:
    """Return the 64-bit seed of one sample's random augmentation.

    Args:
        seed: The run's augmentation seed.
        sample_id: Int, string, or tuple of them. `1` and `"1"` are different samples.
        variant: Which of the sample's augmented versions (see `EgeriaLoader`).

    Returns:
        An int in [0, 2**64), the same on every machine and in every process.
    """
    text = f"{seed}|{variant}|{sample_id!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def seed_rngs(seed: int) -> None:
    """Seed `random`, NumPy's global state and torch's default generator (CPU).

    torch's default generator is seeded directly: `torch.manual_seed` also reaches for every
    accelerator's generator and costs about fifty times as much.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's default generator (CPU)."""
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the three global generators on exit, whatever was drawn or seeded inside."""
    python, numpy, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.default_generator.get_state(),
    )
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)
