"""Stateless per-sample seeds.

A sample's augmentation depends on (seed, sample ID, draw) and on nothing else: not on the
worker that loads it, the number of workers, the order of the epoch, or a resume. That is what makes
an activation cacheable at all: the same key must always mean the same input.
"""

from __future__ import annotations

import hashlib

SampleId = int | str | tuple  # type: ignore[type-arg]
"""What identifies a sample: an int, a string, or a (nested) tuple of them."""


def sample_seed(seed: int, sample_id: SampleId, draw: int = 0) -> int:
    """Return the 64-bit seed of one sample's random augmentation.

    Args:
        seed: The run's augmentation seed.
        sample_id: Int, string, or tuple of them. `1` and `"1"` are different samples.
        draw: Number of the sample's random draw (see `EgeriaLoader`).

    Returns:
        An int in [0, 2**64), the same on every machine and in every process.
    """
    text = f"{seed}|{draw}|{sample_id!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
