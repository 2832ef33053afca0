"""Dropout in the code of a module around the boundary belongs to the frozen front, up to there."""

import copy
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from egeria_cache import ActivationCache, FrozenPrefix
from egeria_core import FreezeController
from egeria_core.policies import StaticPolicy
from tests.helpers.skip_harness import Harness, assert_same, assert_same_run, freeze, step, ways
from tests.helpers.skip_models import BATCHES, call

DATA = {
    "x": torch.randn(24, 6, generator=torch.Generator().manual_seed(1)),
    "y": torch.randint(3, (24,), generator=torch.Generator().manual_seed(2)),
}


class Encoder(nn.Module):
    """Dropout, and a layer that is dropped, before and after the boundary `layers.1`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.seen = []
        self.drop = 0.3

    def forward(self, x):
        x = F.dropout(x, 0.3, self.training)
        for layer in self.layers:
            self.seen.append(self.training)
            if self.training and self.drop and random.random() < self.drop:
                continue
            x = torch.tanh(layer(x))
        return F.dropout(x, 0.3, self.training)


class Net(nn.Module):
    """Its own code draws as well, on both sides of the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.encoder(F.dropout(x, 0.2, self.training))
        return self.head(F.dropout(x, 0.2, self.training))


class Checkpointed(Net):
    def forward(self, x):
        x = checkpoint(self.encoder, F.dropout(x, 0.2, self.training), use_reentrant=False)
        return self.head(F.dropout(x, 0.2, self.training))


class TwoTowers(Net):
    """The encoder serves twice: where would its own code be frozen?"""

    def forward(self, x):
        return self.head(self.encoder(x) + self.encoder(-x))


def make(cls=Net):
    torch.manual_seed(0)
    random.seed(0)
    model = cls()
    freeze(model, "encoder.layers.0", "encoder.layers.1")
    return model


def held(model, boundary="encoder.layers.1", around=("", "encoder")):
    """Hold by hand what the engine and the controller find by themselves."""
    prefix = FrozenPrefix()
    prefix.extend_around(
        model.get_submodule(boundary), [model.get_submodule(name) for name in around]
    )
    return prefix


def flags(model, run):
    """Return the encoder's mode before each layer."""
    model.encoder.seen.clear()
    run()
    return model.encoder.seen[-4:]


@pytest.mark.parametrize("cls", [Net, Checkpointed])
def test_up_to_the_boundary_it_is_in_inference_mode_and_then_as_the_user_wants_it(cls):
    model = make(cls).train()
    x = torch.randn(8, 6)
    assert flags(model, lambda: model(x)) == [True] * 4
    prefix = held(model)
    random.seed(3)
    assert flags(model, lambda: model(x)) == [False, False, True, True]
    assert model.training
    assert model.encoder.training
    assert flags(model, lambda: model.eval()(x)) == [False] * 4
    prefix.release()
    assert flags(model, lambda: model.train()(x)) == [True] * 4
    assert "forward" not in model.__dict__
    assert "forward" not in model.encoder.__dict__


def test_hits_and_misses_give_what_the_model_gives_that_is_held_by_hand(monkeypatch):
    harness, taken = Harness(make(), DATA), ways(monkeypatch)
    plain = copy.deepcopy(harness.model)
    held(plain)
    FrozenPrefix([plain.encoder.layers[0], plain.encoder.layers[1]])
    harness.engine.set_boundary("encoder.layers.1")
    mixed = [range(4, 12), range(20, 24)]
    for n, ids in enumerate([*BATCHES[:2], *mixed, *BATCHES * 2]):
        ours = step(harness.model, call, harness.batch(ids), n)
        # Rows of a mixed batch were computed in another number: kernels differ in the last bits.
        assert_same(ours, step(plain, call, harness.plain(ids), n), exact=n < 2)
    assert harness.host.refusals == []
    assert harness.host.num_loads == 7
    assert ("prefix", 4) in taken


@pytest.mark.parametrize("wants", [False, True])
def test_a_refused_model_is_held_all_the_same(wants):
    class Mixing(Net):
        def forward(self, x):
            x = torch.autograd.grad((x**2).sum(), x)[0] if wants else x
            return super().forward(x - x.mean(0))

    harness = Harness(make(Mixing), DATA)
    plain = copy.deepcopy(harness.model)
    held(plain)
    harness.engine.set_boundary("encoder.layers.1")

    def given(m, b):
        return call(m, {**b, "x": b["x"].clone().requires_grad_(wants)})

    assert_same_run(harness, given, BATCHES, plain=plain)
    assert harness.host.refusals or wants


