"""`boundary="auto"` follows what becomes of a model."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import add_new
from tests.hostile.nets import ConvNet, Net, Residual, images, inputs, net, rows


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


class Quiet(Blocks):
    """Nothing in the front that a mode changes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
        self.blocks = nn.ModuleList(layer() for _ in range(4))


def layer(*_):
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def front(model, number):
    """Freeze the stem and so many blocks; thaw the others."""
    model.stem.requires_grad_(number == 0)
    for i, block in enumerate(model.blocks):
        block.requires_grad_(i >= number)


def frozen(run, model=None, start=2):
    return run.freeze(model or Quiet(), "auto", ("stem", *(f"blocks.{i}" for i in range(start))))


def automatic(run, change=lambda model, epoch: None, model=None, epochs=6):
    model = frozen(run, model)
    optimizer = sgd(model, 0.05)

    def each_epoch(epoch):
        change(model, epoch)
        add_new(optimizer, model)

    run.fit(model, run.loader(rows()), epochs, each_epoch=each_epoch, optimizer=optimizer)


SCHEDULES = {
    "still": (Quiet, [2] * 8), "norms and dropout": (Blocks, [2] * 8),
    "forward": (Quiet, [1, 1, 2, 2, 3, 3, 4, 4]), "to and fro": (Quiet, [1, 4, 1, 4, 2, 2, 2, 2]),
    "nothing at first": (Quiet, [0, 0, 3, 3, 3, 3, 3, 3]),
}  # fmt: skip


@hostile(over=SCHEDULES, served=True)
def test_auto_follows_a_schedule(run, kind, schedule):
    automatic(run, lambda m, e: front(m, schedule[e]), model=kind(), epochs=8)


def put(number, block):
    """What puts a block, made of the one that is there, in the place of one."""
    return lambda model: model.blocks.__setitem__(number, block(model.blocks[number]))


def bitfit(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))


def lora_everywhere(model):
    for i in range(4):
        model.blocks[i] = Residual(model.blocks[i].requires_grad_(False))


CHANGES = {
    "an adapter at once": (0, put(1, Residual)),
    "adapters everywhere": (0, lora_everywhere),
    "another frozen block": (2, put(1, lambda block: layer().requires_grad_(False))),
    "a block less": (2, lambda m: m.blocks.__delitem__(0)),
    "a block more": (2, lambda m: m.blocks.insert(0, nn.Linear(8, 8))),
    "biases alone": (2, bitfit),
    "a weight written": (2, lambda m: m.blocks[0][0].weight.data.mul_(-1)),
    "everything": (4, lambda m: m.requires_grad_(True)),
}


@hostile(over=CHANGES, cases=4)
def test_auto_when_the_model_becomes_another(run, at, change):
    automatic(run, lambda m, e: change(m) if e == at else None)


@hostile
@pytest.mark.parametrize("first", ["an evaluation", "other inputs"])
def test_auto_with_other_calls_first(run, first):
    model = frozen(run, start=1)
    loader = run.loader(rows())
    calls = loader if first == "an evaluation" else [(inputs()[:4], 0)]
    with torch.set_grad_enabled(calls is not loader):
        for x, _ in calls:
            run.record(model(x).sum())
    run.fit(model, loader, 4, optimizer=sgd(model, 0.05))


def under_auto(model, run, boundary="auto"):
    """Freeze the front, as `boundary="auto"` finds it."""
    return run.freeze(model, "middle" if run.is_plain else boundary, ("early", "middle"))


@hostile(served=True)
@pytest.mark.parametrize("boundary", ["auto", "middle"])
def test_a_reference_with_parts_switched_off_in_each_step(run, boundary):
    """As adapters are: states of the front that take turns are both known, and both are held."""

    def loss(model, batch):
        model.domain, _ = 1, model.late.requires_grad_(False)
        with torch.no_grad():
            reference = model(batch[0])
        model.domain, _ = 0, model.late.requires_grad_(True)
        return cross_entropy(model, batch) + F.mse_loss(model(batch[0]), reference)

    early = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)) for _ in range(2))
    model = net(front=lambda m, x: m.middle(m.early[m.domain](x)), early=early, domain=0)
    run.fit(under_auto(model, run, boundary), run.loader(rows()), 5, loss=loss)


@hostile(served=True)
def test_auto_with_a_side_network_that_trains_and_is_called_first(run):
    def forward(self, x):
        side = self.side(x)
        return self.back(self.front(x)) + side

    torch.manual_seed(3)
    run.fit(under_auto(net(forward=forward, side=nn.Linear(6, 3)), run), run.loader(rows()), 4)


class Pooling(nn.Module):
    def forward(self, features):
        features["pooled"] = features["tokens"].mean(1)
        return features


@hostile(served=True)
def test_auto_cuts_at_no_module_whose_output_shows_no_tensor(run):
    """As sentence-transformers' pooling: behind what trains, without parameters, a mapping."""

    def forward(self, x):
        features = UserDict(tokens=self.late(self.front(x)).unflatten(1, (2, 4)))
        return self.head(self.pool(features)["pooled"])

    model = net(forward=forward, pool=Pooling(), head=nn.Linear(4, 3))
    model.middle = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))
    run.fit(under_auto(model, run), run.loader(rows()), 4)


@hostile(served=True)
def test_auto_under_a_checkpoint_of_the_whole_model(run):
    loss = lambda m, b: F.cross_entropy(checkpoint(m, b[0], use_reentrant=False), b[1])  # noqa: E731
    run.fit(under_auto(Net(), run), run.loader(rows()), 4, loss=loss)


class InParts(nn.Module):
    """features (frozen, of BatchNorm and dropout) -> head; the loop calls one after the other."""

    def __init__(self):
        super().__init__()
        model = ConvNet()
        self.features = nn.Sequential(model.stem, model.body)
        self.head = nn.Linear(4, 3)


@hostile(served=True)
def test_a_loop_that_calls_the_parts_itself_trains_as_with_its_front_held(run):
    torch.manual_seed(2)
    model = run.freeze(InParts(), "auto", frozen=("features",))

    def loss(model, batch):
        return F.cross_entropy(model.head(model.features(batch[0]).mean((2, 3))), batch[1])

    run.fit(model, run.loader(images()), loss=loss)
    run.see(model)
