"""Notice that the frozen prefix is no longer what it was when its activations were stored.

Compared on every batch, for each parameter and buffer: is it in the same memory, with the same
version counter, frozen as it was, and are a few of its elements what they were (a write through
`p.data` moves no counter)? And for each module: is all of its Python state the same? That was laid
out as one flat list (`watch.py`): as long as nothing changed, comparing it is a walk in C, 20 ns a
value. What differs is compared by content before it counts: weights that were loaded again, or
swapped out and back, are the same weights.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest
from operator import attrgetter, contains, itemgetter, methodcaller
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from egeria_cache.attempt import is_beside
from egeria_cache.device import Answers, copies_beside, runs_late
from egeria_cache.pystate import Code, tensor_digest
from egeria_cache.skip.state import watch
from egeria_cache.skip.state.surroundings import bits
from egeria_cache.skip.state.watch import NOTHING, TABLES, Layout, is_alike, values_of

SEEN_LATE = "the content of a parameter or buffer of the prefix was changed"
"""Perhaps some batches ago: what was stored since is of neither state."""

Named = tuple[str, nn.Module | None, Tensor]
_version = attrgetter("_version")
_together: Any = np.concatenate


class PrefixGuard:
    """Remembers parameters, buffers and modules as they are now, and says what changed.

    Args:
        tensors: (qualified name, owner, tensor); the owner is None for a plain constant.
        modules: (qualified name, module): the skipped modules; all are in inference mode, and
            everything about them is watched.
        around: Of code that surrounds the boundary only what was seen to be read before it
            returned, be it an attribute, a child, or of the class.
        code: The functions that they run.
        by_content: Whether a tensor that was written to may be the same.
    """

    def __init__(
        self,
        tensors: Iterable[Named],
        modules: Iterable[tuple[str, nn.Module]] = (),
        around: Iterable[tuple[str, nn.Module, Iterable[str]]] = (),
        code: Code | None = None,
        *,
        by_content: bool = False,
    ) -> None:
        self._given, self._code = list(tensors), code or Code()
        self._modules, self._around = list(modules), list(around)
        self._renew_state()
        self._tensors = [*self._given, *((name, None, one) for name, one in self._layout.tensors)]
        values = [tensor for _, _, tensor in self._tensors]
        self._contents = list(map(tensor_digest, values)) if by_content else [""] * len(values)
        self._renew_tensors()

    def contents(self) -> Iterable[tuple[str, str]]:
        """Return (name, digest) of each tensor that it was given."""
        return ((named[0], one) for named, one in zip(self._given, self._contents, strict=False))

    def anew(self) -> PrefixGuard:
        """Return another guard of the same things as they are now, by identity and not content."""
        tensors = map(_now, self._tensors[: len(self._given)])
        return PrefixGuard(tensors, self._modules, self._around, self._code)

    def changed(self, *, wait: bool = False) -> str | None:
        """Name what changed, or return None. Costs about half a microsecond per tensor.

        Args:
            wait: Also for what a device says of the elements that lie there.
        """
        reason = None if self._is_state_same() else self._explain_state()
        if reason is None and (
            self._is_rebound
            or list(map(_version, self._counted)) != self._versions
            or list(map(Tensor.data_ptr, self._placed)) != self._pointers
        ):
            reason = self._explain_tensors()
        if reason is None and self._probe.changed(wait=wait):
            return SEEN_LATE
        return reason

    def is_same(self) -> bool:
        """Whether all is as it was, to the last element that can be read at once."""
        return self.changed() is None and not self._probe.whole_changed()

    def settle(self) -> None:
        """Take over what the prefix's own run has left on its modules (memoised tables)."""
        if not self._is_state_same() and self._explain_state() is not None:
            self._renew_state()

    # ---- tensors ------------------------------------------------------------------------------

    def _renew_tensors(self) -> None:
        values = [tensor for _, _, tensor in self._tensors]
        # An inference tensor has no version counter (and cannot be written to outside of the mode).
        self._counted = [tensor for tensor in values if not tensor.is_inference()]
        self._placed = [tensor for tensor in values if tensor.layout == torch.strided]
        self._versions = [tensor._version for tensor in self._counted]
        self._pointers = [tensor.data_ptr() for tensor in self._placed]
        self._probe = ContentProbe(values)
        self._is_rebound = False
        """Whether objects were replaced by equal ones since."""

    def _explain_tensors(self) -> str | None:
        """Compare by content; None, and watch the present tensors, if they hold the same."""
        now = list(map(_now, self._tensors))
        versions = zip(self._counted, self._versions, strict=True)
        moved = {id(tensor) for tensor, before in versions if tensor._version != before}
        pointers = zip(self._placed, self._pointers, strict=True)
        moved |= {id(tensor) for tensor, before in pointers if tensor.data_ptr() != before}
        both = zip(self._tensors, now, self._contents, strict=True)
        for (name, _, old), (_, _, new), content in both:
            is_moved = new is not old or id(old) in moved
            if not is_moved and runs_late(old.device):
                continue
            if content:  # the probe looks at memory that may be gone: shared with a process since
                is_same = tensor_digest(new) == content
            else:
                is_same = id(old) not in moved and is_alike(new, old)
            if not is_same:
                how = "was changed" if new is old else "was replaced by another tensor"
                return f"{name!r} {how}" if is_moved else SEEN_LATE
        if self._probe.device_changed(wait=True):  # before it is renewed
            return SEEN_LATE
        self._tensors = now
        self._renew_tensors()
        return None

    # ---- the Python state around them ---------------------------------------------------------

    def _renew_state(self) -> None:
        """Take the present state as the one to keep."""
        layout = self._layout = Layout(self._modules, self._around, self._code)
        modules = [module for _, module in self._modules]
        self.has_hooks = bool(watch.hooks_of(modules))
        # Most hooks' and buffers' dicts are empty: whether they still are is told in 8 ns.
        self._held = [list(values_of(container)) for _, container in layout.live]
        self._empty = [container for _, container in layout.live if not container]
        self._empty += (hooks for hooks in watch.GLOBAL_HOOKS if not hooks)
        layers = {id(vars(module)) for module in modules if _is_a(nn.Module, module)}
        full = [container for _, container in layout.live if container]
        full.sort(key=lambda container: id(container) not in layers)
        settings = chain.from_iterable(each for each in full if id(each) in layers)
        loose = [False, *(key not in self._code.names for key in settings)]
        self._iterables = [part for each in full for part in _apart(each)]
        self._seen = [look() for _, look in chain(layout.looks, layout.named)]
        idle = () if any(watch.GLOBAL_HOOKS) else (watch.global_hooks,)
        self._looks = [look for _, look in layout.looks if look not in idle]
        places = layout.places.values()
        self._getters = [itemgetter(*keys, keys[0]) for _, keys in places]
        self._found = [place for place, _ in places]
        self._passed = list(layout.passed.values())
        self._sizes = list(map(len, self._passed))
        self._values = self._look()
        both = enumerate(zip_longest(self._values, loose))
        self._numbers = itemgetter(0, 0, *(i for i, each in both if _is_number(*each)))
        # What differs where equal numbers do: 1 and True, 1.0 and 1, 0.0 and -0.0.
        self._exactly = marshal.dumps(self._numbers(self._values), _PLAINLY)
        self._classed = [module for _, module, *_ in (*self._modules, *self._around)]
        self._kinds = list(map(type, self._classed))
        self._absent = list(zip(*layout.absent, strict=True)) or [(), ()]

    def _look(self) -> list[Any]:
        """Return all that is there now: it begins with a number."""
        standing = map(_get, self._getters, self._found)
        seen = map(_call, self._looks)
        return [0, *chain.from_iterable(self._iterables), *seen, *chain.from_iterable(standing)]

    def _is_state_same(self) -> bool:
        """Whether the same things, or equal values, are where they were."""
        try:
            values = self._look()
            return (
                not any(self._empty)
                and not any(map(contains, *self._absent))
                and values == self._values
                and marshal.dumps(self._numbers(values), _PLAINLY) == self._exactly
                and list(map(len, self._passed)) == self._sizes
                and list(map(type, self._classed)) == self._kinds
            )
        except Exception as error:  # a comparison of arrays, or a container that shrank meanwhile
            if not is_beside(error):
                raise
            return False

    def _explain_state(self) -> str | None:
        """Compare value by value, by content; take over what is only another object."""
        names = self._code.names
        moot = {
            (id(vars(module)), key)
            for _, module in self._modules
            if id(module) not in self._code.others
            for key, kind in _MOOT.items()
            if kind is nn.Module or (_is_a(kind, module) and key not in names)
        }
        for (where, container), held in zip(self._layout.live, self._held, strict=True):
            keys = list(container) if isinstance(container, TABLES) else []
            found = zip_longest(keys, list(values_of(container)), held, fillvalue=NOTHING)
            for key, now, then in found:
                if not (now is then or (id(container), key) in moot or is_alike(now, then)):
                    path = where if key is NOTHING else f"{where}.{key}" if where else str(key)
                    return f"{_quoted(path)} changed"
        looks = chain(self._layout.looks, self._layout.named)
        for (where, look), seen in zip(looks, self._seen, strict=True):
            now = look()
            if now is not seen and not is_alike(now, seen):
                return f"{_quoted(where)} changed"
        if list(map(type, self._classed)) != self._kinds:
            return "a module of the prefix has another class"
        self._renew_state()
        self._is_rebound = True
        return None


