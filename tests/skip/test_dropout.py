"""Stateless dropout in the frozen prefix: its masks belong to the sample, in whatever company."""

from __future__ import annotations

import logging
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from egeria_cache.batch.tensor import Batch
from egeria_cache.skip.model.dropout import StatelessDropout, only
from egeria_cache.skip.model.frozen import FrozenPrefix
from tests.helpers.nets import Images, sgd, train_steps

KINDS = {
    "Dropout": nn.Dropout(0.3),
    "in place": nn.Dropout(0.3, inplace=True),
    "Dropout2d": nn.Dropout2d(0.3),
    "AlphaDropout": nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.3),
}


class Net(nn.Module):
    """Dropout within the front, on its own in the glue, and behind the boundary."""

    def __init__(self, kind=None):
        super().__init__()
        dropout = kind or nn.Dropout(0.3)
        self.front = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), dropout, nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.1))
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 5))

    def forward(self, x):
        x = self.middle(self.drop(self.front(x)))
        return self.head(F.relu(x).mean(dim=(2, 3)))


def run(directory, gate, *, kind=None, variants=1, epochs=4, dropout="stateless", boundary="middle",
        seed=3, batch_size=8, between=None, move=None, num_before=0, **cache_kwargs):  # fmt: skip
    torch.manual_seed(0)
    model = Net(kind)
    freeze(model, boundary)
    with ActivationCache(
        model, directory, boundary, gate=gate, dropout=dropout, **cache_kwargs
    ) as cache:
        loader = EgeriaLoader(
            Images(), batch_size, shuffle=True, cache=cache, seed=seed,
            augmentation_variants=variants, reuse=None,
        )  # fmt: skip

        def on_step(step):
            if move is not None and step == move[0]:
                freeze(model, move[1])
                cache.set_boundary(move[1])
            cache.flush()

        optimizer = sgd(model)
        before = []
        if num_before:
            before, _ = train_steps(model, islice(loader, num_before), optimizer, 1, on_step)
        losses, _ = train_steps(model, loader, optimizer, epochs, on_step)
        losses = before + losses
        return losses, model.state_dict(), cache.stats(), between(model, cache) if between else None


def freeze(model, boundary):
    names = ["front", "drop", "middle"]
    for name in names[: names.index(boundary) + 1]:
        getattr(model, name).requires_grad_(False)


@pytest.mark.parametrize("variants", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_run_equals_a_computed_one_to_the_bit(tmp_path, kind, variants):
    one, two = (
        run(tmp_path / gate, gate, kind=KINDS[kind], variants=variants, audit_rate=0.2)
        for gate in ("always", "never")
    )
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
    assert one[2].hits == 48 * (4 - variants)
    assert one[2].audited > 0
    assert one[2].audit_failures == 0
    assert two[2].hits == 0


@pytest.mark.cases(1)
def test_mixed_batches_change_nothing(tmp_path):
    one, two = (
        run(tmp_path / gate, gate, batch_size=5, num_before=4) for gate in ("always", "never")
    )
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-6)
    assert one[2].partial_batches > 0


def test_masks_are_there_and_belong_to_seed_and_draw(tmp_path):
    losses = {
        name: run(tmp_path / name, "never", epochs=2, **settings)[0]
        for name, settings in {
            "off": {"dropout": "off"}, "on": {}, "again": {}, "seed": {"seed": 4},
            "variants": {"variants": 2},
        }.items()
    }  # fmt: skip
    assert losses["on"] == losses["again"]
    assert losses["on"] != losses["off"]
    assert losses["on"] != losses["seed"]
    assert losses["on"][:6] == losses["variants"][:6]
    assert losses["on"][6:] != losses["variants"][6:]


def test_another_run_reuses_what_was_stored_only_with_the_same_dropout(tmp_path):
    run(tmp_path, "always", epochs=2)
    assert run(tmp_path, "always", epochs=1)[2].hits == 48 - 8
    assert run(tmp_path, "always", epochs=1, dropout="off")[2].hits == 0


def test_validation_drops_nothing_and_has_rows_of_its_own(tmp_path):
    def validate(model, cache):
        model.eval()
        loader = EgeriaLoader(Images(noise=0), 8, cache=cache, seed=3, name="val")
        with torch.no_grad():
            outputs = []
            for _ in range(2):
                outputs.append(torch.cat([model(x) for x, _ in loader]))
                cache.flush()
            assert torch.equal(*outputs)
            cache.close()
            plain = torch.cat([model(x) for x, _ in EgeriaLoader(Images(noise=0), 8)])
        return torch.equal(outputs[0], plain)

    _, _, stats, is_plain = run(tmp_path, "always", epochs=2, between=validate)
    assert is_plain
    assert stats.hits == 48


