"""The reader of movements against full copies of everything, taken at every step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egeria_core import ControllerConfig, History
from egeria_core.watch import Watched
from egeria_core.watch.forward import LayerMap
from egeria_core.watch.meters import MovementMeter, bare_optimizer


class Tokens(nn.Module):
    """A class token that no layer owns, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, codes: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(codes), -1, -1), self.embed(codes)], 1)
        x = self.second(self.first(x).relu()).relu()
        return self.head(x)[:, 1:]


LAYERS = ["first", "second", "head"]


def watch(model: nn.Module, optimizer: Any, layers: LayerMap, every: int) -> MovementMeter:
    return MovementMeter(Watched(model, optimizer, layers, every, ControllerConfig(), History()))


class Muon(torch.optim.Optimizer):
    """Signs instead of orthogonal matrices; it writes into the gradients, as some do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign_(), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "writes into gradients": lambda p: Muon(p, 0.01),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adam, large epsilon": lambda p: torch.optim.Adam(p, 0.1, eps=1.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    codes = torch.randint(0, 11, (4, 5), generator=generator)
    return codes, codes.roll(1, 1)


def resolved(model: nn.Module, layers: Any = None) -> LayerMap:
    found = LayerMap(model, LAYERS if layers is None else layers, 7)
    model(batch(0)[0])
    found.resolve()
    return found


def owners(model: Tokens) -> list[list[Tensor]]:
    front = [model.embed.weight, model.token, *model.first.parameters()]
    return [front, list(model.second.parameters()), list(model.head.parameters())]


def compare(
    make: Callable[[Any], torch.optim.Optimizer], *, mode: str = "plain", steps: int = 24
) -> list[tuple[int, float, float]]:
    """Train; return (layer, -g . d, speed) as read, after comparing each with full copies."""
    torch.manual_seed(0)
    model = Tokens().to(torch.bfloat16 if mode == "bf16 weights" else torch.float32)
    layers = resolved(model)
    optimizer = make(model.parameters())
    truth: dict[str, Any] = {}

    def before(*_: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        truth["old"] = [[p.detach().double() for p in own] for own in owners(model)]
        truth["gradients"] = [
            [p.grad.double() / (1.0 if scale is None else scale.double()) for p in own]
            for own in owners(model)
        ]

    optimizer.register_step_pre_hook(before)
    meter = watch(model, optimizer, layers, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled="scaler" in mode)
    read = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2 if mode == "accumulate" else 1):
            x, y = batch(2 * step + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            if mode == "accumulate":
                loss = loss / 2
            scaler.scale(loss).backward()
        if mode == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if mode == "scaler skips" and step % 3 == 0:
            model.head.bias.grad[0] = torch.inf  # type: ignore[index]
        truth.clear()
        scaler.step(optimizer)
        scaler.update()
        meter.note(loss)
        meter.measure(step, 0)
        (verdict,) = meter.collect()
        assert verdict.values is not None
        assert verdict.values[0] == pytest.approx(loss.item(), rel=1e-5)
        for layer in range(3):
            decrease, speed = verdict.values[2 + layer], verdict.values[5 + layer]
            assert (decrease is None) == (speed is None)
            if decrease is None or speed is None:
                continue
            old, gradients = truth["old"][layer], truth["gradients"][layer]
            new = [p.detach().double() for p in owners(model)[layer]]
            moved = [b - a for a, b in zip(old, new, strict=True)]
            expected = -sum(float((g * d).sum()) for g, d in zip(gradients, moved, strict=True))
            length = sum(float(d.square().sum()) for d in moved) ** 0.5
            size = sum(float(t.square().sum()) for t in new) ** 0.5
            slack = 1e-6 * sum(
                float((g * d).abs().sum()) for g, d in zip(gradients, moved, strict=True)
            )
            assert decrease == pytest.approx(expected, rel=1e-3, abs=slack)
            assert speed == pytest.approx(length / size, rel=1e-3)
            read.append((layer, decrease, speed))
    meter.close()
    return read


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_readings_equal_full_copies_for_every_optimizer(name: str) -> None:
    read = [layer for layer, _, _ in compare(OPTIMIZERS[name])]
    assert read == [0, 1, 2] * 8, "one layer a step, in turn"


@pytest.mark.parametrize("mode", ["accumulate", "clip", "autocast", "bf16 weights", "scaler"])
def test_readings_equal_full_copies_however_gradients_come(mode: str) -> None:
    assert len(compare(OPTIMIZERS["adamw"], mode=mode)) == 24


@pytest.mark.parametrize("name", ["adamw", "adamw, fused"])
def test_a_step_that_the_scaler_skips_is_no_reading(name: str) -> None:
    read = compare(OPTIMIZERS[name], mode="scaler skips")
    assert len(read) >= 4
    assert all(speed > 0 for _, _, speed in read)


def test_sparse_gradients_are_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 11))
    layers = resolved(model, r"[012]")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    meter = watch(model, optimizer, layers, 3)
    x, y = batch(0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        gradient = model[0].weight.grad.to_dense()  # type: ignore[union-attr, operator]
        if not meter._read:
            expected = 0.1 * float(gradient.square().sum())
        optimizer.step()
        meter.note(loss)
    meter.measure(3, 0)
    (verdict,) = meter.collect()
    assert verdict.values is not None
    assert verdict.values[2] == pytest.approx(expected, rel=1e-4)
    meter.close()


def test_a_wrapped_optimizer_is_read_and_one_that_never_steps_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Tokens()
    layers = resolved(model)
    inner = torch.optim.SGD(model.parameters(), 0.1)

    class Wrapper:
        optimizer = inner

    assert bare_optimizer(Wrapper()) is inner
    meter = watch(model, inner, layers, 1)
    with caplog.at_level(logging.WARNING):
        for step in range(30):
            meter.note(1.0)
            meter.measure(step, 0)
    assert caplog.text.count("none of the optimizer's steps was seen") == 1
    assert meter.collect()[0].values == (1.0, 0.0, *[None] * 6)
