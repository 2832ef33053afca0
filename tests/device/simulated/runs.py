"""A whole run on a device, with a cache or without, and its comparison with another."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from egeria_cache import ActivationCache, EgeriaLoader
from tests.device import backend
from tests.helpers.nets import Images, freeze, make_net, sgd

DEVICE = backend.NAME


def moved(batch, device=DEVICE, non_blocking=False):
    return [part.to(device, non_blocking=non_blocking) for part in batch]


def run(directory, *, gate, epochs=3, moves=None, boundary="layer1", make=make_net, data=None,
        autocast=None, wrap=None, place=DEVICE, to=moved, on_step=None,
        cache_kwargs=None, scaled=False, freezes=freeze, finish=None, **loader_kwargs):  # fmt: skip
    """Train on the device; return losses, weights and stats."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = make().to(place)
    freezes(model, boundary)
    optimizer = sgd(model)
    data = Images() if data is None else data
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=scaled)
    losses, step = [], 0
    settings = {"audit_rate": 0, **(cache_kwargs or {})}
    loader_kwargs = {"shuffle": True, "seed": 3, "batch_size": 8, "reuse": None} | loader_kwargs
    with ActivationCache(model, directory, boundary, gate=gate, **settings) as cache:
        loader = EgeriaLoader(data, cache=cache, **loader_kwargs)
        for _ in range(epochs):
            for batch in wrap(loader) if wrap else loader:
                model.train()
                images, targets = to(batch)
                with torch.autocast(DEVICE, dtype=autocast, enabled=autocast is not None):
                    loss = F.cross_entropy(model(images), targets)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
                step += 1
                if on_step is not None:
                    on_step(step, model, cache)
                if moves and step in moves:
                    freezes(model, moves[step])
                    cache.set_boundary(moves[step])
                cache.flush()
        stats = cache.stats()
        if finish is not None:
            finish(model, cache)
    return losses, model.state_dict(), stats


_PLAIN: dict[str, Any] = {}


def plain(**settings):
    """Return the run without skipping; one that was made before, if there is."""
    key = repr(sorted(settings.items()))
    if key not in _PLAIN:
        with tempfile.TemporaryDirectory() as directory:
            _PLAIN[key] = settings, run(Path(directory), gate="never", **settings)
    return _PLAIN[key][1]


def assert_same(cached, computed, *, exact=True):
    """Losses and weights are equal, to the bit where no batch was mixed."""
    if exact and not cached[2].partial_batches:
        assert cached[0] == computed[0]
        for name, value in cached[1].items():
            assert torch.equal(value.cpu(), computed[1][name].cpu()), name
    else:
        torch.testing.assert_close(cached[0], computed[0], rtol=1e-5, atol=1e-6)


def compared(directory, *, hits=None, exact=True, **settings):
    """Train with a cache and without: that is the same; return what the cache counted."""
    cached = run(directory, gate="always", **settings)
    assert_same(cached, plain(**settings), exact=exact)
    assert hits is None or (cached[2].hits, cached[2].why_not) == (hits, None)
    return cached[2]
