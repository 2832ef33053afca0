"""Where the record of each sample lies, in memory: 16 bytes for an integer, 24 for any other.

Answers for a whole batch at once. One thread adds at a time, any number look up meanwhile without a
lock: what they read is only ever replaced as a whole, or has spans set in place. Two keys may have
the same hash by chance (once in 10^6 at five million samples that are no integers); the record then
fails its check, which covers its key, and is a miss.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from egeria_cache.store.disk.log import Spans
from egeria_cache.store.records.keys import (
    SampleId,
    encode_keys,
    is_integer_key,
    parse_integer_keys,
    plain_integers,
)

__all__ = ["HashTable", "Index", "IntegerTable"]

FREE_INTEGERS = 2**22
"""A table of integers may reach this far however few it holds (64 MiB, of which the system gives
what is touched); beyond it, only while one of `SPARSEST` places is taken."""
SPARSEST = 8
SMALL = 4096
NOWHERE = (0, 0)
"""Span of a sample that is not stored: no record is empty."""


class Index:
    """Map from (sample ID, variant) to spans, with batch insert and look-up."""

    def __init__(self) -> None:
        self._integers: dict[int, IntegerTable] = {}
        self._others = HashTable()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._others.count + sum(one.count for one in list(self._integers.values()))

    @property
    def nbytes(self) -> int:
        """Memory it takes, but for what was added last."""
        return self._others.nbytes + sum(one.nbytes for one in list(self._integers.values()))

    def add(self, keys: Sequence[bytes], spans: Spans) -> None:
        """Insert keys as `encode_keys` makes them; of equal ones the last counts."""
        whole = [position for position, key in enumerate(keys) if is_integer_key(key)]
        if len(whole) == len(keys):
            self.add_integers(b"".join(keys), spans)
            return
        self.add_integers(b"".join(keys[position] for position in whole), spans[whole])
        rest = sorted({*range(len(keys))}.difference(whole))
        with self._lock:
            self._others.add(_hashes([keys[position] for position in rest]), spans[rest])

    def add_integers(self, keys: bytes, spans: Spans) -> None:
        """Insert keys of integers, given one behind the other."""
        variants, numbers = parse_integer_keys(keys)
        with self._lock:
            for variant in set(variants.tolist()):
                chosen = np.flatnonzero(variants == variant)
                table = self._integers.setdefault(variant, IntegerTable())
                refused = chosen[~table.add(numbers[chosen], spans[chosen])]
                hashes = _hashes(encode_keys(numbers[refused].tolist(), variant))
                self._others.add(hashes, spans[refused])

    def deny(self, key: bytes) -> bool:
        """Forget a key until it is added again; False if it was not known."""
        with self._lock:
            known = self._others.remove(_hashes([key]))
            if is_integer_key(key):
                (variant,), numbers = parse_integer_keys(key)
                table = self._integers.get(int(variant))
                known |= table is not None and table.remove(numbers)
        return known

    def locate(
        self, ids: Sequence[SampleId], variant: int, keys: Sequence[bytes] | None = None
    ) -> Spans:
        """Return shape (B, 2): where each record begins, and its length; 0 if it is not stored.

        Args:
            ids: Of the samples.
            variant: Of the augmentation.
            keys: The same, encoded, if they are at hand.
        """
        spans = np.zeros((len(ids), 2), np.uint64)
        table = self._integers.get(variant)
        if table is not None:
            places, numbers = _integers_among(ids)
            spans[places] = table.locate(numbers)
        if self._others.count:
            missing = np.flatnonzero(spans[:, 1] == 0)
            if len(missing):
                keys = encode_keys(ids, variant) if keys is None else keys
                hashes = _hashes([keys[position] for position in missing.tolist()])
                spans[missing] = self._others.locate(hashes)
        return spans

    def locate_keys(self, keys: Sequence[bytes]) -> Spans:
        """Return the same for keys of any variants."""
        spans = self._others.locate(_hashes(keys))
        whole = np.fromiter(map(is_integer_key, keys), np.bool_, len(keys))
        variants, numbers = parse_integer_keys(b"".join(itertools.compress(keys, whole.tolist())))
        places = np.flatnonzero(whole)
        for variant, table in list(self._integers.items()):
            chosen = variants == variant
            found = table.locate(numbers[chosen])
            there = found[:, 1] > 0
            spans[places[chosen][there]] = found[there]
        return spans


class IntegerTable:
    """Spans by non-negative integer."""

    def __init__(self) -> None:
        self._spans: Spans = np.zeros((1024, 2), np.uint64)
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._spans.nbytes

    def add(self, numbers: npt.NDArray[np.int64], spans: Spans) -> npt.NDArray[np.bool_]:
        """Insert; return which were: a table too sparse is refused."""
        limit = max(FREE_INTEGERS, SPARSEST * (self.count + len(numbers)))
        fits = (numbers >= 0) & (numbers < limit)
        chosen = numbers[fits]
        if len(chosen):
            self._reach(int(chosen.max()) + 1, limit)
            fresh = chosen[self._spans[chosen, 1] == 0]
            self.count += _num_different(fresh)
            self._spans[chosen] = spans[fits]
        return fits

    def remove(self, numbers: npt.NDArray[np.int64]) -> bool:
        """Forget some; True if they were there."""
        known = bool(self.locate(numbers)[:, 1].any())
        if known:
            self._spans[numbers] = NOWHERE
            self.count -= len(numbers)
        return known

    def locate(self, numbers: npt.NDArray[np.int64]) -> Spans:
        """Return shape (B, 2), zeros for what is not there."""
        table = self._spans
        if len(numbers) and numbers.min() >= 0 and numbers.max() < len(table):
            return table[numbers]
        inside = (numbers >= 0) & (numbers < len(table))
        return table[np.where(inside, numbers, 0)] * inside[:, None].astype(np.uint64)

    def _reach(self, needed: int, limit: int) -> None:
        if needed > len(self._spans):
            grown = np.zeros((min(max(needed, 2 * len(self._spans)), limit), 2), np.uint64)
            grown[: len(self._spans)] = self._spans
            self._spans = grown


class HashTable:
    """Spans by 64 bits of hash, in two layers: a dictionary of what came last, sorted arrays."""

    def __init__(self) -> None:
        self._recent: dict[int, tuple[int, int]] = {}
        empty: Spans = np.empty((0, 2), np.uint64)
        self._sorted: tuple[npt.NDArray[np.uint64], Spans] = np.empty(0, np.uint64), empty
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Memory it takes, but for the dictionary."""
        return sum(one.nbytes for one in self._sorted)

    def add(self, hashes: npt.NDArray[np.uint64], spans: Spans) -> None:
        """Insert; one thread at a time."""
        self.count += _num_different(hashes[self.locate(hashes)[:, 1] == 0])
        recent = self._recent
        recent.update(zip(hashes.tolist(), map(tuple, spans.tolist()), strict=True))
        known = self._sorted[0]
        if len(recent) > max(SMALL, len(known) // 16):
            added = np.fromiter(recent, np.uint64, len(recent))
            places = np.array(list(recent.values()), np.uint64)
            # After what was known: of equal ones the last counts.
            all_hashes = np.concatenate((known, added))
            order = np.argsort(all_hashes, kind="stable")
            all_hashes = all_hashes[order]
            last = np.append(all_hashes[1:] != all_hashes[:-1], True)
            merged = np.concatenate((self._sorted[1], places))[order][last]
            self._sorted = all_hashes[last], merged
            self._recent = {}  # after the arrays: a look-up in between finds it in either

    def remove(self, hashes: npt.NDArray[np.uint64]) -> bool:
        """Forget some; True if they were there."""
        known = bool(self.locate(hashes)[:, 1].any())
        if known:
            self._recent.update(dict.fromkeys(hashes.tolist(), NOWHERE))
            self.count -= len(hashes)
        return known

    def locate(self, hashes: npt.NDArray[np.uint64]) -> Spans:
        """Return shape (B, 2), zeros for what is not there."""
        recent = self._recent  # before the arrays, for the same reason
        known, places = self._sorted
        spans = np.zeros((len(hashes), 2), np.uint64)
        if len(known):
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            spans = places[at] * (known[at] == hashes)[:, None].astype(np.uint64)
        if recent:
            for position, one in enumerate(hashes.tolist()):
                if one in recent:
                    spans[position] = recent[one]
        return spans


def _integers_among(ids: Sequence[SampleId]) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return (where, numbers) of the IDs that are integers of 64 bits."""
    numbers = plain_integers(ids)
    if numbers is not None:
        return slice(None), numbers
    keys = encode_keys(ids)
    places = [place for place, key in enumerate(keys) if is_integer_key(key)]
    return places, parse_integer_keys(b"".join(keys[place] for place in places))[1]


def _hashes(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))


def _num_different(values: npt.NDArray[Any]) -> int:
    # NumPy's unique() takes ten times as long.
    ordered = np.sort(values)
    return len(values) and 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
