"""How fast the references are, and how far from the model that they were made of."""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.digits_task import ResNet
from benchmarks.harness import in_turns, seconds
from egeria_core import sp_loss
from egeria_core.reference.capture import Call, Probe
from egeria_core.reference.references import Reference, run_layer

__all__ = ["reference_speeds"]


class Bert(nn.Module):
    """BERT-base's encoder blocks, four of them, on hidden states of shape (B, T, 768)."""

    def __init__(self, layers: int = 4, width: int = 768) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 12, 4 * width, batch_first=True, activation="gelu", norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def warm_resnet() -> nn.Module:
    """ResNet-56 with BatchNorm statistics of some training steps."""
    torch.manual_seed(0)
    model = ResNet(num_blocks=9, width=16).train()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(32, 1, 32, 32))
    return model


def reference_speeds(repeats: int) -> list[dict[str, Any]]:
    """Return a row per model and kind of reference."""
    images = torch.randn(32, 1, 32, 32)
    rows = _speeds("ResNet-56, 32 x 32, batch 32", warm_resnet(), images, repeats)
    torch.manual_seed(0)
    bert, hidden = Bert(), torch.randn(8, 128, 768)
    return rows + _speeds("BERT-like, 4 x 768, T = 128, batch 8", bert, hidden, repeats // 3)


@torch.no_grad()
def _speeds(name: str, model: nn.Module, x: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Build every kind of reference of the whole model; run all in turns."""
    model.eval().requires_grad_(False)
    probe = Probe([Call("model", (x,), {}, {})], len(x))
    int8 = "int8-static" if name.startswith("ResNet") else "int8-dynamic"
    kinds = [Reference(), Reference(int8)]
    build_s = [seconds(partial(reference.build, [model], probe)) for reference in kinds]
    uses = {reference.name: partial(reference.run, probe) for reference in kinds}
    times = in_turns(repeat(uses, 1 + max(3, repeats)), warm_up=1).wall
    expected = run_layer([model], probe)
    return [
        {
            "model": name,
            "reference": reference.name,
            "forward_ms": round(times.median(reference.name) * 1e3, 2),
            "speedup": round(times.ratio(kinds[0].name, reference.name), 2),
            "build_s": round(built, 2),
            "sp_to_fp32": float(f"{float(sp_loss(expected, reference.run(probe))):.2g}"),
        }
        for reference, built in zip(kinds, build_s, strict=True)
    ]
