"""Small models of the families that the controller must work on, and a training loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egeria_core import FreezeController
from tests.helpers.steps import take_step


class Block(nn.Module):
    """Basic residual block."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR-style ResNet of depth 6n + 2; `width` 16 is the paper's."""

    def __init__(self, n: int = 2, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(n, width, width, 1)
        self.layer2 = self._stage(n, width, 2 * width, 2)
        self.layer3 = self._stage(n, 2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, 10)

    @staticmethod
    def _stage(n: int, num_in: int, num_out: int, stride: int) -> nn.Sequential:
        first = Block(num_in, num_out, stride)
        return nn.Sequential(first, *(Block(num_out, num_out) for _ in range(n - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def mlp(*widths: int) -> nn.Sequential:
    """Linear and ReLU alternating; no randomness, no buffers."""
    layers: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(widths):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, size: int = 8, shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Tensor, Tensor]:
    """The batch of one training step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, *shape, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)


class Attention(nn.Module):
    """Post-norm transformer block that takes a mask and returns a tuple, as BERT's does."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        b, t, d = hidden.shape
        q, k, v = self.qkv(hidden).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (d // self.heads) ** -0.5
        if mask is not None:
            scores = scores + mask
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(b, t, d)
        hidden = self.norm1(hidden + self.dropout(self.out(mixed)))
        hidden = self.norm2(hidden + self.dropout(self.down(F.gelu(self.up(hidden)))))
        return (hidden, scores)


class Bert(nn.Module):
    """BERT-like classifier: embeddings, masked blocks in a ModuleList, pooler, head."""

    def __init__(self, layers: int = 4, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(40, width)
        self.position = nn.Parameter(torch.randn(12, width) * 0.1)
        self.encoder = nn.ModuleList(Attention(width, dropout) for _ in range(layers))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.zeros_like(ids, dtype=torch.float32).masked_fill(ids == 0, -1e4)
        hidden = self.embeddings(ids) + self.position[: ids.shape[1]]
        for block in self.encoder:
            hidden = block(hidden, mask=mask[:, None, None, :])[0]
        out: Tensor = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        return out


class Vit(nn.Module):
    """ViT-like: patches, a class token of the model's own, nn.TransformerEncoderLayer blocks."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        block = partial(nn.TransformerEncoderLayer, width, 2, 4 * width, 0.1, batch_first=True)
        self.blocks = nn.Sequential(*(block() for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        out: Tensor = self.head(self.blocks(x)[:, 0])
        return out


class EncoderDecoder(nn.Module):
    """T5-like: the decoder is registered first, runs last, and reads the shared embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, 4 * width, 0.1, batch_first=True) for _ in range(3)
        )
        self.shared = nn.Embedding(40, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, 0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.shared(ids)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(ids.flip(1))
        for block in self.decoder:
            x = block(x, memory)
        out: Tensor = self.head(x.mean(1))
        return out


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet": (ResNet, "image"),
    "bert": (Bert, "tokens"),
    "vit": (Vit, "image"),
    "encoder_decoder": (EncoderDecoder, "tokens"),
    "mlp": (lambda: mlp(64, 32, 32, 32, 32, 10), "vector"),
}


def family_batch(kind: str, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The batch of one step for a model of FAMILIES."""
    x, y = batch(step, size)
    if kind == "vector":
        return x.flatten(1), y
    if kind == "tokens":
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, 40, (size, 8), generator=generator), y
    return x, y


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    controller: FreezeController | None,
    steps: range,
    lr: dict[int, float] | None = None,
) -> list[float]:
    """Train on images; `lr` maps a step to the rate from there on."""
    losses = []
    for step in steps:
        if lr and step in lr:
            for group in optimizer.param_groups:
                group["lr"] = lr[step]
        model.train()
        x, y = batch(step)
        loss = take_step(F.cross_entropy(model(x), y), optimizer)
        if controller is not None:
            controller.step(loss)
        losses.append(loss.item())
    return losses
