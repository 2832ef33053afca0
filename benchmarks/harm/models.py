"""Small models for the tasks that time_to_accuracy has none for, and an optimizer like Muon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.time_to_accuracy.text import VOCABULARY, Block

__all__ = ["ConvText", "Muon", "VisionTransformer"]


class VisionTransformer(nn.Module):
    """Images (B, 1, 16, 16) to logits (B, 10): patches of 4x4, a class token, pre-norm blocks."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


class ConvText(nn.Module):
    """Characters (B, T) to logits (B, C): an embedding, five convolutions, a mean."""

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 5, 2 if index in (1, 3) else 1, 2),
                nn.BatchNorm1d(width),
                nn.ReLU(),
            )
            for index in range(5)
        )
        self.head = nn.Linear(width, num_outputs)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(codes).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(2))
        return logits


class Muon(torch.optim.Optimizer):
    """Muon for matrices (momentum made orthogonal by five Newton-Schulz steps), Adam for the rest.

    After Jordan et al. 2024; one rate for both, Adam's scaled by `adam`.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, adam: float = 0.15
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "adam": adam})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    own = _orthogonal if parameter.dim() == 2 else _adam
                    own(parameter, parameter.grad, state, group)


def _orthogonal(p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    buffer = state.setdefault("momentum", torch.zeros_like(p))
    buffer.lerp_(gradient, 1 - group["momentum"])
    x = gradient.lerp(buffer, group["momentum"])
    x = x / (x.norm() + 1e-7)
    flipped = x.shape[0] > x.shape[1]
    x = x.T if flipped else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.T if flipped else x
    p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def _adam(p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    first = state.setdefault("first", torch.zeros_like(p))
    second = state.setdefault("second", torch.zeros_like(p))
    step = state["step"] = state.get("step", 0) + 1
    first.lerp_(gradient, 0.1)
    second.lerp_(gradient.square(), 0.01)
    size = (second / (1 - 0.99**step)).sqrt_().add_(1e-8)
    p.addcdiv_(first / (1 - 0.9**step), size, value=-group["lr"] * group["adam"])


def pad_and_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (B, 1, H, W), each moved by up to a pixel, its border repeated."""
    padded = F.pad(images, (1,) * 4, mode="replicate")
    offsets = torch.randint(3, (len(images), 2), generator=generator).tolist()
    size = images.shape[-1]
    return torch.stack(
        [x[:, a : a + size, b : b + size] for x, (a, b) in zip(padded, offsets, strict=True)]
    )
