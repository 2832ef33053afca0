"""Where the record of each sample lies, in memory: 16 bytes for an integer, 24 for any other.

Answers for a whole batch at once. One thread adds at a time, any number look up meanwhile without a
lock: what they read is only ever replaced as a whole, or has spans set in place. Two keys may have
the same hash by chance (once in 10^6 at five million samples that are no integers); the record then
fails its check, which covers its key, and is a miss.

A record that was verified may be noted as such: records begin at multiples of eight, and the three
lowest bits of its place hold a mark of the round of trust in which it was. Distrust of all is
another round.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from egeria_cache.store.disk.log import Spans
from egeria_cache.store.records.keys import (
    Keys,
    SampleId,
    encode_keys,
    hashes_of,
    is_integer_key,
    parse_integer_keys,
)

__all__ = ["HashTable", "Index", "IntegerTable", "Located", "mark_of"]

FREE_INTEGERS = 2**22
"""A table of integers may reach this far however few it holds (64 MiB, of which the system gives
what is touched); beyond it, only while one of `SPARSEST` places is taken."""
SPARSEST = 8
SMALL = 4096
NOWHERE = (0, 0)
"""Span of a sample that is not stored: no record is empty."""
MARK_BITS = np.uint64(7)
PLACE_BITS = ~MARK_BITS
NUM_MARKS = 7
"""From 1; 0 is trusted in none."""


def mark_of(round_: int) -> int:
    """Return what a record that was verified in a round of trust is marked with."""
    return round_ % NUM_MARKS + 1


class Located(NamedTuple):
    """Where the records of a batch are."""

    raw: Spans
    """Shape (B, 2): where each begins, with the mark of the round in which it was verified, and
    its length; 0 if it is not stored."""
    round: int
    """Of trust, when this was found."""

    @property
    def spans(self) -> Spans:
        """Shape (B, 2): where each begins, and its length."""
        return self.raw & np.array((PLACE_BITS, ~np.uint64(0)))


class Index:
    """Map from (sample ID, variant) to spans, with batch insert and look-up."""

    def __init__(self) -> None:
        self._integers: dict[int, IntegerTable] = {}
        self._others = HashTable()
        self.round = 0
        """Of trust: of what was verified in an earlier one, nothing is believed."""
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
            self._others.add(hashes_of([keys[position] for position in rest]), spans[rest])

    def add_integers(self, keys: bytes, spans: Spans) -> None:
        """Insert keys of integers, given one behind the other."""
        variants, numbers = parse_integer_keys(keys)
        with self._lock:
            for variant in set(variants.tolist()):
                chosen = np.flatnonzero(variants == variant)
                table = self._integers.setdefault(variant, IntegerTable())
                refused = chosen[~table.add(numbers[chosen], spans[chosen])]
                hashes = hashes_of(encode_keys(numbers[refused].tolist(), variant))
                self._others.add(hashes, spans[refused])

    def deny(self, key: bytes) -> bool:
        """Forget a key until it is added again; False if it was not known."""
        with self._lock:
            known = self._others.remove(hashes_of([key]))
            if is_integer_key(key):
                (variant,), numbers = parse_integer_keys(key)
                table = self._integers.get(int(variant))
                known |= table is not None and table.remove(numbers)
        return known

    def locate(self, ids: Sequence[SampleId], variant: int) -> Spans:
        """Return shape (B, 2): where each record begins, and its length; 0 if it is not stored."""
        return self.look_up(Keys(ids, variant)).spans

    def contains(self, ids: Sequence[SampleId], variant: int) -> npt.NDArray[np.bool_]:
        """Return bool (B,): which are stored."""
        keys = Keys(ids, variant)
        table = self._integers.get(variant)
        if table is not None and keys.numbers is not None and not self._others.count:
            return table.contains(keys.numbers)
        found: npt.NDArray[np.bool_] = self.look_up(keys).raw[:, 1] != 0
        return found

    def look_up(self, keys: Keys) -> Located:
        """Return where records are, and what is known of them."""
        number, variant = self.round, keys.variant
        table = self._integers.get(variant)
        if table is not None and keys.numbers is not None:
            spans = table.locate(keys.numbers)
        else:
            spans = np.zeros((len(keys), 2), np.uint64)
            if table is not None:
                places, numbers = _integers_among(keys)
                spans[places] = table.locate(numbers)
        if self._others.count:
            missing = np.flatnonzero(spans[:, 1] == 0)
            if len(missing):
                spans[missing] = self._others.locate(keys.hashes(missing))
        return Located(spans, number)

    def table(self, variant: int) -> IntegerTable | None:
        """Return spans by sample ID, with rounds, as far as they lie in one table."""
        return self._integers.get(variant)

    def trust(
        self,
        keys: Keys,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.uint64],
        round_: int,
    ) -> None:
        """Note that the records of some rows were verified.

        Args:
            keys: Of a batch.
            rows: Of it, shape (N,).
            places: Where their records lay, shape (N,); those that lie elsewhere now are left out.
            round_: In which that was.
        """
        if not len(rows):
            return
        with self._lock:
            if round_ != self.round:
                return
            mark = np.uint64(mark_of(round_))
            table = self._integers.get(keys.variant)
            if table is not None and keys.numbers is not None:
                rest = ~table.trust(keys.numbers[rows], places, mark)
                rows, places = rows[rest], places[rest]
            if self._others.count and len(rows):
                self._others.trust(keys.hashes(rows), places, mark)

    def distrust(self) -> None:
        """Trust no record until it is verified again."""
        with self._lock:
            following = self.round + 1
            if mark_of(following) == mark_of(0):  # no earlier round may be taken for a later one
                self._others.forget_rounds()
                for table in self._integers.values():
                    table.forget_rounds()
            self.round = following  # last: who looks up meanwhile holds no lock

    def locate_keys(self, keys: Sequence[bytes]) -> Spans:
        """Return the same for keys of any variants."""
        spans = self._others.locate(hashes_of(keys))
        whole = np.fromiter(map(is_integer_key, keys), np.bool_, len(keys))
        variants, numbers = parse_integer_keys(b"".join(itertools.compress(keys, whole.tolist())))
        places = np.flatnonzero(whole)
        for variant, table in list(self._integers.items()):
            chosen = variants == variant
            found = table.locate(numbers[chosen])
            there = found[:, 1] > 0
            spans[places[chosen][there]] = found[there]
        spans[:, 0] &= PLACE_BITS
        return spans


class IntegerTable:
    """Spans by non-negative integer."""

    def __init__(self) -> None:
        self.spans: Spans = np.zeros((1024, 2), np.uint64)
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.spans.nbytes

    def add(self, numbers: npt.NDArray[np.int64], spans: Spans) -> npt.NDArray[np.bool_]:
        """Insert; return which were: a table too sparse is refused."""
        limit = max(FREE_INTEGERS, SPARSEST * (self.count + len(numbers)))
        fits = (numbers >= 0) & (numbers < limit)
        chosen = numbers[fits]
        if len(chosen):
            self._reach(int(chosen.max()) + 1, limit)
            fresh = chosen[self.spans[chosen, 1] == 0]
            self.count += _num_different(fresh)
            self.spans[chosen] = spans[fits]
        return fits

    def remove(self, numbers: npt.NDArray[np.int64]) -> bool:
        """Forget some; True if they were there."""
        known = bool(self.locate(numbers)[:, 1].any())
        if known:
            self.spans[numbers] = NOWHERE
            self.count -= len(numbers)
        return known

    def contains(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return bool (B,)."""
        table = self.spans
        is_short = _all_below(numbers, len(table))
        sizes = table[numbers, 1] if is_short else self.locate(numbers)[:, 1]
        found: npt.NDArray[np.bool_] = sizes != 0
        return found

    def locate(self, numbers: npt.NDArray[np.int64]) -> Spans:
        """Return shape (B, 2), zeros for what is not there."""
        table = self.spans
        if _all_below(numbers, len(table)):
            return table[numbers]
        inside = (numbers >= 0) & (numbers < len(table))
        return table[np.where(inside, numbers, 0)] * inside[:, None].astype(np.uint64)

    def trust(
        self, numbers: npt.NDArray[np.int64], places: npt.NDArray[np.uint64], mark: np.uint64
    ) -> npt.NDArray[np.bool_]:
        """Mark those that are still where they were; return which are here."""
        here = (numbers >= 0) & (numbers < len(self.spans))
        chosen, places = numbers[here], places[here]
        same = self.spans[chosen, 0] & PLACE_BITS == places
        same &= self.spans[chosen, 1] > 0
        self.spans[chosen[same], 0] = places[same] | mark
        here[here] = same
        return here

    def forget_rounds(self) -> None:
        """Trust none."""
        self.spans[:, 0] &= PLACE_BITS

    def _reach(self, needed: int, limit: int) -> None:
        if needed > len(self.spans):
            grown = np.zeros((min(max(needed, 2 * len(self.spans)), limit), 2), np.uint64)
            grown[: len(self.spans)] = self.spans
            self.spans = grown


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

    def trust(
        self, hashes: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64], mark: np.uint64
    ) -> None:
        """Mark those that are still where they were."""
        known, spans = self._sorted
        if len(known):
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            same = (known[at] == hashes) & (spans[at, 0] & PLACE_BITS == places)
            spans[at[same], 0] = places[same] | mark
        recent = self._recent
        for one, place in zip(hashes.tolist(), places.tolist(), strict=True) if recent else ():
            span = recent.get(one, NOWHERE)
            if span[1] and span[0] & int(PLACE_BITS) == place:
                recent[one] = (place | int(mark), span[1])

    def forget_rounds(self) -> None:
        """Trust none."""
        self._sorted[1][:, 0] &= PLACE_BITS
        for one, (place, size) in self._recent.items():
            self._recent[one] = (place & int(PLACE_BITS), size)

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


def _integers_among(keys: Keys) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Return (where, numbers) of the keys of integers of 64 bits."""
    places = [place for place, key in enumerate(keys) if is_integer_key(key)]
    return places, parse_integer_keys(b"".join(keys[place] for place in places))[1]


def _all_below(numbers: npt.NDArray[np.int64], end: int) -> bool:
    """Whether there are some, and all are from 0 to before the end."""
    return len(numbers) > 0 and int(numbers.view(np.uint64).max()) < end  # negative ones are large


def _num_different(values: npt.NDArray[Any]) -> int:
    # NumPy's unique() takes ten times as long.
    ordered = np.sort(values)
    return len(values) and 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
