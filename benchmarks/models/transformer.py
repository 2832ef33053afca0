"""Encoder and decoder for translation (Vaswani et al. 2017).

Base: 6 + 6 layers, width 512, 8 heads, 2,048 inner, one embedding of 37,000 word pieces for source,
target and output: 63 M parameters (the paper says 65 M). Tiny: fairseq's `transformer_tiny`, 2 + 2
layers, width 64, 2 heads, 64 inner. Freezing the front freezes the shared embedding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, FeedForward, Residual
from .staged import Staged

PAD = 0


class State(NamedTuple):
    """What goes from layer to layer."""

    source: Tensor
    target: Tensor
    """Token numbers, (B, S) and (B, T)."""
    memory: Tensor
    """The encoder's states so far, (B, S, W)."""
    h: Tensor | None
    """The decoder's states so far, (B, T, W)."""


class Embedding(nn.Module):
    """Tokens and sinusoidal positions."""

    positions: Tensor

    def __init__(self, tokens: nn.Embedding, max_length: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout = tokens, nn.Dropout(dropout)
        width = tokens.embedding_dim
        at = torch.arange(max_length)[:, None]
        angles = at * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        table = torch.stack((angles.sin(), angles.cos()), 2).flatten(1)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token numbers (B, T) to (B, T, W)."""
        width = self.tokens.embedding_dim
        h: Tensor = self.dropout(self.tokens(x) * math.sqrt(width) + self.positions[: x.shape[1]])
        return h


class EncoderLayer(nn.Module):
    """Self-attention, feed-forward."""

    def __init__(self, width: int, num_heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.feed_forward = FeedForward(width, inner, nn.ReLU())
        self.sums = nn.ModuleList(Residual(width, dropout, 1e-5) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """States (B, S, W) to states."""
        x = self.sums[0](x, self.attention(x, x, mask))
        result: Tensor = self.sums[1](x, self.feed_forward(x))
        return result


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, feed-forward."""

    def __init__(self, width: int, num_heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.cross = Attention(width, num_heads)
        self.feed_forward = FeedForward(width, inner, nn.ReLU())
        self.sums = nn.ModuleList(Residual(width, dropout, 1e-5) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, causal: Tensor, mask: Tensor) -> Tensor:
        """States (B, T, W) to states."""
        x = self.sums[0](x, self.attention(x, x, causal))
        x = self.sums[1](x, self.cross(x, memory, mask))
        result: Tensor = self.sums[2](x, self.feed_forward(x))
        return result


class Transformer(Staged):
    """The defaults are Base."""

    def __init__(
        self,
        num_layers: int = 6,
        width: int = 512,
        num_heads: int = 8,
        inner: int = 2048,
        vocabulary: int = 37_000,
        max_length: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        nn.init.normal_(tokens.weight, std=width**-0.5)
        self.source = Embedding(tokens, max_length, dropout)
        self.target = Embedding(tokens, max_length, dropout)
        sizes = (width, num_heads, inner, dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(num_layers))
        self.front = ["source", "target"]  # the embeddings, which share their table
        self.layers = [f"{part}.{i}" for part in ("encoder", "decoder") for i in range(num_layers)]

    @classmethod
    def tiny(cls, vocabulary: int = 37_000) -> Transformer:
        """Return Transformer-Tiny."""
        return cls(2, 64, 2, 64, vocabulary)

    def enter(self, source: Tensor, target: Tensor) -> State:
        """Token numbers (B, S), (B, T)."""
        return State(source, target, self.source(source), None)

    def advance(self, state: State, number: int, layer: nn.Module) -> State:
        """Run one layer of the encoder or of the decoder."""
        source, target, memory, h = state
        mask = (source != PAD)[:, None, None]
        if number < len(self.encoder):
            return State(source, target, layer(memory, mask), None)
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        h = self.target(target) if h is None else h
        return State(source, target, memory, layer(h, memory, causal, mask))

    def leave(self, state: State) -> Tensor:
        """Return logits (B, T, vocabulary)."""
        assert state.h is not None
        return F.linear(state.h, self.source.tokens.weight)
