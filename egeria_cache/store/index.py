"""Which samples a generation holds: a bit each for integers, 12 to 32 bits of hash for the rest.

Answers for a whole batch from memory. One thread adds at a time, any number look up meanwhile
without a lock: what they read is only ever replaced as a whole, or has bits set in place. A hash
may match by chance (once in 400 look-ups at ten million samples); the record is then not found
when it is read, which costs a miss and puts the key on a list of exceptions. It never errs the
other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from egeria_cache.store.keys import (
    SampleId,
    encode_keys,
    is_integer_key,
    parse_integer_keys,
    plain_integers,
)

__all__ = ["HashSet", "IntegerSet", "Membership"]

Mask = npt.NDArray[np.bool_]

FREE_BITMAP_BYTES = 4 * 2**20
"""A bitmap may grow to this size (33 million samples) however few bits of it are set; beyond it,
only while a sample costs at most a byte."""


class Membership:
    """Set of (sample ID, variant) with batch insert and look-up."""

    def __init__(self) -> None:
        self._integers: dict[int, IntegerSet] = {}
        self._hashes = HashSet()
        self._denied: set[bytes] = set()

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._hashes.nbytes + sum(one.nbytes for one in self._integers.values())

    def add_keys(self, keys: Sequence[bytes]) -> None:
        """Insert keys as `encode_keys` makes them; one thread at a time."""
        self._denied.difference_update(keys)
        parsed = parse_integer_keys(keys)
        if parsed is None:
            self._hashes.add([key for key in keys if not is_integer_key(key)])
            keys = [key for key in keys if is_integer_key(key)]
            parsed = parse_integer_keys(keys)
            assert parsed is not None
        variants, numbers = parsed
        for variant in np.unique(variants).tolist():
            chosen = np.flatnonzero(variants == variant)
            bits = self._integers.setdefault(variant, IntegerSet())
            refused = chosen[~bits.add(numbers[chosen])]
            self._hashes.add([keys[position] for position in refused.tolist()])

    def deny(self, key: bytes) -> None:
        """Answer False for this key until it is added again."""
        self._denied.add(key)

    def contains(self, ids: Sequence[SampleId], variant: int) -> Mask:
        """Return bool (B,)."""
        found = np.zeros(len(ids), np.bool_)
        bits = self._integers.get(variant)
        if bits is not None:
            places, numbers = _integers_among(ids)
            found[places] = bits.contains(numbers)
        if (not self._hashes and not self._denied) or (found.all() and not self._denied):
            return found
        keys = encode_keys(ids, variant)
        if self._hashes:
            found |= self._hashes.contains(keys)
        for position in np.flatnonzero(found).tolist() if self._denied else ():
            found[position] = keys[position] not in self._denied
        return found


class IntegerSet:
    """Bitmap of non-negative integers."""

    def __init__(self) -> None:
        self._bits = np.zeros(1024, np.uint8)
        self._num_added = 0

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._bits.nbytes

    def add(self, numbers: npt.NDArray[np.int64]) -> Mask:
        """Insert; return which were: a bitmap too sparse is refused."""
        limit = max(FREE_BITMAP_BYTES, self._num_added + len(numbers))
        fits = (numbers >= 0) & (numbers >> 3 < limit)
        chosen = numbers[fits]
        if len(chosen):
            needed = (int(chosen.max()) >> 3) + 1
            if needed > len(self._bits):
                grown = np.zeros(min(max(needed, 2 * len(self._bits)), limit), np.uint8)
                grown[: len(self._bits)] = self._bits
                self._bits = grown
            bits = (1 << (chosen & 7)).astype(np.uint8)
            np.bitwise_or.at(self._bits, chosen >> 3, bits)
            self._num_added += len(chosen)
        return fits

    def contains(self, numbers: npt.NDArray[np.int64]) -> Mask:
        """Return bool (B,)."""
        bits = self._bits
        if len(numbers) and numbers.min() >= 0 and numbers.max() < 8 * len(bits):
            return np.asarray(bits[numbers >> 3] >> (numbers & 7) & 1, np.bool_)
        places = numbers >> 3
        inside = (places >= 0) & (places < len(bits))
        places = np.where(inside, places, 0)
        return np.asarray(inside & ((bits[places] >> (numbers & 7).astype(np.uint8) & 1) == 1))


_SMALL_SET = 4096
_PACKED_FROM = 2**21
_BUCKET_BITS, _REST_BITS = 20, 12


class HashSet:
    """Set of 32-bit hashes in three layers: a Python set, a sorted array, and a large one.

    The large one is packed once it holds two million: sorted, the upper 20 bits are known from the
    position (a table of 2^20 offsets) and only the lower 12 are kept, in a byte and a half.
    """

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._layers: tuple[npt.NDArray[np.uint32], _Base] = (np.empty(0, np.uint32), _Base.of(()))

    def __bool__(self) -> bool:
        return bool(self._recent) or len(self._layers[0]) + self._layers[1].count > 0

    @property
    def nbytes(self) -> int:
        """Memory it takes, but for the small set."""
        return self._layers[0].nbytes + self._layers[1].nbytes

    def add(self, keys: Sequence[bytes]) -> None:
        """Insert; one thread at a time."""
        self._recent.update(map(_hash, keys))
        if len(self._recent) <= _SMALL_SET:
            return
        middle, base = self._layers
        recent = np.fromiter(self._recent, np.uint32, len(self._recent))
        middle = _merged(middle, np.sort(recent))
        if len(middle) > max(2**16, base.count // 32):
            base, middle = _Base.of(_merged(base.values(), middle)), middle[:0]
        self._layers = (middle, base)
        self._recent = set()  # after the layers: a look-up in between finds it in either

    def contains(self, keys: Sequence[bytes]) -> Mask:
        """Return bool (B,); True by chance once in 2^32 / count."""
        hashes = np.fromiter(map(_hash, keys), np.uint32, len(keys))
        recent = self._recent  # before the layers, for the same reason
        middle, base = self._layers
        found = _in_sorted(middle, hashes) | base.contains(hashes)
        if recent:
            found |= np.fromiter((one in recent for one in hashes.tolist()), np.bool_, len(keys))
        return found


class _Base:
    """Immutable sorted set of hashes, packed where large."""

    def __init__(self, sorted_hashes: npt.NDArray[np.uint32]) -> None:
        self.count = len(sorted_hashes)
        self._plain: npt.NDArray[np.uint32] | None = sorted_hashes
        if self.count < _PACKED_FROM:
            return
        self._plain = None
        bounds = np.arange(2**_BUCKET_BITS, dtype=np.uint32) << _REST_BITS
        self._starts = np.empty(2**_BUCKET_BITS + 1, np.uint32)
        self._starts[:-1] = np.searchsorted(sorted_hashes, bounds)
        self._starts[-1] = self.count
        self._widest = int(np.diff(self._starts).max())
        self._low = sorted_hashes.astype(np.uint8)
        nibbles = (sorted_hashes >> 8).astype(np.uint8) & 15
        self._high = np.zeros((self.count + 1) // 2, np.uint8)
        self._high |= nibbles[0::2]
        self._high[: self.count // 2] |= nibbles[1::2] << 4

    @classmethod
    def of(cls, hashes: Iterable[int] | npt.NDArray[np.uint32]) -> _Base:
        return cls(np.asarray(hashes, np.uint32))

    @property
    def nbytes(self) -> int:
        if self._plain is not None:
            return self._plain.nbytes
        return self._starts.nbytes + self._low.nbytes + self._high.nbytes

    def values(self) -> npt.NDArray[np.uint32]:
        if self._plain is not None:
            return self._plain
        counts = np.diff(self._starts)
        upper = np.repeat(np.arange(2**_BUCKET_BITS, dtype=np.uint32), counts)
        return np.uint32(2**_REST_BITS) * upper | self._rest(np.arange(self.count))

    def contains(self, hashes: npt.NDArray[np.uint32]) -> Mask:
        if self._plain is not None:
            return _in_sorted(self._plain, hashes)
        buckets = hashes >> _REST_BITS
        starts, ends = self._starts[buckets], self._starts[buckets + 1]
        places = starts[:, None] + np.arange(self._widest, dtype=np.int64)
        inside = places < ends[:, None]
        rest = self._rest(np.minimum(places, self.count - 1))
        wanted = (hashes & (2**_REST_BITS - 1))[:, None]
        return np.asarray((inside & (rest == wanted)).any(1))

    def _rest(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        nibbles = self._high[places >> 1] >> (places & 1).astype(np.uint8) * 4 & 15
        return np.asarray(nibbles.astype(np.uint32) << 8 | self._low[places], np.uint32)


def _integers_among(ids: Sequence[SampleId]) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return (where, numbers) of the IDs that are integers of 64 bits."""
    numbers = plain_integers(ids)
    if numbers is not None:
        return slice(None), numbers
    keys = encode_keys(ids)
    places = [place for place, key in enumerate(keys) if is_integer_key(key)]
    parsed = parse_integer_keys([keys[place] for place in places])
    assert parsed is not None
    return places, parsed[1]


def _in_sorted(values: npt.NDArray[np.uint32], wanted: npt.NDArray[np.uint32]) -> Mask:
    if not len(values):
        return np.zeros(len(wanted), np.bool_)
    places = np.searchsorted(values, wanted)
    return np.asarray(values[np.minimum(places, len(values) - 1)] == wanted)


def _merged(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> Any:
    """Return the union of two sorted arrays; the stable sort merges them in linear time."""
    both = np.concatenate((one, other))
    both.sort(kind="stable")
    return both[np.concatenate(([True], both[1:] != both[:-1]))] if len(both) else both


def _hash(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) & 0xFFFFFFFF