@pytest.mark.parametrize("gate", ["auto", "never"])
def test_the_controller_alone_freezes_the_same_code(tmp_path, gate):
    """What freezes without a cache is what freezes with one, whoever came first."""
    seen = []
    for with_cache in (False, True):
        model = make()
        model.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cache = ActivationCache(model, tmp_path, gate=gate) if with_cache else None
        layers = [f"encoder.layers.{i}" for i in range(4)] + ["head"]
        controller = FreezeController(
            model, optimizer, cache, StaticPolicy({1: "encoder.layers.1"}), layers=layers
        )
        losses = []
        for n, ids in enumerate(BATCHES * 3):
            batch = {name: values[list(ids)] for name, values in DATA.items()}
            loss, _, _ = step(model, call, batch, n)
            optimizer.step()
            controller.step(loss)
            losses.append(float(loss))
        seen.append((losses, flags(model, lambda m=model: m(DATA["x"]))))
        assert controller.boundary == "encoder.layers.1"
        controller.close()
        if cache is not None:
            cache.close()
    assert seen[0] == seen[1]
    assert seen[0][1] == [False, False, True, True]


def test_gradient_checkpointing_repeats_what_the_forward_did():
    """The recomputation runs in backward, when the root's forward is long over."""
    plain, checkpointed = make(Net), make(Checkpointed)
    for model in (plain, checkpointed):
        held(model)
    batch = {name: values[:8] for name, values in DATA.items()}

    for model in (plain, checkpointed):
        model.encoder.drop = 0  # a checkpoint does not restore Python's generator
    assert_same(*(step(model, call, batch, 11) for model in (plain, checkpointed)))


def test_what_serves_twice_is_left_alone():
    harness = Harness(make(TwoTowers).train(), DATA)
    harness.engine.set_boundary("encoder.layers.1")
    assert_same_run(harness, call, BATCHES)
    assert harness.host.refusals  # its dropout makes the prefix random


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("part", ["", "encoder"])
def test_copies_are_held_by_themselves_and_thaw_by_themselves(how, part):
    model = make().train()
    held(model)
    twin = how(model.get_submodule(part))
    keys = twin.state_dict().keys()
    assert keys == make().get_submodule(part).state_dict().keys()
    encoder = twin.get_submodule("encoder") if part == "" else twin

    def seen():
        random.seed(3)
        encoder.seen.clear()
        twin(DATA["x"])
        return encoder.seen

    assert seen() == [False, False, True, True]
    FrozenPrefix.thaw(twin)
    assert seen() == [True] * 4
    random.seed(3)
    assert flags(model, lambda: model(DATA["x"])) == [False, False, True, True]


def test_two_holders_and_an_attached_cache_let_go_in_any_order(tmp_path):
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]):
        model = make().train()
        first = held(model)
        cache = ActivationCache(model, tmp_path)
        second = held(model)
        holders = [first, second, cache]
        left = set(range(3))
        for i in order:
            holders[i].release() if i < 2 else holders[i].close()
            left.discard(i)
            random.seed(3)
            expected = [False, False, True, True] if left & {0, 1} else [True] * 4
            assert flags(model, lambda m=model: m(DATA["x"])) == expected
        assert "forward" not in model.__dict__


def test_a_boundary_that_moves_takes_the_code_along():
    model = make().train()
    prefix = held(model)
    prefix.extend_around(model.encoder.layers[2], [model.encoder])
    random.seed(4)
    assert flags(model, lambda: model(DATA["x"])) == [False, False, False, True]


def test_compiled_code_goes_on_as_it_is():
    torch._dynamo.reset()
    model = make().train()
    model.encoder.drop = 0
    model.encoder.compile(backend="eager")
    prefix = FrozenPrefix()
    assert prefix.extend_around(model.encoder.layers[1], [model, model.encoder])
    assert "forward" not in model.encoder.__dict__
    whole = torch.compile(model, backend="eager")
    assert whole(DATA["x"]).shape == (24, 3)
    assert model.training
    torch._dynamo.reset()
