"""Attention and feed-forward as BERT and the Transformer have them: normalised after the sum."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head attention; queries from `x`, keys and values from `context`."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, W), context (B, S, W), mask bool, broadcast to (B, heads, T, S)."""
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Sequential):
    """Two linear maps."""

    def __init__(self, width: int, inner: int, activation: nn.Module) -> None:
        super().__init__(nn.Linear(width, inner), activation, nn.Linear(inner, width))


class Residual(nn.Module):
    """LayerNorm(x + dropout(h))."""

    def __init__(self, width: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width, eps), nn.Dropout(dropout)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Both (B, T, W)."""
        result: Tensor = self.norm(x + self.dropout(h))
        return result
