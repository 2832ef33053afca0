"""A small encoder with a classifier."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.models import Staged

__all__ = ["Transformer"]


class Transformer(Staged):
    """Six encoder layers of width 128."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.layers = ["embed"], [f"blocks.{number}" for number in range(6)]
        self.embed = nn.Embedding(1000, 128)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in self.layers
        )
        self.head = nn.Linear(128, 10)

    def enter(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to (B, T, 128)."""
        states: Tensor = self.embed(tokens)
        return states

    def advance(self, state: Tensor, number: int, layer: nn.Module) -> Tensor:
        """Run one layer."""
        result: Tensor = layer(state)
        return result

    def leave(self, state: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        logits: Tensor = self.head(state.mean(1))
        return logits
