"""BERT-Base with a head for the answer's span (Devlin et al. 2019).

109.5 M parameters with the pooler, which question answering does not use and which is left out here
as it is in `transformers`: 108.9 M remain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import Attention, FeedForward, Residual
from .staged import Staged


class State(NamedTuple):
    """What goes from layer to layer."""

    h: Tensor
    """(B, T, W)."""
    mask: Tensor
    """Which tokens are none, (B, T), bool."""


class Embeddings(nn.Module):
    """Tokens, positions and segments."""

    def __init__(self, vocabulary: int, width: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(max_length, width)
        self.segments = nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, 1e-12), nn.Dropout(dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Both (B, T) to (B, T, W)."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        summed = self.tokens(tokens) + self.positions(at) + self.segments(segments)
        result: Tensor = self.dropout(self.norm(summed))
        return result


class Block(nn.Module):
    """Self-attention, feed-forward."""

    def __init__(self, width: int, num_heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, dropout)
        self.feed_forward = FeedForward(width, inner, nn.GELU())
        self.sums = nn.ModuleList(Residual(width, dropout, 1e-12) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """States (B, T, W) to states."""
        x = self.sums[0](x, self.attention(x, x, mask))
        result: Tensor = self.sums[1](x, self.feed_forward(x))
        return result


class Bert(Staged):
    """The defaults are Base, uncased."""

    def __init__(
        self,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        inner: int = 3072,
        vocabulary: int = 30_522,
        max_length: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, width, max_length, dropout)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, inner, dropout) for _ in range(num_layers)
        )
        self.front = ["embeddings"]
        self.layers = [f"blocks.{number}" for number in range(num_layers)]
        self.span = nn.Linear(width, 2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def enter(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> State:
        """All (B, T); the mask is bool, False where a token is padding."""
        return State(self.embeddings(tokens, segments), mask)

    def advance(self, state: State, number: int, layer: nn.Module) -> State:
        """Run one block."""
        return State(layer(state.h, state.mask[:, None, None]), state.mask)

    def leave(self, state: State) -> Tensor:
        """Return logits of the answer's first and last token, (B, T, 2)."""
        logits: Tensor = self.span(state.h)
        return logits
