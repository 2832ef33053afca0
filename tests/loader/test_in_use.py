"""Promises that take a loader, a cache and a way of use together."""

from functools import partial

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from egeria_cache import ActivationCache, EgeriaError, EgeriaLoader, FrozenPrefix
from tests.helpers.nets import Images, freeze, frozen_net, make_net, sgd, train_steps

# A loader that exists is attached to a cache, and stays the object that it was.

SIZE = 40


def stacked(samples):
    return torch.stack([image for image, _ in samples]), torch.tensor([y for _, y in samples])


class Named(DataLoader):
    """A subclass that only adds to its arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.title = self.name = "mine"


class Unmeasured(RandomSampler):
    __len__ = Sampler.__iter__  # it raises NotImplementedError


class OnDevice(DataLoader):
    def __iter__(self):
        for images, targets in super().__iter__():
            yield images + 0, targets


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "in order": partial(DataLoader, batch_size=8),
    "shuffled": partial(DataLoader, batch_size=8, shuffle=True, drop_last=True),
    "its own generator": lambda data: DataLoader(data, 8, shuffle=True, generator=generator()),
    "a sampler": lambda data: DataLoader(
        data, 8, sampler=WeightedRandomSampler([1.0 + i for i in range(len(data))], len(data))
    ),
    "a sampler of unknown length": lambda data: DataLoader(data, 8, sampler=Unmeasured(data)),
    "a batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 7, drop_last=False)
    ),
    "a collate function": partial(DataLoader, batch_size=8, shuffle=True, collate_fn=stacked),
    "a subclass": partial(Named, batch_size=8, shuffle=True),
    "an EgeriaLoader": partial(EgeriaLoader, batch_size=8, shuffle=True),
    "workers": partial(DataLoader, batch_size=8, shuffle=True, num_workers=1),
    "persistent workers": partial(
        DataLoader, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def trained(make, directory, *, attached, before=0, epochs=3):
    """Return the losses of all epochs, the first `before` of them before a cache is there."""
    data, model = Images(SIZE, noise=0), make_net()
    freeze(model, "layer1")
    loader, optimizer = make(data), sgd(model)
    with FrozenPrefix([model.stem, model.layer1]):
        torch.manual_seed(0)
        losses = train_steps(model, loader, optimizer, before)[0] if before else []
        if not attached:
            return losses + train_steps(model, loader, optimizer, epochs - before)[0], None, loader
        with ActivationCache(model, directory, "layer1", loader=loader, gate="always") as cache:
            on_step = lambda _: cache.flush()  # noqa: E731
            losses += train_steps(model, loader, optimizer, epochs - before, on_step)[0]
            return losses, cache.stats(), loader


def assert_alike(served, plain):
    torch.testing.assert_close(served[0], plain[0], rtol=1e-5, atol=1e-6)
    assert type(served[2]) is type(plain[2])  # closed, it is what it was
    assert vars(served[2]).keys() <= vars(plain[2]).keys()
    assert vars(served[2]).get("name") == vars(plain[2]).get("name")


@pytest.mark.parametrize("name", LOADERS)
def test_an_attached_loader_gives_the_batches_it_would_have_given(name, directory):
    plain = trained(LOADERS[name], directory, attached=False)
    served = trained(LOADERS[name], directory, attached=True)
    assert_alike(served, plain)
    assert served[1].hits >= SIZE


@pytest.mark.parametrize("name", ["shuffled", "persistent workers"])
def test_a_loader_in_use_is_served_from_its_next_pass_on(name, directory):
    plain = trained(LOADERS[name], directory, attached=False, before=1, epochs=4)
    served = trained(LOADERS[name], directory, attached=True, before=1, epochs=4)
    assert_alike(served, plain)
    assert served[1].hits >= SIZE


def test_a_pass_under_way_goes_on_as_it_is(directory):
    model = frozen_net()
    loader = DataLoader(Images(SIZE, noise=0), 8)
    next(under_way := iter(loader))
    with ActivationCache(model, directory, "layer1", loader=loader):
        assert [type(x) for x, _ in under_way] == [torch.Tensor] * 4
        assert isinstance(loader, EgeriaLoader)
        next(given_back := iter(loader))
    assert [len(list(given_back)), len(list(loader))] == [4, 5]
    assert type(loader) is DataLoader


REFUSED = {
    "no loader": (lambda: [1, 2], TypeError, "list is none"),
    "own passes": (lambda: OnDevice(Images(8)), EgeriaError, "OnDevice has a __iter__ of its own"),
}


def test_an_attached_loader_goes_to_the_cache_that_came_last(directory):
    loader, old, new = DataLoader(Images(8, noise=0), 4), make_net(), make_net()
    with ActivationCache(old, directory / "a", loader=loader) as first:
        with ActivationCache(new, directory / "b", loader=loader) as second:
            assert loader.cache is second
            first.close()
            assert loader.cache is second
        assert type(loader) is DataLoader


@pytest.mark.parametrize(("make", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_over_is_refused_by_name(make, error, text, directory):
    loader = make()
    kind = type(loader)
    with pytest.raises(error, match=text):
        ActivationCache(make_net(), directory, loader=loader)
    assert type(loader) is kind
