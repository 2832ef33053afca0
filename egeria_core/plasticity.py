"""Plasticity of a layer: how far its output is from the reference's.

Pure (paper, section 4.2; Tung & Mori 2019, eq. 3-4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sp_loss(train_act: Tensor, ref_act: Tensor) -> Tensor:
    """Return the Similarity-Preserving distance of two activations (Tung & Mori 2019).

    Args:
        train_act: Training model's output, shape (B, ...), floating point.
        ref_act: Reference output for the same samples in the same order, shape (B, ...);
            trailing dims may differ from `train_act`.

    Returns:
        Scalar float32 in [0, 4/B]; 0 means identical pair-wise similarity. It depends on B (the
        same noise reads lower in a larger batch), so compare readings of one batch size only.

    Raises:
        ValueError: Batch sizes differ, or B < 2 (one sample has no pairs).
    """
    if train_act.dim() < 1 or ref_act.dim() < 1 or train_act.shape[0] != ref_act.shape[0]:
        raise ValueError(
            "sp_loss compares the same samples: the batch sizes must be equal, got shapes "
            f"{tuple(train_act.shape)} and {tuple(ref_act.shape)}"
        )
    batch = train_act.shape[0]
    if batch < 2:
        raise ValueError(f"sp_loss compares pairs of samples and needs at least 2, got {batch}")
    difference = _similarity(train_act) - _similarity(ref_act)
    return difference.square().sum() / batch**2


def _similarity(act: Tensor) -> Tensor:
    """Gram matrix of the flattened samples with rows of unit L2 norm, shape (B, B), float32.

    Some public copies normalise the rows by L1 (`F.normalize(G, 1)` passes p=1): not this metric.
    """
    rows = act.detach().reshape(act.shape[0], -1).to(torch.float32)
    return F.normalize(rows @ rows.T, p=2.0, dim=1)
