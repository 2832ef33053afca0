"""Activations as training makes them, for a store to keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .contestants import BATCH

__all__ = ["conv_activations", "transformer_activations"]


def conv_activations(num_samples: int) -> Tensor:
    """Post-ReLU output of residual blocks on crops of photographs: (N, 32, 16, 16), 32 KiB each."""
    from sklearn.datasets import load_sample_images

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(32, 32, 3, 1, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, 1, 1, bias=False),
            nn.BatchNorm2d(32),
        )

    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
    blocks = [block() for _ in range(3)]
    photographs = [
        torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        for image in load_sample_images().images
    ]
    out = []
    with torch.no_grad():
        for start in range(0, num_samples, BATCH):
            crops = []
            for one in range(start, min(start + BATCH, num_samples)):
                photograph = photographs[one % len(photographs)]
                top, left = (
                    int(torch.randint(0, limit - 32, ())) for limit in photograph.shape[1:]
                )
                crops.append(photograph[:, top : top + 32, left : left + 32])
            x = stem(torch.stack(crops))
            for one_block in blocks:
                x = (x + one_block(x)).relu()
            out.append(x)
    return torch.cat(out)


def transformer_activations(num_samples: int) -> Tensor:
    """Output of two pre-norm blocks on random tokens: (N, 64, 128), 32 KiB each."""
    torch.manual_seed(0)
    embedding = nn.Embedding(1000, 128)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    positions = torch.randn(64, 128)
    with torch.no_grad():
        return torch.cat(
            [
                encoder(embedding(torch.randint(0, 1000, (BATCH, 64))) + positions)
                for _ in range(0, num_samples, BATCH)
            ]
        )[:num_samples]
