"""A whole run with a cache, its comparison with another, and trouble on the way."""

from contextlib import contextmanager

import torch

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.nets import Images, freeze, frozen_net, sgd, train_steps


def run(directory, *, gate, epochs=3, moves=None, boundary="layer1", limit="1GB", wrap=None,
        data=None, each_step=None, cache_kwargs=None, reuse=None, **loader_kwargs):  # fmt: skip
    """Train with a cache; `moves` maps a step to the boundary set after it.

    Samples keep their draws for ever, unless `reuse` says otherwise: from then on all are hits.
    `each_step` is given the number of the step that was made, and the cache.
    """
    data = Images() if data is None else data
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "reuse": reuse} | loader_kwargs
    settings = {"gate": gate, "limit": limit} | (cache_kwargs or {})
    with cached(directory, boundary, **settings) as (model, cache):
        loader = EgeriaLoader(data, cache=cache, **options)

        def on_step(step):
            if moves and step in moves:
                freeze(model, moves[step])
                cache.set_boundary(moves[step])
            cache.flush()
            if each_step is not None:
                each_step(step, cache)

        losses, gradients = train_steps(
            model, wrap(loader) if wrap else loader, sgd(model), epochs, on_step
        )
        stats = cache.stats()
    return losses, gradients, model.state_dict(), stats, data


@contextmanager
def cached(directory, boundary="layer1", *, gate="always", **options):
    """A net that is frozen up to a boundary, and its cache."""
    model = frozen_net(boundary)
    with ActivationCache(model, directory, boundary, gate=gate, **options) as cache:
        yield model, cache


def assert_same(cached, computed):
    if cached[3].partial_batches:
        # The misses' rows are computed in a smaller batch: other kernels, other last bits.
        torch.testing.assert_close(cached[0], computed[0], rtol=1e-5, atol=1e-6)
        return
    assert cached[0] == computed[0]
    for left, right in zip(cached[1:3], computed[1:3], strict=True):
        assert left.keys() == right.keys()
        for name in left:
            a, b = left[name], right[name]
            assert (a is None and b is None) or torch.equal(a, b), name


def kill_writer(cache):
    """Make the writer thread die of an error of its own at its next batch."""
    cache._store._writer._next = lambda: 1 / 0
