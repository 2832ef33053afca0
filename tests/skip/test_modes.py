"""The ways in which people run their models: each must give what it gives without the cache."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import egeria_cache
from egeria_cache.skip.model.frozen import FrozenPrefix, tell_modes
from tests.helpers.skip_harness import Harness, assert_same, assert_same_run, freeze, step

BATCHES = [range(0, 8), range(8, 16), range(16, 24)]


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = block(width, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return F.relu_(self.two(self.one(x)) + x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)  # registered first, runs last
        self.stem = block(3, 8)
        self.layer1 = Residual(8)
        self.layer2 = Residual(8)
        self.layer3 = Residual(8)

    def forward(self, x):
        x = self.stem(x)
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(F.dropout(x.mean((2, 3)), 0.1, self.training))


class Transformer(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=batch_first)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


G = torch.Generator().manual_seed(5)
IMAGES = {"x": torch.randn(24, 3, 8, 8, generator=G), "y": torch.randint(3, (24,), generator=G)}
TOKENS = {"x": torch.randint(11, (24, 7), generator=G), "y": IMAGES["y"]}


def call(model, batch):
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def images(boundary="layer1", frozen=("stem", "layer1")):
    torch.manual_seed(0)
    model = ConvNet()
    freeze(model, *frozen)
    return Harness(model, IMAGES), boundary


def make(*front):
    harness, boundary = images(*front)
    harness.engine.set_boundary(boundary)
    return harness


def make_tokens():
    torch.manual_seed(0)
    model = Transformer()
    freeze(model, "embed", "layers.0", "layers.1")
    harness = Harness(model, TOKENS)
    harness.engine.set_boundary("layers.1")
    return harness


def assert_skipped(harness, num_loads=6):
    assert harness.host.refusals == []
    assert harness.host.changes == []
    assert harness.host.num_loads == num_loads


@pytest.mark.parametrize("make", [make, make_tokens], ids=["conv", "transformer"])
def test_losses_and_gradients_are_equal_to_the_bit(make):
    harness = make()
    assert_same_run(harness, call, BATCHES * 3)
    assert_skipped(harness)


@pytest.mark.parametrize("make", [make, make_tokens], ids=["conv", "transformer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_same_numbers(make, dtype):
    def autocast_call(model, batch):
        with torch.autocast("cpu", dtype=dtype):
            return call(model, batch)

    harness = make()
    assert_same_run(harness, autocast_call, BATCHES * 3)
    assert_skipped(harness)
    assert harness.engine.cut.fields["autocast"] == [["cpu", str(dtype)]]
    assert_same_run(harness, call, BATCHES)  # another precision: another cut
    assert len(harness.host.stored) == 2


def test_channels_last_keeps_its_layout_through_the_store():
    harness = make()
    harness.model.to(memory_format=torch.channels_last)
    seen = []
    harness.model.layer2.register_forward_pre_hook(lambda m, i: seen.append(i[0].stride()))
    harness.data["x"] = harness.data["x"].contiguous(memory_format=torch.channels_last)
    assert_same_run(harness, call, BATCHES * 3)
    assert_skipped(harness)
    (spec,) = harness.engine.cut.tensors.values()
    assert spec.shape == (8, 8, 8)
    assert {stride[1] for stride in seen} == {1}


def test_hooks_on_the_boundary_and_after_it_see_and_change_real_tensors():
    harness = make()
    harness.model.layer1.register_forward_hook(lambda m, i, o: o * 2)
    harness.model.layer2.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    harness.model.stem.register_forward_hook(lambda m, i, o: o + 0.5)
    seen = []
    harness.model.layer1.register_forward_hook(lambda m, i, o: seen.append(float(o.mean())))
    harness.model.layer3.register_full_backward_hook(lambda m, i, o: seen.append(float(o[0].sum())))
    assert_same_run(harness, call, BATCHES * 3)
    assert_skipped(harness)


def test_a_last_batch_of_another_size_uses_the_same_cut():
    harness = make()
    batches = [range(0, 8), range(8, 16), range(16, 19), range(19, 20)]
    assert_same_run(harness, call, batches * 3)
    assert_skipped(harness, 8)
    assert len(harness.host.stored) == 1


def test_half_precision_models():
    harness = make_tokens()
    harness.model.bfloat16()
    assert_same_run(harness, call, BATCHES * 3)
    assert_skipped(harness)


# ---- compiled models --------------------------------------------------------------------------


@pytest.fixture
def eager_backend():
    torch._dynamo.reset()
    yield "eager"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own
@pytest.mark.parametrize("how", ["wrap", "in_place", "beside"])
def test_regional_compilation(how, eager_backend):
    torch._dynamo.utils.counters.clear()
    harness, boundary = images()
    model = harness.model
    for name in ("stem", "layer1", "layer2", "layer3"):
        module, to = getattr(model, name), name if how == "wrap" else f"{name}_compiled"
        if how == "in_place":
            module.compile(backend=eager_backend)
        else:  # "beside": as exports have it; the forward calls the module itself
            setattr(model, to, torch.compile(module, backend=eager_backend))
    harness.engine.set_boundary(boundary)
    plain = ConvNet()
    state = {k.replace("._orig_mod", ""): v for k, v in model.state_dict().items()}
    plain.load_state_dict(state, strict=False)
    freeze(plain, "stem", "layer1")
    for n, ids in enumerate(BATCHES * 2):
        ours = step(model, call, harness.batch(ids), n)
        theirs = step(plain, call, harness.plain(ids), n)
        torch.testing.assert_close(ours[0], theirs[0])
        assert torch.equal(ours[2], theirs[2])
    assert harness.host.refusals == []
    assert harness.host.num_loads == 3
    freeze(model, "layer2")
    harness.engine.set_boundary("layer2")
    freeze(plain, "layer2")
    for n, ids in enumerate(BATCHES * 2):
        loss, *_ = step(model, call, harness.batch(ids), n)
        torch.testing.assert_close(loss, step(plain, call, harness.plain(ids), n)[0])
    assert harness.host.refusals == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12


# ---- wrapped models ---------------------------------------------------------------------------


@pytest.mark.parametrize("attach_to", ["wrapper", "module"])
def test_distributed_data_parallel(process_group, attach_to):
    torch.manual_seed(0)
    model = ConvNet()
    freeze(model, "stem", "layer1")
    FrozenPrefix([model.stem, model.layer1])
    wrapped = DistributedDataParallel(model)
    harness = Harness(wrapped if attach_to == "wrapper" else model, IMAGES)
    harness.engine.set_boundary("module.layer1" if attach_to == "wrapper" else "layer1")
    plain = copy.deepcopy(model)
    for n, ids in enumerate(BATCHES * 3):
        ours = step(wrapped, call, harness.batch(ids), n)
        theirs = step(plain, call, harness.plain(ids), n)
        ours = (ours[0], {k.removeprefix("module."): v for k, v in ours[1].items()}, ours[2])
        assert_same(ours, theirs)
    assert_skipped(harness)


# What is said of inference mode names every module, as Python that does the same.


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.named = nn.ModuleDict({"a-b": Block(), "0": Block()})
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), Block())
        self.head = nn.Linear(4, 2)


FRONTS = {
    "all": (["stem", "norm", "blocks", "named", "inner"], "['norm', 'blocks', 'named', 'inner']"),
    "the first blocks": (["stem", "norm", "blocks.0", "blocks.1"], "['norm', 'blocks.0', 'bl"),
    "names that are no identifiers": (["named.a-b", "named.0"], "['named.a-b', 'named.0']"),
    "nothing that differs": (["stem"], None),
}


class Glue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = nn.functional.dropout(x, 0.5, self.training)
        return self.head(nn.functional.dropout(self.stem(x), 0.5, self.training))


@pytest.mark.modes
def test_code_around_the_front_that_draws_is_told_with_the_line_that_holds_it(caplog):
    plain = nn.Sequential(Glue())
    model = copy.deepcopy(plain)
    held = FrozenPrefix([model[0].stem])
    held.extend_around(model[0].stem, [model[0]])
    with caplog.at_level(logging.WARNING, "egeria.modes"):
        assert tell_modes(model, held)
    (text,) = caplog.messages
    eval(text.partition("this line here: ")[2], {"egeria_cache": egeria_cache, "model": plain})
    rows = torch.randn(8, 4)
    torch.manual_seed(0)
    ours = model(rows)
    torch.manual_seed(0)
    assert torch.equal(ours, plain(rows))


@pytest.mark.modes
@pytest.mark.parametrize(("front", "written"), FRONTS.values(), ids=list(FRONTS))
def test_the_line_that_is_offered_holds_the_same_modules(front, written, caplog):
    plain = Model()
    model = copy.deepcopy(plain)
    held = FrozenPrefix([model.get_submodule(name) for name in front])
    with caplog.at_level(logging.WARNING, "egeria.modes"):
        assert tell_modes(model, held) == (written is not None)
    if written is None:
        assert not caplog.records
        return
    (text,) = caplog.messages
    assert written in text
    eval(text.partition("this line here: ")[2], {"egeria_cache": egeria_cache, "model": plain})
    rows = torch.randn(8, 4)
    for (name, ours), theirs in zip(model.named_modules(), plain.modules(), strict=True):
        if isinstance(ours, nn.BatchNorm1d | nn.Dropout):
            assert ours.training == theirs.training, name
            torch.manual_seed(0)
            expected = theirs(rows)
            torch.manual_seed(0)
            assert torch.equal(ours(rows), expected), name
