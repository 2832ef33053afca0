"""From the samples that were measured to those of the whole data set: bytes by length. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["scale"]


def scale(rows: Mapping[str, Any], lengths: npt.ArrayLike, mean: npt.ArrayLike) -> float:
    """Return how many times as large the mean sample of a data set is as that of some records.

    Their bytes are taken as a fixed part and one for each unit of length, found by least squares.

    Args:
        rows: Per name, the values of N records: a tensor, or a list.
        lengths: Of these samples, shape (N, axes).
        mean: Of the data set's, shape (axes,).
    """
    own = np.asarray(lengths, float)
    sizes = np.zeros(len(own))
    for values in rows.values():
        sizes += [value.nbytes if isinstance(value, Tensor) else 0 for value in values]
    known = np.concatenate([np.ones((len(own), 1)), own], 1)
    parts, *_ = np.linalg.lstsq(known, sizes, rcond=None)
    typical = float(np.concatenate([[1.0], np.asarray(mean, float)]) @ parts)
    return max(typical, 0.0) / float(sizes.mean()) if sizes.any() else 1.0
