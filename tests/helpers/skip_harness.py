"""A host that keeps captured rows in a dict, and batches as the loader would give them."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from egeria_cache.batch import Batch, BatchTensor, without_data
from egeria_cache.skip.engine import SkipEngine
from egeria_cache.skip.serve import replay
from egeria_cache.skip.serve.call import Invocation


@dataclass
class FakeEntry:
    host: FakeHost
    cut: object
    ids: list
    hit: np.ndarray
    broken: bool = False

    @property
    def alive(self):
        return self.cut in self.host.stored

    def load(self):
        if self.broken:
            raise LookupError("gone")
        self.host.num_loads += 1
        rows = [self.host.stored[self.cut][i] for i, h in zip(self.ids, self.hit, strict=True) if h]
        return {name: torch.stack([row[name] for row in rows]) for name in self.cut.tensors}


@dataclass
class FakeHost:
    stored: dict = field(default_factory=dict)
    refusals: list = field(default_factory=list)
    changes: list = field(default_factory=list)
    num_loads: int = 0
    idle: dict = field(default_factory=dict)

    def cut_found(self, batch, cut):
        self.stored[cut] = {}

    def captured(self, batch, cut, rows, tensors):
        rows = np.ones(batch.size, bool) if rows is None else rows
        assert set(tensors) == set(cut.tensors)
        for k, i in enumerate(np.flatnonzero(rows)):
            row = {name: t[k].clone() for name, t in tensors.items()}
            for name, value in row.items():
                assert tuple(value.shape) == cut.tensors[name].shape
                assert value.dtype == cut.tensors[name].dtype
            self.stored[cut][batch.ids[i]] = row

    def audited(self, batch, entry):
        return None

    entry_at = audited

    def prefix_changed(self, reason, *, unlink=False):
        self.changes.append(reason)
        self.stored.clear()

    def unproved(self, reason):
        raise AssertionError(reason)

    def failed(self, error, batch=None):
        raise error

    def refused(self, error, *, at_first=False):
        self.refusals.append(error)

    def called(self, *told):
        return None

    postpones = thawed = uncached = note = called

    def is_refused(self):
        return False


class Harness:
    """Drive one model with and without the engine over the same data."""

    def __init__(self, model, data, **host):
        """Take `data` as a dict of leaves, each with one row per sample."""
        self.model = model
        self.data = data
        self.num_samples = len(next(iter(data.values())))
        self.host = FakeHost(**host)
        self.engine = SkipEngine(model, self.host)
        self.engine.attach()
        self.reloaded = 0

    def batch(self, ids, cut=None, *, transform=None, draw=0):
        """Return the leaves of a batch; samples stored for `cut` (default: any) are hits."""
        ids = list(ids)
        entry = None
        cuts = [cut] if cut is not None else list(self.host.stored)[::-1]
        for candidate in cuts:
            hit = np.array([i in self.host.stored.get(candidate, {}) for i in ids])
            if hit.any():
                entry = FakeEntry(self.host, candidate, ids, hit)
                break
        rows = {name: values[ids] for name, values in self.data.items()}
        leaves = dict(rows)
        if entry is not None:
            for name in entry.cut.dropped:
                leaves[name] = rows[name][torch.from_numpy(~entry.hit)]

        def load_rows(mask):
            self.reloaded += int(mask.sum())
            return {name: values[torch.from_numpy(mask)] for name, values in rows.items()}

        batch = Batch(
            ids=ids, draws=np.full(len(ids), draw), loader_name="train", leaves=leaves,
            load_rows=load_rows, planned_entry=entry,
        )  # fmt: skip
        tensors = {}
        for name, values in rows.items():
            if entry is not None and name in entry.cut.dropped:
                meta = torch.empty_strided(
                    values.shape, values.stride(), dtype=values.dtype, device="meta"
                )
                misses = leaves[name] if len(leaves[name]) else None
                tensors[name] = without_data(meta, batch, name, misses)
            else:
                tensors[name] = BatchTensor.wrap(values, batch, name)
        return tensors

    def plain(self, ids):
        return {name: values[list(ids)] for name, values in self.data.items()}


def ways(monkeypatch):
    """Return a list that gets the way through the model and the rows of each batch."""
    taken = []

    def noting(way):
        run = getattr(replay, way)

        def wrapped(forward, plan, *args):
            found = next(one for one in args if isinstance(one, Invocation | int))
            taken.append((way, found if way == "prefix" else found.batch.size))
            return run(forward, plan, *args)

        return wrapped

    for way in ("full", "prefix", "replay"):
        monkeypatch.setattr(replay, way, noting(way))
    return taken


def freeze(model, *names):
    for name in names:
        model.get_submodule(name).requires_grad_(False).eval()


def gradients(model):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def step(model, call, batch, seed=0):
    """One forward and backward; return the loss and all gradients."""
    torch.manual_seed(seed)
    random.seed(seed)
    model.zero_grad(set_to_none=True)
    loss = call(model, batch)
    loss.backward()
    return loss.detach().clone(), gradients(model), torch.rand(1)


def assert_same_run(harness, call, batches, *, exact=True, plain=None):
    """Compare the engine's model with a plain one, a copy if none is given, batch by batch."""
    plain = plain or copy.deepcopy(harness.model)
    for n, ids in enumerate(batches):
        ours = step(harness.model, call, harness.batch(ids), seed=n)
        theirs = step(plain, call, harness.plain(ids), seed=n)
        assert_same(ours, theirs, exact=exact)


def assert_same(ours, theirs, *, exact=True):
    for a, b in [(ours[0], theirs[0]), *((ours[1][k], theirs[1][k]) for k in theirs[1])]:
        assert (a is None) == (b is None)
        if a is None:
            continue
        if exact:
            assert torch.equal(a, b), (a - b).abs().max()
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours[2], theirs[2]), "the random generators went apart"
