"""Notice that the frozen prefix is no longer what it was when its activations were stored.

Compared on every batch, for each parameter and buffer: is it in the same memory, with the same
version counter, frozen as it was, and are a few of its elements what they were (a write through
`p.data` moves no counter)? And for each module: is all of its Python state the same (`watch.py`)?
What differs is compared by content before it counts: weights that were loaded again, or swapped out
and back, are the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.pystate import Code
from egeria_cache.skip.state.content import ContentHash, ContentProbe, pointer, version
from egeria_cache.skip.state.watch import StateWatch

SEEN_LATE = "the content of a parameter or buffer of the prefix was changed"
"""Perhaps some batches ago: what was stored since is of neither state."""

Named = tuple[str, nn.Module | None, Tensor]
_version = attrgetter("_version")


class PrefixGuard:
    """Remembers parameters, buffers and modules as they are now, and says what changed.

    Args:
        tensors: (qualified name, owner, tensor); the owner is None for a plain constant.
        modules: (qualified name, module): the skipped modules; all are in inference mode.
        around: See `StateWatch`.
        code: Likewise.
        objects: Likewise.
        hashes: What the tensors hold; without it a tensor that was written to is a changed one.
    """

    def __init__(
        self,
        tensors: Iterable[Named],
        modules: Iterable[tuple[str, nn.Module]] = (),
        around: Iterable[tuple[str, nn.Module, Iterable[str]]] = (),
        code: Code | None = None,
        hashes: ContentHash | None = None,
        objects: Mapping[int, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self._given = list(tensors), list(modules), list(around), code, objects
        self.state = StateWatch(*self._given[1:])
        self._tensors = list(self._given[0])
        self._tensors += [(name, None, tensor) for name, tensor in self.state.tensors]
        self._slots = [_slots(owner, tensor) for _, owner, tensor in self._tensors]
        self._hashes = hashes
        self._contents = [hashes.of(t) if hashes is not None else "" for _, _, t in self._tensors]
        self._renew_tensors()

    def anew(self) -> PrefixGuard:
        """Return another guard of the same things as they are now, by identity and not content."""
        tensors = [self._now(i) for i in range(len(self._given[0]))]
        return PrefixGuard(tensors, *self._given[1:4], None, self._given[4])

    def renew(self) -> None:
        """Take the present state as the one to keep."""
        self.state.renew()
        self._tensors = [self._now(i) for i in range(len(self._tensors))]
        if self._hashes is not None:
            self._contents = [self._hashes.of(tensor) for _, _, tensor in self._tensors]
        self._renew_tensors()

    def _renew_tensors(self) -> None:
        values = [tensor for _, _, tensor in self._tensors]
        # An inference tensor has no version counter (and cannot be written to outside of the mode).
        self._counted = [tensor for tensor in values if not tensor.is_inference()]
        self._placed = [tensor for tensor in values if tensor.layout == torch.strided]
        self._versions = [tensor._version for tensor in self._counted]
        self._pointers = [tensor.data_ptr() for tensor in self._placed]
        self._probe = ContentProbe(values)

    def changed(self, *, wait: bool = False) -> str | None:
        """Name what changed, or return None. Costs about half a microsecond per tensor.

        Args:
            wait: Also for what a device says of the elements that lie there.
        """
        if (
            list(map(_version, self._counted)) != self._versions
            or list(map(Tensor.data_ptr, self._placed)) != self._pointers
        ) and (reason := self._explain()) is not None:
            return reason
        reason = self.state.changed()
        if reason is None and self.state.rebound:
            self.state.rebound = False
            reason = self._explain()
        if reason is None and self._probe.changed(wait=wait):
            return SEEN_LATE
        return reason

    def is_same(self) -> bool:
        """Whether all is as it was, to the last element that can be read at once."""
        return self.changed() is None and not self._probe.whole_changed()

    def settle(self) -> None:
        """Take over what the prefix's own run has left on its modules (memoised tables)."""
        if self.state.changed() is not None:
            self.state.renew()

    def _explain(self) -> str | None:
        """Compare by content; None, and watch the present tensors, if they hold the same."""
        now, moved = [self._now(i) for i in range(len(self._tensors))], self._moved()
        for (name, _, old), (_, _, new), content in zip(
            self._tensors, now, self._contents, strict=True
        ):
            if new is old and id(old) not in moved:
                continue
            if self._hashes is None or self._hashes.of(new) != content:
                how = "was changed" if new is old else "was replaced by another tensor"
                return f"{name!r} {how}"
        if self._probe.changed(wait=True) or self._probe.whole_changed():  # before it is renewed
            return SEEN_LATE
        self._tensors = now
        self._renew_tensors()
        return None

    def _moved(self) -> set[int]:
        """Ids of the tensors whose version or memory is another one."""
        versions = zip(self._counted, self._versions, strict=True)
        places = zip(self._placed, self._pointers, strict=True)
        moved = {id(tensor) for tensor, before in versions if version(tensor) != before}
        return moved | {id(tensor) for tensor, before in places if pointer(tensor) != before}

    def _now(self, i: int) -> Named:
        """Return the tensor that stands in the place of the i-th."""
        name, owner, tensor = self._tensors[i]
        for slot, key in self._slots[i]:
            current = slot.get(key)
            if isinstance(current, Tensor):
                return name, owner, current
        return name, owner, tensor


def _slots(owner: nn.Module | None, tensor: Tensor) -> list[tuple[dict[str, Any], str]]:
    """Return where the owner keeps a tensor."""
    if owner is None:
        return []
    slots: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
    return [(slot, key) for slot in slots for key, value in slot.items() if value is tensor]