class Rows(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer


@pytest.fixture
def layer_of():
    held = FrozenPrefix()

    def make(layer):
        model = Rows(layer)
        held.extend([layer])
        return model, StatelessDropout(model, held)

    yield make
    held.release()


def batch(ids, draw=0):
    return Batch(
        ids=ids, draws=[draw] * len(ids), loader_name="t", leaves={}, load_rows=lambda rows: {}
    )


@pytest.mark.parametrize("rows_per_sample", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_do_not_depend_on_the_composition_of_the_batch(layer_of, kind, rows_per_sample):
    model, dropout = layer_of(KINDS[kind])
    x = torch.randn(4, rows_per_sample, 6, 5, 2)
    with dropout.serving(batch([7, "a", (1, "b"), 9])):
        first, second = (model.layer(x.flatten(0, 1).clone()).view(x.shape) for _ in range(2))
        with only([3, 1, 1]):
            again = model.layer(x[[3, 1, 1]].flatten(0, 1)).view(3, *x.shape[1:])
    assert torch.equal(again, first[[3, 1, 1]])
    assert not torch.equal(first, second), "each call has a mask of its own"
    with dropout.serving(batch([7, "a", (1, "b"), 9], draw=1)):
        assert not torch.equal(model.layer(x.flatten(0, 1).clone()).view(x.shape), first)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "in place"])
def test_values_are_those_of_torchs_own_dropout(layer_of, kind):
    """Kept ones, dropped ones and their frequency; whole channels go together."""
    layer = KINDS[kind]
    model, dropout = layer_of(layer)
    x = torch.ones(64, 50, 4, 4)
    with dropout.serving(batch(list(range(64)))):
        ours = model.layer(x)
    theirs = type(layer)(0.3)(x)
    torch.testing.assert_close(ours.unique(), theirs.unique())
    assert abs((ours == ours.min()).float().mean() - 0.3) < 0.02
    if kind in ("Dropout2d", "FeatureAlphaDropout"):
        assert (ours.amax((2, 3)) == ours.amin((2, 3))).all()


def test_rows_that_cannot_be_told_apart_are_refused(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Transposed(), nn.Flatten(), nn.Linear(600, 5))
    model[0].requires_grad_(False)
    with ActivationCache(model, tmp_path, "0", dropout="stateless") as cache:
        loader = EgeriaLoader(Images(n=16, noise=0), 8, cache=cache)
        with pytest.raises(BoundaryError, match=r"'0\.drop'.*dropout='off'"):
            train_steps(model, loader, sgd(model))


class Transposed(nn.Module):
    """Its dropout sees the samples in the second dimension."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = self.conv(x).flatten(2).permute(1, 0, 2)
        return self.drop(x).permute(1, 0, 2)


def test_a_wrong_guess_of_the_rows_fails_the_proof(tmp_path):
    model = nn.Sequential(Transposed(), nn.Flatten(), nn.Linear(600, 5))
    model[0].requires_grad_(False)
    with ActivationCache(model, tmp_path, "0", dropout="stateless") as cache:
        loader = EgeriaLoader(Images(n=12, noise=0), 6, cache=cache)  # 6 channels, 6 samples
        with pytest.raises(BoundaryError):
            train_steps(model, loader, sgd(model))


def test_dropout_that_is_no_layer_is_named_once_and_stays_off(tmp_path, caplog):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(10, 2, 16, dropout=0.2, batch_first=True)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(100, 5))
    encoder.requires_grad_(False)

    class Tokens(Images):
        def __getitem__(self, index):
            return self.images[index, 0], self.targets[index]

    with (
        ActivationCache(model, tmp_path, "0", dropout="stateless", gate="always") as cache,
        caplog.at_level(logging.WARNING, "egeria"),
    ):
        loader = EgeriaLoader(Tokens(), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 3, lambda step: cache.flush())
        assert cache.stats().hits == 2 * 48
    named = [r.getMessage() for r in caplog.records if "'0.self_attn'" in r.getMessage()]
    assert len(named) == 1