def _now(named: Named) -> Named:
    """Return the tensor that stands in the place of another one by now."""
    name, owner, _ = named
    key = name.rpartition(".")[2]
    for slot in () if owner is None else (owner._parameters, owner._buffers, vars(owner)):
        if isinstance(current := slot.get(key), Tensor):
            return name, owner, current
    return named


_PLAINLY = 2
"""The version of `marshal` in which bytes tell nothing of who else holds a value."""
_END = (NOTHING,)
"""Stands before a container: what moved out of it into the one before is noticed."""
_MOOT: dict[str, Any] = {
    "training": nn.Module,  # held modules are put back, whoever set it
    "_is_full_backward_hook": nn.Module,
    "p": nn.modules.dropout._DropoutNd,
    "momentum": nn.modules.batchnorm._NormBase,
}
"""What decides nothing in inference mode, in which skipped modules are, if it is PyTorch's code
alone that reads it: schedules go through all of a model.
"""
_get, _call = itemgetter.__call__, methodcaller("__call__")


def _apart(container: Any) -> list[Any]:
    """Return what it holds, apart from what stands before if something can be put first."""
    values = values_of(container)
    is_named = isinstance(container, dict) and not isinstance(next(iter(values)), nn.Module)
    return [values] if is_named else [_END, values]


