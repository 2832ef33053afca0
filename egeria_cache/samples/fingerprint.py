"""What tells one data set from another, without reading all of it; and whether it still is itself.

Part of a generation's content address: all that decides a sample and can be reached from the data
set and the collate function (`pystate`), and a few dozen samples byte by byte. What cannot be
told apart this way is what `sample_version`, a `fingerprint` of the data set's own, and the audit
are for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from egeria_cache.attempt import Attempt, without_modes
from egeria_cache.batch import flatten
from egeria_cache.kinds import kind_name
from egeria_cache.pystate import Portrait, is_below, is_in_shared_memory, leaf_print

NUM_SAMPLES = 32
NUM_AGAIN = 2
"""Samples that are read again at the start of an epoch, in turns; more while time is free."""
MAX_SHARE = 0.01
"""Of the time, for reading samples and long arrays again."""
_MAX_TENSORS = 64
"""Of the data that are looked at for each batch, those that train first: half a microsecond each
between the steps of a training, in which memory is cold."""
_version = attrgetter("_version")

FREE_S = 0.05
"""What looking may take besides: in short runs all is looked at, and with each batch."""
FREE_SHARE = 0.0625
"""Of what is left of it, for reading more samples than `NUM_AGAIN` at once: later looks need it."""


class Look(NamedTuple):
    """What loading some samples showed."""

    prints: list[int | None]
    """Of the samples; None for those that hold something without bytes."""
    together: int | None
    """Of the batch that they were collated to."""
    moved: frozenset[str] = frozenset()
    """Paths of the portrait that loading itself changes: counters, caches, files that are open."""
    decides: str | None = None
    """What counts loads, and decides what they give."""
    grown: frozenset[str] = frozenset()
    """Those of containers to which it only adds, or of which it takes out: what stays is data."""
    read: frozenset[str] = frozenset()
    """Paths of what trains, and is computed with."""


class _Reads(TorchDispatchMode):
    """Notes where what operators are given lies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.places.update(map(_place, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


def _place(value: Any) -> int:
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return value.data_ptr() if is_plain else 0


def describe(samples: Sequence[Any], collate: Callable[[Any], Any]) -> Look:
    """Say what samples are, each and together."""
    prints, together = [sample_print(sample) for sample in samples], None
    for some in (samples, samples[-2:]):  # it may take no such batch; what it leaves matters
        with Attempt():
            together = sample_print(collate(some))
            break
    return Look(prints, together)


def look(
    before: Portrait, load: Callable[[], Sequence[Any]], collate: Callable[[Any], Any]
) -> Look:
    """Load some samples, and describe them, and what that moves of what `before` shows."""
    reads = _Reads()
    held = ((one.path, one.where) for one in before.places if isinstance(one.where, Tensor))
    trained = {_place(tensor): path for path, tensor in held if tensor.requires_grad}
    with reads if trained else nullcontext():
        seen = describe(load(), collate)
    moved, grown = frozenset[str](), frozenset[str]()
    if before.has_moved():
        after = Portrait(before.roots, thorough=False)
        paths = (*before.prints, *after.prints)
        moved = frozenset(p for p in paths if before.prints.get(p) != after.prints.get(p))
        # A cache that gives up one sample for another is as long as before.
        anew = {p for p in moved if (p in before.prints) != (p in after.prints)}
        filled = {p.rpartition("[")[0] for p in anew if p.endswith("]")}
        others = moved - anew - filled
        grown = frozenset(p for p in filled if not any(is_below(q, {p}) for q in others))
        moved = frozenset(p for p in moved | filled if not is_below(p, grown))
    read = frozenset(trained[place] for place in trained.keys() & reads.places)
    return seen._replace(moved=moved, grown=grown, read=read)


class Fingerprint:
    """One loader's data set and collation: what they are, and whether they are so still.

    Used from the training thread only.
    """

    def __init__(self, roots: Mapping[str, Any], source: Any) -> None:
        """Describe all that decides a sample.

        Args:
            roots: Objects by name; a `fingerprint` of the data set's own replaces samples and plain
                attributes.
            source: The `LoaderSource`, which is asked to `look_at` samples.
        """
        self._roots, self._source = roots, source
        self._text: str | None = None
        self.is_shared = False
        """Whether all that was seen to change last lies where every process sees it, and lay there
        before."""
        self._in_memory = dict[str, int]()
        """Where what is shared was when the data were looked at last, by path."""
        self._known, self.is_new = set[str](), True
        """All texts that were taken, and whether the last one was none of those before it."""
        self.age = 0
        """How often the data were seen to be others than before."""
        self._portraits: tuple[Portrait, Portrait]
        self._shown = Look([], None)
        """What loading has shown at first."""
        self._grown, self._edited = set[str](), set[str]()
        """Paths of containers to which loading adds, and of what was another in them."""
        self._prints: dict[int, int | None] = {}
        self._seen: tuple[list[int], Look] | None = None
        """Samples that are asked again where something has moved that may decide them."""
        self._turn, self._sample_s = 0, 1.0
        self._free_s = [FREE_S] * 3
        """What is left of it at ends of passes, in the middle of them, and for samples, of which
        a few may cost a worker."""
        self._next_full = self._next_samples = self._next_look = 0.0
        """When all is to be read again, and samples, and when to look in the middle of a pass."""
        self._glance: Portrait
        """Of the data as they were when they were looked at last."""
        self._noted: Portrait | None = None
        self._tensors, self._versions = list[Tensor](), list[int]()
        """Of the glance that was noted last: a trained model's may be written to in each step."""

    def __str__(self) -> str:
        """Return text that differs between data sets that give other samples."""
        if self._text is None:
            self._text = self._take()
        return self._text

    @property
    def why_not(self) -> str | None:
        """Say so if what a sample is depends on how much was loaded before."""
        name = self._shown.decides if str(self) else None
        return name and (
            f"{name!r} counts what is loaded, and decides what a sample is; set it in the loop, "
            "before an epoch"
        )

    def changed(self, *, midway: bool = False) -> str | None:
        """Say what is not as it was when the text was taken; None if nothing is.

        The text is then another one. Beyond the first `FREE_S`, what takes longer than a glance
        costs `MAX_SHARE` of the time at most, and `midway`, in a pass, all of it does; samples are
        loaded there only where something has moved that may decide them.
        """
        if self._text is None:
            return None
        started = time.perf_counter()
        with without_modes():  # the loop's may be on in the middle of a pass
            what = self._changed(midway)
            took = time.perf_counter() - started
            what = self._other_samples() if what is None and not midway else what
        if self._noted is not self._glance:
            held = [o.where for o in self._glance.places if not is_below(o.path, self._shown.moved)]
            tensors = (one for one in held if isinstance(one, Tensor) and not one.is_inference())
            trained_first = sorted(tensors, key=attrgetter("requires_grad"), reverse=True)
            self._tensors = trained_first[:_MAX_TENSORS]
            self._in_memory, self._noted = _shared(self._glance), self._glance
        self._versions = list(map(_version, self._tensors))
        self._free_s[midway] -= took
        is_free = self._free_s[True] > 0
        # A glance at an end of a pass is no reason for a look in the middle that is not due.
        next_look = time.perf_counter() + took / MAX_SHARE
        self._next_look = 0.0 if is_free else max(self._next_look, next_look)
        if what is not None:
            self._text, self.age = None, self.age + 1
        return what

    def is_idle_number(self, path: str) -> bool:
        """Whether what has changed is a number that changes no sample of those that are known: that
        of an epoch, as like as not, and another one in the next; or a script's table of settings.
        """
        held = {one.path: one.where for one in self._glance.places}
        top, _, name = path.rpartition(".")
        table = held.get(path, held.get(path.rpartition("[")[0]))
        some = table if isinstance(table, dict) and len(table) <= NUM_SAMPLES else ()
        is_idle = {*map(type, some)} == {str}
        with Attempt():
            value = getattr(held.get(top), name, None)
            is_idle |= isinstance(value, int | float | str | np.generic)
        return is_idle and not self._gives_others()

    def is_due(self, now: float) -> bool:
        """Whether it is worth looking in the middle of a pass."""
        return now >= self._next_look or list(map(_version, self._tensors)) != self._versions

    def _changed(self, midway: bool) -> str | None:
        quick, (seen, before) = self._glance, self._portraits
        if has_moved := quick.has_moved():
            self._glance = quick = Portrait(self._roots, thorough=False)
        started = time.perf_counter()
        sees_all = midway and quick.is_whole and not has_moved
        is_due = not sees_all and (self._free_s[midway] > 0 or started >= self._next_full)
        if not is_due and not (has_moved and self._surely(seen, quick)):
            return None
        full, self.is_shared = Portrait(self._roots), False
        if surely := self._surely(before, full):
            self._edited.update(path for path in surely if is_below(path, self._grown))
            lies = _shared(quick)
            self.is_shared = all(self._in_memory.get(path, 0) == lies.get(path) for path in surely)
            return surely[0]
        moved = before.differences(full, self._shown.moved, self._grown) if is_due else []
        self._portraits = quick, full
        what = moved[0] if moved and self._gives_others() else None
        now = time.perf_counter()
        self._next_full = now + (now - started) / MAX_SHARE
        return what

    def _surely(self, before: Portrait, now: Portrait) -> list[str]:
        """Return what is another, and decides samples whatever those that are known show."""
        left_out = self._shown.moved | before.doubtful | now.doubtful
        found = before.differences(now, left_out, self._grown)
        return found or [*self._shown.read.intersection(before.differences(now, set()))]

    def _gives_others(self) -> bool:
        """Load the samples that are known again, and collate them."""
        if self._seen is None:
            return True
        indices, before = self._seen
        with Attempt():
            now = self._look_at(indices)
            return now.prints != before.prints or before.together not in (now.together, None)
        return True

    def _other_samples(self) -> str | None:
        """Read a few of the samples again."""
        began, known, free_s = time.perf_counter(), list(self._prints), self._free_s[2]
        if free_s <= 0 and began < self._next_samples:
            return None
        num = min(max(NUM_AGAIN, int(FREE_SHARE * free_s / self._sample_s)), len(known))
        some = [known[i % len(known)] for i in range(self._turn, self._turn + num)]
        self._turn += num
        prints: Sequence[Any] = ()
        with Attempt():  # what cannot be read now is no other data
            prints = self._look_at(some).prints if some else ()
        others = [i for i, now in zip(some, prints, strict=False) if now != self._prints[i]]
        took = time.perf_counter() - began
        self._free_s[2], self._next_samples = free_s - took, began + took / MAX_SHARE
        # As at first, all together: a data set may give out memory of its own in turns.
        return f"sample {others[0]!r}" if others and self._gives_others() else None

    def _look_at(self, indices: list[int], before: Portrait | None = None) -> Look:
        started = time.perf_counter()
        seen: Look = self._source.look_at(indices, before)
        took = time.perf_counter() - started  # once it may be another program's time
        self._sample_s = min(self._sample_s, took / max(len(indices), 1))
        return seen

    def _take(self) -> str:
        dataset, digest = self._roots["data set"], xxhash.xxh3_128()
        length = len(dataset)
        self._glance = Portrait(self._roots, thorough=False)
        self._portraits = self._glance, Portrait(self._roots)
        self._prints, self._seen, self._shown = {}, None, Look([], None)
        own = any(path.endswith("data set.fingerprint") for path in self._portraits[1].prints)
        doubtful = self._portraits[1].doubtful
        if doubtful or not own:
            indices = np.unique(np.linspace(0, length - 1, min(length, NUM_SAMPLES)).astype(int))
            with Attempt() as tried:
                self._see(indices.tolist())
            if tried.error is not None:  # not indexed by 0..n-1
                self._prints = {-1: None}
                with Attempt():
                    self._shown = self._source.look_at(None, self._glance)
            self._prints = {} if own else self._prints
            if None in self._prints.values():
                # Nothing is reused by another run, rather than something that may be another's.
                digest.update(os.urandom(16))
                self._prints = {}
        left_out = self._shown.moved | doubtful | self._grown
        prints = self._portraits[1].prints.items()
        lasting = [p for p in prints if p[0] in self._edited or not is_below(p[0], left_out)]
        together = self._seen[1].together if self._seen is not None and doubtful else None
        seen = lasting, list(self._prints.items()), together
        digest.update(repr(seen).encode("utf-8", "replace"))
        # What vouches for itself and names its samples may grow.
        size = "" if own and self._roots.get("sample_id") is not None else f"[{length}]"
        text = f"{kind_name(type(dataset))}{size}:{digest.hexdigest()}"
        self.is_new = text not in self._known
        self._known.add(text)
        return text

    def _see(self, indices: list[int]) -> None:
        """Load samples for the first time."""
        seen = self._look_at(indices, self._glance)
        if self._portraits[1].doubtful and self._look_at(indices).together != seen.together:
            seen = seen._replace(together=None)  # the collate function draws
        self._grown |= seen.grown
        # What loading fills at first, and writes over later.
        over = {one for one in self._grown if any(is_below(path, {one}) for path in seen.moved)}
        seen = seen._replace(moved=seen.moved | over)
        self._shown, self._seen = seen, (indices, seen)
        self._prints = dict(zip(indices, seen.prints, strict=True))


def _shared(portrait: Portrait) -> dict[str, int]:
    """Return where in memory that processes share something lies, by path."""
    shared = (one for one in portrait.places if is_in_shared_memory(one.where))
    return {one.path: _place(one.where) or id(one.where) for one in shared}


def sample_print(sample: Any) -> int | None:
    """Return what tells a sample from others; None if it holds something without bytes."""
    with suppress(TypeError):
        prints = [(path, leaf_print(leaf)) for path, leaf in flatten(sample, -1)[1].items()]
        return xxhash.xxh3_64_intdigest(repr(prints).encode("utf-8", "replace"))
    return None
