from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egeria_cache.skip import leaves_behind
from egeria_core import LayerError, find_layers
from egeria_core.watch.forward import LayerMap
from tests.helpers.core_nets import FAMILIES, ResNet, family_batch, mlp


def names(model: nn.Module, **options: object) -> list[str]:
    return [layer.boundary for layer in find_layers(model, **options)]  # type: ignore[arg-type]


def test_resnet_56_is_cut_as_in_the_paper() -> None:
    """Seven modules: stages 1 and 2 whole, stage 3 with 75 % of the weights in five."""
    layers = find_layers(ResNet(9, 16))
    stages = [layer.boundary.split(".")[0] for layer in layers]
    assert stages == ["layer1", "layer2", "layer3", "layer3", "layer3", "layer3", "fc"]
    assert "layer3.8" in layers[-1].modules
    sizes = [layer.num_parameters for layer in layers]
    assert max(sizes) < 5 * min(sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_cover_the_model_once_in_order_and_balanced(family: str) -> None:
    model = FAMILIES[family][0]()
    layers = find_layers(model)
    modules = [name for layer in layers for name in layer.modules]
    assert len(modules) == len(set(modules))
    assert len(layers) >= 3
    registered = [name for name, _ in model.named_modules()]
    assert [registered.index(name) for name in modules] == sorted(
        registered.index(name) for name in modules
    )
    covered = {id(p) for name in modules for p in model.get_submodule(name).parameters()}
    own = {id(p) for p in model.parameters(recurse=False)}
    assert covered | own == {id(p) for p in model.parameters()}
    total = sum(p.numel() for p in model.parameters())
    assert max(layer.num_parameters for layer in layers) <= 0.6 * total


class Convolutions(nn.Module):
    """What every first example trains: two convolutions, a neck, two dense layers."""

    def __init__(self, *neck: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        for i, module in enumerate(neck):
            self.add_module(f"neck{i}", module)
        self.fc1, self.fc2 = nn.Linear(8 * 16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        for name, module in self.named_children():
            x = module(x) if name.startswith("neck") else x
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


NECKS: dict[str, tuple[list[nn.Module], str]] = {
    "dropout": ([nn.Dropout(0.2)], "conv2"),
    "a norm without weights": ([nn.BatchNorm2d(8, affine=False)], "conv2"),
    "dropout, pooling": ([nn.Dropout(0.2), nn.Identity()], "conv2"),
    "pooling, dropout": ([nn.Identity(), nn.Dropout2d(0.2)], "neck0"),
    "a norm with weights": ([nn.BatchNorm2d(8), nn.Dropout(0.2)], "neck0"),
    "pooling": ([nn.Identity()], "neck0"),
    "a dropout that drops nothing": ([nn.Dropout(0.0)], "neck0"),
}


@pytest.mark.parametrize("kind", NECKS)
def test_no_layer_ends_in_what_draws_or_keeps_statistics_without_weights(kind: str) -> None:
    neck, boundary = NECKS[kind]
    model = Convolutions(*neck)
    layers = LayerMap(model, None, 7)
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    layers.resolve()
    assert boundary in layers.boundaries
    modules = [name for layer in layers.layers for name in layer.modules]
    assert modules == ["conv1", "conv2", *(f"neck{i}" for i in range(len(neck))), "fc1", "fc2"]
    assert not layers.prefix(boundary).drawing
    drawing = [f"neck{i}" for i, m in enumerate(neck) if getattr(m, "p", 0) > 0]
    assert list(layers.prefix("fc2").drawing) == drawing


def test_a_pattern_overrides_the_parse() -> None:
    assert names(ResNet(), pattern=r"layer\d") == ["layer1", "layer2", "layer3"]
    assert names(ResNet(), pattern=r".*\.conv1")[:2] == ["layer1.0.conv1", "layer1.1.conv1"]
    with pytest.raises(LayerError, match="overlap"):
        find_layers(ResNet(), pattern=r"layer1.*")
    with pytest.raises(LayerError, match="matching"):
        find_layers(ResNet(), pattern="fc")


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.ReLU()])
def test_a_model_without_two_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(LayerError, match="at least 2"):
        find_layers(model)
    with pytest.raises(ValueError, match="num_layers"):
        find_layers(mlp(2, 2, 2), num_layers=1)


def resolved(family: str) -> tuple[nn.Module, LayerMap]:
    make, kind = FAMILIES[family]
    model = make()
    layers = LayerMap(model, None, 7)
    x, y = family_batch(kind, 0)
    F.cross_entropy(model(x), y).backward()
    layers.resolve()
    return model, layers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_holds_exactly_what_its_boundarys_output_was_made_from(family: str) -> None:
    model, layers = resolved(family)
    kind = FAMILIES[family][1]
    for boundary in layers.boundaries[:-1]:
        caught: list[object] = []
        handle = model.get_submodule(boundary).register_forward_hook(
            lambda module, args, output, caught=caught: caught.append(output)
        )
        model(family_batch(kind, 1)[0])
        handle.remove()
        behind = {id(p) for p in leaves_behind(caught[0])}
        listed = {id(model.get_parameter(n)) for n in layers.prefix(boundary).parameters}
        assert behind <= listed
        later = listed - behind
        if family != "encoder_decoder":
            assert not later, "a parameter that feeds nothing in the prefix would be frozen"


def test_watching_leaves_no_hook_and_no_trace_in_copies() -> None:
    model = type("Silent", (ResNet,), {"forward": lambda m, x: print(ResNet.forward(m, x).dim())})()
    layers = LayerMap(model, None, 7)
    clone = copy.deepcopy(model)
    clone(torch.randn(2, 1, 8, 8))
    assert not layers.resolved
    model(torch.randn(2, 1, 8, 8))
    layers.resolve()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    restored = LayerMap(ResNet(), None, 7)
    restored.load_state_dict(layers.state_dict())
    assert restored.resolved
    assert restored.prefixes == layers.prefixes


def test_a_light_layer_joins_the_next_one_by_its_measured_forward() -> None:
    """Embeddings are looked up, so that to freeze them saves nothing; a stem may be as light."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 16)
            self.position = nn.Embedding(4, 16)
            self.stem = nn.Linear(16, 16)
            self.blocks = mlp(16, 128, 128, 128, 128)
            self.head = nn.Linear(128, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(self.embedding(x) + self.position(torch.arange(x.shape[1])))
            out: torch.Tensor = self.head(self.blocks(x).mean(1))
            return out

    model = Lookup()
    before = names(model, num_layers=12)
    assert "position" not in before, "known before any forward"
    layers = LayerMap(model, None, 12)
    model(torch.zeros(3, 4, dtype=torch.long)).sum().backward()
    layers.resolve()
    first, *_, last = layers.layers
    assert first.modules[:3] == ("embedding", "position", "stem")
    assert first.boundary.startswith("blocks")
    assert last.modules == ("head",), "the last layer never freezes, and stays however light"
    wanted = LayerMap(model, ["position", "blocks", "head"], 7)
    model(torch.zeros(3, 4, dtype=torch.long)).sum().backward()
    wanted.resolve()
    assert wanted.boundaries == ["position", "blocks", "head"], "named layers are the user's"