def _is_number(value: Any, is_loose: bool | None) -> bool:
    """Whether it is a number, or a tuple of some; of those of PyTorch's own layers, which take 1
    for True, if it may be 0.0 or -0.0.
    """
    if type(value) is tuple:
        return all(_is_number(one, is_loose) for one in value)
    return type(value) in ((float, complex) if is_loose else (bool, int, float, complex))


def _is_a(kind: type, module: nn.Module) -> bool:
    """Whether it is a layer of PyTorch's own, of that kind."""
    return isinstance(module, kind) and type(module).__module__.startswith("torch.nn.modules.")


def _quoted(where: str) -> str:
    return where if " " in where else repr(where)


_SAMPLED = 16
"""Elements looked at per tensor on each batch."""
_MAX_PENDING, _RARELY = 64, 16
"""Verdicts that a device may be behind with; and how much longer one without events is left."""
LOOK_EVERY_S = 2e-3
"""A look at what lies on a device takes a few kernels and a copy, some 30 us of the host: short
steps take turns."""
_CHUNK_BYTES = 1 << 15
"""Read in full with each batch, in turns over all tensors: about 3 us."""


class ContentProbe:
    """Looks at a few elements of every tensor, bit by bit, and at a piece of one of them in full.

    On an accelerator by one joined comparison whose verdict is read on the first call after the
    device has come so far: to wait for it would cost more than the batch that is then served too
    late. It looks once in two milliseconds at most; a device that would have to be waited for is
    asked once in 32.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        host: dict[np.dtype[Any], list[np.ndarray]] = {}
        apart: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
        self._pieces: list[memoryview] = []
        for tensor in tensors:
            view = _some_elements(tensor)
            if view is None:
                continue
            if not runs_late(view.device):
                host.setdefault(view.numpy().dtype, []).append(view.numpy())
                self._pieces += _pieces(tensor)
            else:
                apart.setdefault(view.device, {}).setdefault(view.dtype, []).append(view)
        self._host = list(host.values())
        self._bytes = b"".join(map(_together, self._host))
        self._hashes = list(map(xxhash.xxh3_64_intdigest, self._pieces))
        self._turn = 0
        self._device = [(views, _joined(views)) for views in apart.values()]
        self._verdicts, self._next_look = Answers(), 0.0
        self._every_s = LOOK_EVERY_S * (1 if all(map(copies_beside, apart)) else _RARELY)

    def changed(self, *, wait: bool = False) -> bool:
        """Whether anything looks different; `wait`: now, and not when a device last said so."""
        if b"".join(map(_together, self._host)) != self._bytes:
            return True
        if pieces := self._pieces:  # every element is looked at once in a round
            turn = self._turn = (self._turn + 1) % len(pieces)
            if xxhash.xxh3_64_intdigest(pieces[turn]) != self._hashes[turn]:
                return True
        return bool(self._device) and self.device_changed(wait)

    def whole_changed(self) -> bool:
        """Whether any element on the host looks different."""
        return list(map(xxhash.xxh3_64_intdigest, self._pieces)) != self._hashes

    def device_changed(self, wait: bool) -> bool:
        """The same of what lies on devices that run behind."""
        if wait:
            self._ask()
        if any(bool(verdict) for verdict, _ in self._verdicts.come(wait=wait)):
            return True
        now = time.perf_counter()
        if now >= self._next_look and len(self._verdicts.asked) < _MAX_PENDING:
            self._next_look = now + self._every_s
            self._ask()
        return False

    def _ask(self) -> None:
        for views, before in self._device:  # one copy of a byte
            self._verdicts.ask((_joined(views) != before).any())


def _joined(views: Mapping[torch.dtype, list[Tensor]]) -> Tensor:
    """Return the elements' bytes, in a few kernels however many tensors they are of."""
    parts = [torch.cat(each).view(torch.uint8) for each in views.values()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _some_elements(tensor: Tensor) -> Tensor | None:
    """Return a view of a few elements as integers, spread over the tensor's memory."""
    if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_meta:
        return None
    plain = _in_memory(tensor)
    extent = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
    step = max(1, extent // _SAMPLED)
    return bits(plain.as_strided((min(_SAMPLED, extent),), (step,), plain.storage_offset()))


def _in_memory(tensor: Tensor) -> Tensor:
    """Return it as it lies there: conjugated by nobody, in real numbers, and of what is quantised
    the bytes.
    """
    plain = tensor.detach()
    if plain.is_quantized:
        whole = torch.empty(0, dtype=torch.uint8, device=plain.device)
        return whole.set_(plain.untyped_storage())
    plain = plain.conj() if plain.is_conj() else plain
    plain = plain._neg_view() if plain.is_neg() else plain
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _pieces(tensor: Tensor) -> list[memoryview]:
    """Return views of a tensor's bytes, each small enough to be read with one batch."""
    if not tensor.is_contiguous():
        return []
    with torch._C.DisableTorchFunctionSubclass():
        data = _in_memory(tensor).reshape(-1)
        if data.data_ptr() != tensor.data_ptr():
            return []
        whole = data.view(torch.uint8).numpy()
    return [whole[i : i + _CHUNK_BYTES].data for i in range(0, len(whole), _CHUNK_BYTES)]
