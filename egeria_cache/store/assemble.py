"""The rows of a batch that were read -> one value per name. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.store.codecs.lossy import unpack
from egeria_cache.store.fill import Batch

__all__ = ["assemble"]


def assemble(batch: Batch) -> dict[str, Tensor | list[Any]]:
    """Zero the missing rows; where shapes differ, turn a column into a list of tensors."""
    names = batch.head.layout.names
    columns = [
        unpack(column, field.shape, field.dtype, field.storage)
        if isinstance(column, Tensor) and field.dtype is not None
        else column
        for field, column in zip(batch.head.layout.fields, batch.columns, strict=True)
    ]
    for row, values in list(batch.odd.items()):
        if set(values) != set(names):
            batch.hit[row] = False
            del batch.odd[row]
    if not batch.odd and batch.hit.all():
        return dict(zip(names, columns, strict=True))
    missing = torch.from_numpy(np.flatnonzero(~batch.hit))
    fields: dict[str, Tensor | list[Any]] = {}
    for name, column in zip(names, columns, strict=True):
        if isinstance(column, Tensor):
            same = all(
                isinstance(item := values[name], Tensor)
                and item.shape == column.shape[1:]
                and item.dtype == column.dtype
                for values in batch.odd.values()
            )
            if same:
                for row, values in batch.odd.items():
                    column[row] = values[name]
                if len(missing):
                    column[missing] = torch.zeros((), dtype=column.dtype)
                fields[name] = column
                continue
            column = [column[row] if batch.hit[row] else None for row in range(len(column))]
        for row, values in batch.odd.items():
            column[row] = values[name]
        fields[name] = column
    return fields
