"""Text that every machine has: the source of Python's own standard library; and a small GPT."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["VOCABULARY", "Transformer", "read_source", "windows"]

VOCABULARY = 128
"""ASCII; every other byte is read as the last code."""
_NOT_SOURCE = {"test", "tests", "idle_test", "__pycache__"}


def read_source(names: Sequence[str]) -> Tensor:
    """Return the source of modules and packages of the standard library as codes, (N,), int64.

    A package's files are read in the order of their names, its tests are left out.

    Raises:
        FileNotFoundError: The interpreter's library lacks one of them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = []
    for name in names:
        path = root / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        files = [file for file in files if not _NOT_SOURCE & set(file.relative_to(root).parts)]
        if not files:
            raise FileNotFoundError(f"there is no Python source in {path}")
        parts += [file.read_bytes() for file in files]
    codes = torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)
    return codes.clamp(max=VOCABULARY - 1).long()


def windows(codes: Tensor, length: int, count: int) -> Tensor:
    """Return `count` windows, (count, length), at equal distances over the text.

    Raises:
        ValueError: The text is too short for windows that do not overlap.
    """
    if count * length > len(codes):
        raise ValueError(f"{len(codes)} codes do not hold {count} windows of {length}")
    starts = torch.linspace(0, len(codes) - length, count).long()
    return torch.stack([codes[start : start + length] for start in starts.tolist()])


class Block(nn.Module):
    """Pre-norm attention and MLP (GPT-2), shape (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what attention and MLP add."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mlp


class Transformer(nn.Module):
    """Characters (B, T), int64, to logits: (B, T, C) of the next one, or (B, C) of the text.

    Args:
        num_blocks: Number of blocks.
        width: D.
        length: Largest T.
        num_outputs: C.
        pooled: Whether the outputs are of the whole text (the mean over its positions).
    """

    def __init__(
        self, num_blocks: int, width: int, length: int, num_outputs: int, *, pooled: bool = False
    ) -> None:
        super().__init__()
        self.pooled = pooled
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads=4, causal=True) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_outputs)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(codes) + self.position(torch.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x.mean(1) if self.pooled else x)
        return logits
