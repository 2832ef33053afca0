from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from egeria_core import sp_loss
from egeria_core.config import ReferenceKind
from egeria_core.reference.capture import (
    LayerTap,
    Probe,
    copy_modules,
    copy_weights,
    first_activation,
)
from egeria_core.reference.references import Reference, ReferenceRunner, run_layer
from egeria_core.watch import LayerMap
from tests.helpers.core_nets import FAMILIES, family_batch, mlp


def capture(
    family: str, layer: int, size: int = 8, *, training: bool = True
) -> tuple[nn.Module, list[nn.Module], Probe, Any]:
    """A forward of a family's model: the probe of one layer, copies of its modules, its output."""
    torch.manual_seed(0)
    make, kind = FAMILIES[family]
    model = make().train(training)
    layers = LayerMap(model, None, 7)
    model(family_batch(kind, 0)[0])
    layers.resolve()
    tap = LayerTap(model, [x.modules for x in layers.layers])
    tap.arm(layer, 6)
    returned: list[Any] = []
    last = model.get_submodule(layers.layers[layer].boundary)
    handle = last.register_forward_hook(lambda m, args, output: returned.append(output))
    model(family_batch(kind, 1, size)[0])
    handle.remove()
    probe = tap.take()
    tap.close()
    assert probe is not None, "the tap did not fire"
    modules = [model.get_submodule(call.module) for call in probe.calls]
    return model, copy_modules(modules), probe, returned[0]


CASES = [(family, layer) for family in FAMILIES for layer in range(3)]


@pytest.mark.parametrize(("family", "layer"), CASES)
def test_a_replayed_layer_returns_what_the_model_computed(family: str, layer: int) -> None:
    model, modules, probe, returned = capture(family, layer, training=False)
    assert probe.num_rows == 6
    expected = first_activation(returned, 8)
    assert expected is not None
    assert torch.allclose(run_layer(modules, probe), expected[:6], atol=1e-5)
    assert torch.equal(run_layer(modules, probe), run_layer(modules, probe)), "inputs were mutated"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_cache_of_keys_and_values_is_not_replayed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:
            if past_key_values is not None:
                past_key_values.append(x)
            out: Tensor = self.linear(x)
            return out

    block = Block()
    tap = LayerTap(nn.Sequential(block), [["0"]])
    tap.arm(0, 4)
    cache: list[Tensor] = []
    block(torch.randn(4, 4), past_key_values=cache)
    probe = tap.take()
    assert probe is not None
    assert probe.calls[0].kwargs == {"past_key_values": None}
    run_layer(copy_modules([block]), probe)
    assert len(cache) == 1
    tap.close()


def name_of(runner: ReferenceRunner) -> str:
    return "none" if runner.reference is None else runner.reference.name


LIMITS = {"fp32": 1e-12, "int8-static": 1e-3, "int8-dynamic": 1e-3}


@pytest.mark.parametrize(
    ("name", "family", "layer"),
    [("fp32", family, 1) for family in FAMILIES]
    + [("int8-static", f, 1) for f in ("resnet",)]
    + [("int8-dynamic", f, 1) for f in ("bert", "vit", "encoder_decoder", "mlp")],
)
def test_a_reference_stays_close_and_keeps_its_moment(name: str, family: str, layer: int) -> None:
    _, modules, probe, _ = capture(family, layer)
    reference = Reference(name)
    reference.build(modules, probe)
    expected = run_layer(modules, probe)
    before = reference.run(probe)
    assert before.shape == expected.shape
    assert float(sp_loss(expected, before)) < LIMITS[name]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.mul_(-0.5)
    assert torch.equal(reference.run(probe), before), "later weights must not show"
    reference.build(modules, probe)
    assert not torch.equal(reference.run(probe), before), "a refresh takes the new weights"


@pytest.mark.parametrize(
    ("family", "expected"),
    [("resnet", "int8-static")] + [(f, "int8-dynamic") for f in ("bert", "vit", "encoder_decoder")],
)
def test_int8_takes_the_kind_that_suits_the_layer(family: str, expected: str) -> None:
    _, modules, probe, _ = capture(family, 1)
    runner = ReferenceRunner("int8")
    assert runner.refresh(modules, probe) == []
    assert name_of(runner) == expected
    assert 0 < runner.noise < 1e-3


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out if out.sum() > 0 else -out


def test_a_layer_that_cannot_be_traced_falls_back_to_full_precision_and_says_why() -> None:
    module = Untraceable().eval()
    model = nn.Sequential(module)
    tap = LayerTap(model, [["0"]])
    tap.arm(0, 4)
    model(torch.randn(4, 1, 6, 6))
    probe = tap.take()
    assert probe is not None
    runner = ReferenceRunner("int8")
    notes = runner.refresh(copy_modules([module]), probe)
    assert name_of(runner) == "fp32"
    assert len(notes) == 1
    assert notes[0].startswith("int8-static reference not used: TraceError")


class Wrong(Reference):
    """A reference that builds but is another layer."""

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        self.shape = run_layer(modules, probe).shape

    def run(self, probe: Probe) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0))


def test_the_self_check_rejects_a_reference_that_is_another_layer() -> None:
    _, modules, probe, _ = capture("resnet", 1)
    runner = ReferenceRunner("int8")
    runner.reference = Wrong("wrong")
    (note,) = runner.refresh(modules, probe)
    assert "wrong reference not used" in note
    assert "self-check" in note
    assert name_of(runner) == "fp32"


def test_noise_that_drowns_the_plasticity_changes_the_reference_at_the_next_refresh() -> None:
    _, modules, probe, _ = capture("resnet", 1)
    runner = ReferenceRunner("int8")
    runner.refresh(modules, probe)
    runner.plasticity = runner.noise * 100
    assert runner.refresh(modules, probe) == []
    runner.plasticity = runner.noise * 2
    assert name_of(runner) == "int8-static", "the reading at hand was still taken with it"
    (note,) = runner.refresh(modules, probe)
    assert "int8-static reference not used" in note
    assert name_of(runner) == "fp32"
    runner.plasticity = 0.0
    assert runner.refresh(modules, probe) == [], "full precision is the last resort"


@pytest.mark.parametrize("kind", ["int8", "fp32"])
def test_building_leaves_the_process_as_it_was(kind: ReferenceKind) -> None:
    engine = torch.backends.quantized.engine
    fastpath = torch.backends.mha.get_fastpath_enabled()
    _, modules, probe, _ = capture("vit", 1)
    weights = copy_weights(modules)
    ReferenceRunner(kind).refresh(modules, probe)
    assert torch.backends.quantized.engine == engine
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    for before, after in zip(weights, copy_weights(modules), strict=True):
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_validation_pass_is_not_captured() -> None:
    model = mlp(8, 8, 8)
    tap = LayerTap(model, [["0", "1"]])
    tap.arm(0, 4, training=True)
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.eval()
    model(torch.randn(4, 8))
    assert tap.take() is None
    tap.arm(0, 4, training=True)
    model.train()
    model(torch.randn(4, 8))
    model(torch.randn(2, 8))
    probe = tap.take()
    assert probe is not None
    assert probe.num_rows == 4, "the first forward of the step is the one"
    tap.close()


def test_an_in_place_activation_does_not_change_what_was_captured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    tap = LayerTap(model, [["1"]])
    x = model[0](torch.randn(4, 4))
    expected = x.detach().clone()
    tap.arm(0, 4)
    model[1:](x)
    probe = tap.take()
    assert probe is not None
    assert torch.equal(probe.calls[0].args[0], expected)
    assert (expected < 0).any()
    tap.close()
