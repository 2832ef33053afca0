"""Whether the prefix only computes: run again on the same copy, nothing of it may move.

What settles after the first run (a memo, a mask kept for its shape) is harmless: skipping it skips
nothing. What moves with every run (a counter, a moving average, a private generator, a growing
list) would stand still on hits, and what is left behind by a run would be that of another batch.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Copier, is_foreign, outside_state, own_dict, own_slots
from egeria_cache.skip.prove.evidence import Evidence, recompute, rest
from egeria_cache.skip.serve.plan import Recipe

_NOT_STATE = frozenset({"_modules", "_parameters", "training", "train", "forward"})
_MAX_DEPTH = 12

Attribute = tuple[nn.Module, str, str]
"""(the user's module, attribute, "writes to" or "leaves behind")"""


class Repeats:
    """The prefix three times on one copy of the model: twice on the same rows, then on others."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        twin = self._twin = evidence.twins.fresh()
        modules = evidence.prefix_modules()
        self._copiers: list[Copier] = []
        self._watched = [(module, twin.of(module)) for module in modules]
        before = self._copy()
        self.first = recompute(evidence, twin=twin)
        settled = self._copy()
        self.moving = [pair for pair, _ in self._changes(before)]
        self.again = recompute(evidence, self.first.rows, twin=twin)
        self._counting = list(self._changes(settled))
        settled = self._copy()
        self.last = recompute(evidence, rest(evidence.size), twin=twin, keeps_given=True)
        self._left = [pair for pair, holds in self._changes(settled, new_keys=False) if holds]
        evidence.common = twin

    def check(self, recipe: Recipe) -> None:
        """Raise if what a hit skips would have changed something.

        Raises:
            BoundaryError: And what that is.
        """
        skipped = {id(m) for step in recipe.steps if not step.run for m in step.module.modules()}
        around = {id(module) for module in recipe.ancestors} - skipped
        for (module, key), tensors in self._counting:
            if id(module) in skipped or (id(module) in around and tensors):
                raise self._impure(module, key, "moves with every call of the prefix")
        for module, key in self._left:
            if id(module) not in skipped | around:
                continue
            if key in module._buffers:
                raise self._impure(module, key, "is written to by the prefix")
            raise self._impure(
                module, key, "is a tensor that the prefix leaves behind, which would be that of "
                "another batch when the prefix is skipped",
            )  # fmt: skip

    def reason(self) -> str | None:
        """Name what moved between two runs on the same rows, where their results differ."""
        for (module, key), _ in self._counting:
            return self._name(module, key)
        return None

    def _impure(self, module: nn.Module, key: str, how: str) -> BoundaryError:
        kind = "buffer" if key in module._buffers else "attribute"
        return BoundaryError.impure(
            self._evidence.boundary, f"the {kind} {self._name(module, key)!r} {how}"
        )

    def _name(self, module: nn.Module, key: str) -> str:
        name = self._evidence.names.get(id(module), "")
        return f"{name}.{key}" if name else key

    def _copy(self) -> list[dict[str, Any]]:
        copier = Copier(self._twin.model)
        self._copiers.append(copier)  # holds what copies refer to weakly
        return [_state(copier(copy)) for _, copy in self._watched]

    def _changes(
        self, before: list[dict[str, Any]], *, new_keys: bool = True
    ) -> Iterator[tuple[tuple[nn.Module, str], bool]]:
        """Yield (user's module, attribute), and whether tensors or arrays are what changed."""
        compare = _Comparison(new_keys=new_keys)
        for (module, copy), old in zip(self._watched, before, strict=True):
            now = _state(copy)
            for key in now:
                compare.tensors = False
                if not compare(old.get(key, _MISSING), now[key]):
                    yield (module, key), compare.tensors


class _Missing:
    pass


_MISSING = _Missing()


def _state(module: nn.Module) -> dict[str, Any]:
    own = {key: value for key, value in module.__dict__.items() if key not in _NOT_STATE}
    return {**own.pop("_buffers", {}), **own}


class _Comparison:
    """Compares a copy's state with that of an earlier moment, by content and to the bit."""

    def __init__(self, *, new_keys: bool) -> None:
        self._new_keys = new_keys
        self.tensors = False
        """Whether a tensor or an array differed."""

    def __call__(self, a: Any, b: Any, depth: int = 0) -> bool:
        if a is b or depth > _MAX_DEPTH:
            return True
        if isinstance(b, Tensor):
            self.tensors |= not (same := isinstance(a, Tensor) and _same_tensor(a, b))
            return same
        if isinstance(b, np.ndarray):
            same = isinstance(a, np.ndarray) and _same_bytes(a, b)
            self.tensors |= not same
            return same
        if isinstance(b, weakref.ref) and isinstance(a, weakref.ref):
            return self(a(), b(), depth + 1)
        if isinstance(a, _Missing):
            self.tensors |= _holds_tensor(b)
            return False
        if type(a) is not type(b):
            return False
        if isinstance(b, dict):
            return self._same_dicts(a, b, depth)
        if isinstance(b, list | tuple | deque):
            if len(a) != len(b):
                self.tensors |= _holds_tensor(b)
                return False
            return self._same_items(zip(a, b, strict=True), depth)
        if isinstance(b, set | frozenset):
            return len(a) == len(b)
        return self._same_objects(a, b, depth)

    def _same_dicts(self, a: dict[Any, Any], b: dict[Any, Any], depth: int) -> bool:
        if len(a) != len(b) and self._new_keys:
            self.tensors |= _holds_tensor(b)
            return False
        pairs = zip(a.values(), b.values(), strict=False)  # keys may be copies: by order
        return self._same_items(pairs, depth)

    def _same_items(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> bool:
        same = [self(x, y, depth + 1) for x, y in pairs]  # to the end: tensors are looked for
        return all(same)

    def _same_objects(self, a: Any, b: Any, depth: int) -> bool:
        if isinstance(b, torch.Generator):
            return torch.equal(a.get_state(), b.get_state())
        if isinstance(b, np.random.Generator):
            return bool(repr(a.bit_generator.state) == repr(b.bit_generator.state))
        if isinstance(b, np.random.RandomState):
            return str(a.get_state()) == str(b.get_state())
        if isinstance(b, random.Random):
            return bool(a.getstate() == b.getstate())
        if isinstance(b, bool | int | float | complex | str | bytes):
            return bool(a == b or a != a)
        if (state := outside_state(b)) is not None:
            return self(outside_state(a), state, depth)
        if isinstance(b, nn.Module) or callable(b) or is_foreign(b):
            return True
        before, now = ({**(own_dict(one) or {}), **own_slots(one)} for one in (a, b))
        return self._same_dicts(before, now, depth)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.layout != torch.strided or a.is_meta:
        return True
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and (a.dtype == object or a.tobytes() == b.tobytes())


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor | np.ndarray)
