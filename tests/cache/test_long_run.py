"""Two hundred training steps, through loader, store and skip, end where the computed run ends."""

from __future__ import annotations

import pytest
import torch
from digits import ResNet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 40, 8, 40
LARGEST_BF16_DIFFERENCE = 1e-3
"""Of a loss, relative: rows that are merged with computed ones may round once more. 0 was seen."""


class Samples(Dataset):
    """Fixed inputs with noise from torch's global generator, and targets."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, *shape, generator=generator)
        self.targets = torch.randint(10, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        return x + 0.1 * torch.randn_like(x), self.targets[index]


class Transformer(nn.Module):
    """Three encoder layers with dropout, on sequences of vectors; a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def resnet() -> tuple[nn.Module, str, tuple[int, ...]]:
    model = ResNet(num_blocks=1, width=4)
    for module in (model.conv1, model.bn1, model.layer1):
        module.requires_grad_(False)
    return model, "layer1", (1, 8, 8)


def transformer() -> tuple[nn.Module, str, tuple[int, ...]]:
    model = Transformer()
    model.blocks[:2].requires_grad_(False)
    return model, "blocks.1", (6, 16)


def losses_of(make, directory, gate: str, dtype: torch.dtype) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model, boundary, shape = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = []
    with ActivationCache(model, directory, boundary, gate=gate, audit_rate=0.0) as cache:
        loader = EgeriaLoader(
            Samples(shape), batch_size=BATCH_SIZE, shuffle=True, cache=cache, reuse=None,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        for _ in range(NUM_EPOCHS):
            model.train()
            for inputs, targets in loader:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            cache.flush()
        return losses, cache.stats().hits


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [resnet, transformer])
def test_two_hundred_steps_end_where_the_computed_run_ends(make, dtype, tmp_path):
    computed, no_hits = losses_of(make, tmp_path / "computed", "never", dtype)
    cached, hits = losses_of(make, tmp_path / "cached", "always", dtype)
    assert len(computed) == len(cached) == 200
    assert no_hits == 0
    assert hits >= NUM_SAMPLES * (NUM_EPOCHS - 1)
    if dtype == torch.float32:
        assert cached == computed
    else:
        for ours, theirs in zip(cached, computed, strict=True):
            assert abs(ours - theirs) <= LARGEST_BF16_DIFFERENCE * abs(theirs)
