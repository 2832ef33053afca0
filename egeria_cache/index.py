"""Which samples a generation holds: exact bits for dense integers, a hash set for the rest.

Answers for a whole batch without touching LMDB. Not thread-safe by itself: its generation guards
it with a lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from egeria_cache.keys import SampleId, encode_keys

__all__ = ["Membership"]


class Membership:
    """Set of (sample ID, variant) with batch insert and look-up."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add_keys(self, keys: Sequence[bytes]) -> None:
        """Insert keys as `encode_keys` makes them."""
        self._keys.update(keys)

    def discard_key(self, key: bytes) -> None:
        """From now on answer False for this key, whatever was inserted before."""
        self._keys.discard(key)

    def contains(self, ids: Sequence[SampleId], variant: int) -> npt.NDArray[np.bool_]:
        """Return bool (B,)."""
        keys = encode_keys(ids, variant)
        return np.fromiter((key in self._keys for key in keys), np.bool_, len(keys))
