"""A whole run with a cache, its comparison with another, and trouble on the way."""

import copy
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.nets import Images, freeze, frozen_net, make_net, sgd, train_steps
from tests.helpers.steps import take_step


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


def both(directory, **settings):
    """Train with a cache that serves, and with one that does not."""
    return [run(directory / gate, gate=gate, **settings) for gate in ("always", "never")]


@contextmanager
def cached(directory, boundary="layer1", *, gate="always", **options):
    """A net that is frozen up to a boundary, and its cache."""
    model = frozen_net(boundary)
    with ActivationCache(model, directory, boundary, gate=gate, **options) as cache:
        yield model, cache


def resumable(directory, *, epochs, until=None, state=None, gate="always", moves=None, place="cpu",
              **loader_kwargs):  # fmt: skip
    """Train to the end, or to the step `until`; return losses, the cache's figures, and the state.

    With a state training goes on from there, with objects of its own. `moves` maps a step to the
    boundary set after it.
    """
    moves = {0: "layer1"} if moves is None else moves
    torch.manual_seed(5)
    model, losses, step = make_net().to(place), [], 0 if state is None else state["step"]
    boundary = next((moves[at] for at in sorted(moves, reverse=True) if at <= step), None)
    freeze(model, boundary)
    optimizer = sgd(model)
    with ActivationCache(model, directory, boundary, gate=gate, audit_rate=0) as cache:
        loader = EgeriaLoader(Images(), 8, shuffle=True, cache=cache, seed=3, **loader_kwargs)
        things = {"model": model, "optimizer": optimizer, "loader": loader}
        for name in things if state is not None else ():
            things[name].load_state_dict(copy.deepcopy(state[name]))
        while step < epochs * len(loader):
            model.train()
            for images, targets in loader:
                loss = F.cross_entropy(model(images.to(place)), targets.to(place))
                losses.append(take_step(loss, optimizer).item())
                step += 1
                if step in moves:
                    freeze(model, moves[step])
                    cache.set_boundary(moves[step])
                cache.flush()
                if step == until:
                    saved = {k: copy.deepcopy(v.state_dict()) for k, v in things.items()}
                    return losses, cache.stats(), saved | {"step": step}
        return losses, cache.stats(), None


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
    cache.api.store.writer._next = lambda: 1 / 0
