"""A data set that becomes another one, in mid-run or between runs, is never served from the old.

In which ways it may become another: `hostile/test_data.py`, `samples/test_fingerprint.py`.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.nets import freeze, make_net, sgd, train_steps

N = 32


class Scaled(Dataset):
    """Everything about it may change."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(N, 1, 10, 10, generator=generator)
        self.targets = torch.arange(N) % 5
        self.transform = Scale(1.0)
        self.epoch = 0
        self.num_loaded = 0

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.num_loaded += 1
        return self.transform(self.images[index]) + self.epoch, self.targets[index]


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def train(directory, change=None, *, gate="always", epochs=4, at=2, data=None, **kwargs):
    model = make_net()
    freeze(model, "layer1")
    data = data or Scaled()
    losses = []
    with ActivationCache(model, directory, "layer1", gate=gate, audit_rate=0) as cache:
        loader = EgeriaLoader(data, 8, cache=cache, **kwargs)
        optimizer = sgd(model)
        for epoch in range(epochs):
            if change is not None and epoch == at:
                change(data, loader)
            losses += train_steps(model, loader, optimizer)[0]
            cache.flush()
        return losses, cache.stats()


def test_what_was_stored_while_the_data_set_changed_does_not_outlive_the_epoch(tmp_path):
    """Rows of the new data set must not lie under the old one's address."""
    data = Scaled()
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path / "a", "layer1", gate="always") as cache:
        for step, (images, _) in enumerate(EgeriaLoader(data, 8, cache=cache)):
            model(images)
            if step == 1:
                data.transform.by = 5.0
        cache.flush()
    losses, stats = train(tmp_path / "a", epochs=1)
    assert losses == train(tmp_path / "b", epochs=1, gate="never")[0]
    assert stats.hits == 0


def test_what_an_abandoned_pass_stored_is_not_trusted_after_a_change(tmp_path):
    data = Scaled()
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path / "a", "layer1", gate="always") as cache:
        loader = EgeriaLoader(data, 8, cache=cache)
        for step, (images, _) in enumerate(loader):
            model(images)
            data.transform.by = 5.0
            if step == 2:
                break
        cache.flush()
        next(iter(loader))
    assert train(tmp_path / "a", epochs=1)[1].hits == 0


def test_a_data_set_that_changes_in_every_epoch_is_left_uncached_and_named(tmp_path, caplog):
    def step_on(data, loader):
        data.epoch += 1

    data = Scaled()
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(data, 8, cache=cache)
        for _ in range(7):
            train_steps(model, loader, sgd(model))
            step_on(data, loader)
        assert cache.stats().hits == 0
        assert "changes again and again (data set.epoch)" in cache.stats().why_not
    assert caplog.text.count("is another one") == 1
