"""Operations on a leaf that the user's loop may do between the loader and the model.

Each is pure, per sample, and takes no other tensor, so that it can be repeated on other rows: a
move, a cast, a change of layout, arithmetic with plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["IN_PLACE", "Op", "outside_inference_mode"]


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make ordinary tensors, also where inference mode is on: those have a version counter."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


_KEEPS_VALUES = {
    Tensor.cuda, Tensor.cpu, Tensor.pin_memory, Tensor.contiguous, Tensor.clone, Tensor.detach,
}  # fmt: skip
_MOVES = _KEEPS_VALUES | {
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.long, Tensor.int,
}  # fmt: skip
_ARITHMETIC = {
    Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, torch.add, torch.sub, torch.mul, torch.div,
    Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__truediv__,
    Tensor.__radd__, Tensor.__rmul__,
}  # fmt: skip


IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__iadd__: Tensor.add, Tensor.add_: Tensor.add,
    Tensor.__isub__: Tensor.sub, Tensor.sub_: Tensor.sub,
    Tensor.__imul__: Tensor.mul, Tensor.mul_: Tensor.mul,
    Tensor.__itruediv__: Tensor.div, Tensor.div_: Tensor.div,
}  # fmt: skip
"""Operations that write to their tensor, and those that give the same values without."""


class Op:
    """One recorded operation on a leaf: pure, per sample, and without other tensors."""

    __slots__ = ("args", "device", "func", "key", "kwargs")

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        key: str,
        device: torch.device | None,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.key, self.device = key, device

    @classmethod
    def record(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Op | None:
        """Return the operation, or None if it is not one that may be repeated on other rows."""
        if func in _MOVES:
            return cls._move(func, args, kwargs)
        if func not in _ARITHMETIC or not all(
            isinstance(value, int | float) for value in (*args, *kwargs.values())
        ):
            return None
        key = f"{func.__name__}{tuple(args)!r}{dict(sorted(kwargs.items())) or ''}"
        return cls(func, tuple(args), kwargs, key=key, device=None)

    @classmethod
    def _move(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Op | None:
        if func is not Tensor.to:
            device = torch.device("cuda") if func is Tensor.cuda else None
            device = torch.device("cpu") if func is Tensor.cpu else device
            if func is Tensor.cuda and (args or kwargs.get("device") is not None):
                where = args[0] if args else kwargs["device"]
                device = torch.device("cuda", where) if isinstance(where, int) else where
                device = torch.device(device) if isinstance(device, str) else device
            text = f"{func.__name__}({kwargs.get('memory_format', '')})"
            key = "" if func in _KEEPS_VALUES and not kwargs.get("memory_format") else text
            return cls(func, tuple(args), kwargs, key=key, device=device)
        if any(
            type(value) is not Tensor and isinstance(value, Tensor)
            for value in (*args, *kwargs.values())
        ):
            return None
        other = {k: v for k, v in kwargs.items() if k not in ("copy", "other")}
        if "other" in kwargs:
            args = (kwargs["other"], *args)
        rest = args[:3] if len(args) > 3 else args
        device, dtype, _, memory_format = torch._C._nn._parse_to(*rest, **other)
        key = "".join(f"to({value})" for value in (dtype, memory_format) if value is not None)
        return cls(func, tuple(args), kwargs, key=key, device=device)

    def keeps_dtype(self, tensor: Tensor) -> bool:
        """Whether the result fits into the tensor it was made from."""
        meta = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return self.run(meta).dtype == tensor.dtype

    def aliases(self, before: Tensor, after: Tensor) -> bool:
        """Whether the result shares the memory of what it is made from (metas of both)."""
        if self.func is Tensor.clone or self.kwargs.get("copy"):
            return False
        return self.func in _MOVES and (before.dtype, before.stride()) == (
            after.dtype,
            after.stride(),
        )

    def run(self, data: Tensor) -> Tensor:
        """Apply the operation to some rows (or, without moving it, to a meta tensor)."""
        if data.is_meta and self.func in _MOVES:
            return self._run_meta(data)
        result: Tensor = self.func(data, *self.args, **self.kwargs)
        return result

    def _run_meta(self, meta: Tensor) -> Tensor:
        if self.func in _KEEPS_VALUES:
            memory_format = self.kwargs.get("memory_format")
            return meta if memory_format is None else meta.contiguous(memory_format=memory_format)
        if self.func is not Tensor.to:
            result: Tensor = self.func(meta, *self.args, **self.kwargs)
            return result
        kwargs = {k: v for k, v in self.kwargs.items() if k not in ("copy", "other")}
        args = (self.kwargs["other"], *self.args) if "other" in self.kwargs else self.args
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
        meta = meta if dtype is None else meta.to(dtype)
        return meta if memory_format is None else meta.to(memory_format=memory_format)
