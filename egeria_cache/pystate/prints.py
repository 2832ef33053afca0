"""Short prints of values: equal values give equal prints, in any process.

Whole content is hashed as long as it is cheap (`THOROUGH_BYTES`); what lies beyond is looked at in
many places. xxh3 reads about 10 GB/s; `marshal`, which writes nested lists of plain values in C,
about a hundred million values in ten seconds.
"""

from __future__ import annotations

import marshal
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis)})
LONG = 1 << 20
"""Bytes of an array, or elements of a list, above which a quick look does not read all of it."""
THOROUGH_BYTES = 1 << 30
NUM_CHUNKS, CHUNK_BYTES = 512, 4096


def plain_print(value: Any) -> int | None:
    """Return the print of a plain value or a container of nothing else; None for what is not."""
    kind = type(value)
    if kind in PLAIN or kind is range:
        text = value if kind is bytes else f"{kind.__name__}{value!r}".encode("utf-8", "replace")
        return xxhash.xxh3_64_intdigest(text)
    if kind in (list, tuple):
        if not _holds_plain(value):
            return None
    elif kind is dict:
        if not (_holds_plain(value) and _holds_plain(value.values())):
            return None
    else:
        return None
    with suppress(ValueError):  # deeper inside lies something else
        # Version 2: no references, which would depend on who else holds the parts.
        return xxhash.xxh3_64_intdigest(marshal.dumps(value, 2))
    return None


def _holds_plain(values: Any) -> bool:
    """Whether elements are plain, or lists and tuples whose elements are, as far as is seen."""
    kinds = set(map(type, values))
    if kinds <= PLAIN:
        return True
    if not kinds <= PLAIN | {list, tuple}:
        return False
    inner = chain.from_iterable(v for v in values if type(v) in (list, tuple))
    return set(map(type, inner)) <= PLAIN | {list, tuple}


def is_long(value: Any) -> bool:
    """Whether reading all of it takes a time that is felt."""
    if isinstance(value, np.ndarray):
        return value.nbytes > LONG
    if isinstance(value, Tensor):
        return value.layout == torch.strided and value.numel() * value.element_size() > LONG
    if type(value) in (list, tuple, dict):
        return len(value) > LONG >> 6
    return False


def tensor_print(tensor: Tensor, limit: int = THOROUGH_BYTES) -> int:
    """Return the print of a tensor of any kind; above `limit` bytes, of parts of it."""
    what = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        parts = [tensor_print(part, limit) for part in _parts_of(tensor)]
        return xxhash.xxh3_128_intdigest(f"{what}{parts}".encode())
    tensor = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    data = tensor if tensor.is_contiguous() else tensor.contiguous()
    flat = data.reshape(-1).view(torch.uint8)
    if flat.numel() > limit and not flat.is_cpu:
        flat = flat[:: max(1, flat.numel() // (NUM_CHUNKS * CHUNK_BYTES))]
    return _bytes_print(what, flat.cpu().numpy(), limit)


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that pickling makes another one of; none of what has no data."""
    if tensor.is_meta or tensor.is_mkldnn:
        return []
    _, parts, *_ = tensor.detach().__reduce_ex__(2)
    return [part for part in tree_leaves(parts) if isinstance(part, Tensor)]


def array_print(array: np.ndarray, limit: int = THOROUGH_BYTES) -> int:
    """Return the print of an array without objects; above `limit` bytes, of parts of it."""
    what = f"{array.dtype}{array.shape}"
    if isinstance(array, np.memmap):
        path = Path(str(array.filename))
        state = path.stat() if path.exists() else None
        what += f"{path}{state and (state.st_size, state.st_mtime_ns)}"
        limit = min(limit, LONG)
    if not array.flags.c_contiguous:
        array = array[:: max(1, array.nbytes // max(limit, LONG))]
    return _bytes_print(what, np.ascontiguousarray(array).reshape(-1).view(np.uint8), limit)


def _bytes_print(what: str, flat: np.ndarray, limit: int) -> int:
    digest = xxhash.xxh3_128(what.encode())
    if flat.nbytes <= max(limit, NUM_CHUNKS * CHUNK_BYTES):
        digest.update(flat.data)
    else:
        for start in np.linspace(0, flat.nbytes - CHUNK_BYTES, NUM_CHUNKS).astype(int):
            digest.update(flat[start : start + CHUNK_BYTES].data)
    return digest.intdigest()
