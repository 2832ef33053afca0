"""Sequences of differing lengths, collate functions that pad them, and models that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

VOCABULARY = 50


class Sentences(Dataset[Any]):
    """Sample i is (tokens of shape (4..23,), label); token 0 is padding."""

    def __init__(self, num_samples: int, *, longest: int = 24, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.randint(4, longest, (num_samples,), generator=draw).tolist()
        self.tokens = [torch.randint(1, VOCABULARY, (size,), generator=draw) for size in sizes]
        self.num_loads = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.num_loads += 1
        return self.tokens[index].clone(), index % 3


def pad_right(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest of the batch."""
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(tokens, batch_first=True), torch.tensor(labels)


def pad_left(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest of the batch, before the tokens."""
    tokens, labels = zip(*samples, strict=True)
    longest = max(map(len, tokens))
    rows = [F.pad(row, (longest - len(row), 0)) for row in tokens]
    return torch.stack(rows), torch.tensor(labels)


def pad_by_eights(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Pad to the next multiple of eight."""
    tokens, labels = pad_right(samples)
    return F.pad(tokens, (0, -tokens.shape[1] % 8)), labels


class Encoder(nn.Module):
    """Embedding and layers of a transformer, masked or not, and what becomes of the positions."""

    def __init__(
        self, *, masked: bool = True, pool: str = "masked mean", norm: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(16) if norm else None
        self.head = nn.Linear(16, 3)
        self.masked, self.pool = masked, pool

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding if self.masked else None)
        if self.norm is not None:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if self.pool == "none":
            return hidden
        if self.pool == "folded":
            return hidden.flatten(0, 1)
        if self.pool == "time first":
            return hidden.transpose(0, 1)
        if self.pool == "first":
            return self.head(hidden[:, 0])
        if self.pool == "mean":
            return self.head(hidden.mean(1))
        if self.pool == "small term":
            return {"scores": self.head(masked_mean(hidden, tokens)),
                    "term": 1e-2 * hidden.pow(2).mean()}  # fmt: skip
        return self.head(masked_mean(hidden, tokens))


def masked_mean(hidden: Tensor, tokens: Tensor) -> Tensor:
    """Mean over the positions that hold a token."""
    weights = (tokens != 0).to(hidden.dtype)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)


class Waves(Dataset[Any]):
    """Sample i is (a wave of shape (1, 150..599), label)."""

    def __init__(self, num_samples: int) -> None:
        draw = torch.Generator().manual_seed(3)
        sizes = torch.randint(150, 600, (num_samples,), generator=draw).tolist()
        self.waves = [torch.randn(1, size, generator=draw) for size in sizes]

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.waves[index].clone(), index % 3


def pad_waves(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad to the longest of the batch; also give the lengths."""
    waves, labels = zip(*samples, strict=True)
    sizes = [wave.shape[1] for wave in waves]
    rows = [F.pad(wave, (0, max(sizes) - size)) for wave, size in zip(waves, sizes, strict=True)]
    return torch.stack(rows), torch.tensor(sizes), torch.tensor(labels)


class Listener(nn.Module):
    """Strided convolutions, then a layer over time that respects the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(1, 8, 10, 5), nn.ReLU(), nn.Conv1d(8, 16, 3, 2), nn.ReLU(),
            nn.Conv1d(16, 16, 3, 2),
        )  # fmt: skip
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, waves: Tensor, sizes: Tensor) -> Tensor:
        hidden = self.convs(waves).transpose(1, 2)
        for kernel, stride in ((10, 5), (3, 2), (3, 2)):
            sizes = (sizes - kernel) // stride + 1
        padding = torch.arange(hidden.shape[1])[None] >= sizes[:, None]
        hidden = self.layer(hidden, src_key_padding_mask=padding)
        weights = (~padding).to(hidden.dtype)[..., None]
        return self.head((hidden * weights).sum(1) / weights.sum(1))


class ByTokens:
    """Batch sampler that fills batches up to a number of tokens, padding included."""

    def __init__(self, sizes: Sequence[int], budget: int) -> None:
        self.sizes, self.budget, self.epoch = sizes, budget, 0

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        batch: list[int] = []
        for index in torch.randperm(len(self.sizes), generator=draw).tolist():
            longest = max(self.sizes[i] for i in [*batch, index])
            if batch and longest * (len(batch) + 1) > self.budget:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def freeze_front(model: nn.Module, *names: str) -> None:
    """Freeze the modules of these names, and train the others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))


Step = Callable[[nn.Module, Any], Tensor]


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of a model that gives scores."""
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels)
