"""Ways in which something stale or foreign could be served; each is caught."""

import copy
import fcntl
import math
import multiprocessing
import os

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.batch.tensor import unwrap
from egeria_cache.gate import policy
from egeria_cache.store.disk.place import Budget
from tests.cache.test_auto import data, frozen_blocks
from tests.helpers.nets import Images, freeze, frozen_net, make_net, sgd, train_steps
from tests.helpers.runs import assert_same, run


@pytest.fixture
def frozen():
    return frozen_net().eval()


@torch.no_grad()
def assert_right(model, loader, images, targets):
    """Every batch of a pass gives what the raw samples give; labels name the samples."""
    plain = copy.deepcopy(model)
    for batch, labels in loader:
        outputs = model(batch)
        labels = unwrap(labels)
        expected = plain(images[labels])
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
        assert set(labels.tolist()) <= set(targets)


def numbered(offset, n=32):
    generator = torch.Generator().manual_seed(offset)
    return TensorDataset(torch.randn(n, 1, 10, 10, generator=generator), torch.arange(n))


class Trusted(Images):
    fingerprint = "always the same, it says"


def test_an_audit_sees_labels_that_were_edited(tmp_path, frozen, caplog):
    data = Trusted(noise=0)
    with ActivationCache(frozen, tmp_path, "layer1", gate="always", audit_rate=1.0) as cache:
        loader = EgeriaLoader(data, 8, cache=cache)
        train_steps(frozen, loader, sgd(frozen), on_step=lambda _: cache.flush())

        def edit(step):
            if step == 2:
                data.targets = (data.targets + 1) % 5

        train_steps(frozen, loader, sgd(frozen), on_step=edit)
        assert cache.stats().audit_failures == 1
    assert "leaf '[1]' of the batch is not what was stored" in caplog.text


def test_the_first_hits_of_an_earlier_run_are_recomputed(tmp_path, frozen, caplog):
    data = Trusted(noise=0)
    for number in range(2):
        with ActivationCache(frozen, tmp_path, "layer1", gate="always", audit_rate=0) as cache:
            loader = EgeriaLoader(data, 8, cache=cache)
            for images, _ in loader:
                frozen(images)
                cache.flush()
            assert cache.stats().audit_failures == number
        data.images += 1.0
    assert "at 'layer1' differs by" in caplog.text


@pytest.mark.parametrize("other", ["weights", "draws"])
def test_what_is_of_another_address_is_not_even_compared(tmp_path, caplog, other):
    found = []
    for seed in (0, 1, 0):
        model = make_net(seed if other == "weights" else 0).eval()
        freeze(model, "layer1")
        with ActivationCache(model, tmp_path, "layer1", gate="always", audit_rate=0) as cache:
            data, seed = Images(noise=0.3 * (other == "draws")), seed * (other == "draws")
            for images, _ in EgeriaLoader(data, 8, cache=cache, seed=seed):
                model(images)
            cache.flush()
            found.append(cache.stats().hits)
    assert found[:2] == [0, 0]
    assert 0 < found[2] < 48
    assert "AUDIT FAILED" not in caplog.text


def test_passes_that_share_persistent_workers_give_each_sample_its_own_rows(tmp_path, frozen):
    data = numbered(1)
    with ActivationCache(frozen, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(
            data, 4, shuffle=True, cache=cache, num_workers=1, persistent_workers=True
        )
        for _ in range(2):
            for left, right in zip(loader, loader, strict=False):
                assert_right(frozen, [left, right], data.tensors[0], range(32))
            assert_right(frozen, loader, data.tensors[0], range(32))
            cache.flush()


def test_a_worker_forked_during_a_commit_does_not_keep_the_lock(tmp_path):
    budget = Budget.__new__(Budget)
    budget.directory = tmp_path
    context = multiprocessing.get_context("fork")
    done = context.Event()
    with budget.locked():
        child = context.Process(target=done.wait)
        child.start()
    descriptor = os.open(tmp_path / "cache.lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    done.set()
    child.join(30)


# Audits: hits are recomputed from the raw sample, and a stale one is found and never served.


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_audits_change_nothing(tmp_path, rate, workers):
    settings = {"epochs": 3, "num_workers": workers}
    audited = run(tmp_path / "a", gate="always", cache_kwargs={"audit_rate": rate}, **settings)
    computed = run(tmp_path / "b", gate="never", **settings)
    assert_same(audited, computed)
    assert audited[3].audit_failures == 0
    if rate == 1.0:
        assert audited[3].audited == audited[3].hits == 96
    else:
        assert 0 < audited[3].audited < 20


@pytest.mark.parametrize(("share", "per_epoch"), [(0.0, 0), (math.inf, 2)])
def test_however_low_the_rate_hits_are_audited_as_far_as_that_takes_little_of_the_time(
    tmp_path, monkeypatch, share, per_epoch
):
    monkeypatch.setattr(policy, "MAX_COST", share)
    result = run(tmp_path, gate="always", cache_kwargs={"audit_rate": 1e-9})
    num_epochs = result[3].hits // 48
    assert result[3].audited == max(1, per_epoch * num_epochs)  # of six batches each
    assert result[3].refetched == result[3].audited


@pytest.mark.parametrize("move", [lambda x: x.to("cpu"), lambda x: x.float() * 1.0])
def test_an_edited_sample_is_found_and_training_goes_on_with_the_new_one(tmp_path, caplog, move):
    data, model = Trusted(noise=0), make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always", audit_rate=1.0) as cache:
        loader = EgeriaLoader(data, 8, cache=cache, reuse=None)
        model.eval()
        for epoch in range(3):
            start = 0
            if epoch == 1:
                data.images += 1.0  # without a sample_version nobody can know, but an audit sees it
            for images, _ in loader:
                with torch.no_grad():
                    outputs = model(move(images))
                    expected = model(data.images[start : start + 8])
                assert torch.equal(outputs, expected)
                start += 8
            cache.flush()
        stats = cache.stats()
    assert stats.audit_failures == 1
    assert stats.hits <= 48
    assert "audit failed" in stats.why_not
    assert caplog.text.count("AUDIT FAILED") == 1
    assert "at 'layer1' differs by" in caplog.text
    assert "sample_version" in caplog.text


# Loaders of one name over the same data share what is stored, as soon as it is stored.


@torch.no_grad()
def evaluate(model, cache, dataset=None, **options):
    """As scripts do it: a loader of its own each time."""
    model.eval()
    loader = EgeriaLoader(
        dataset or data(), batch_size=8, cache=cache, name="val", **{"seed": 0, **options}
    )
    losses = [F.cross_entropy(model(x), y).item() for x, y in loader]
    model.train()
    return losses


def test_every_evaluation_but_the_first_is_served_whole(directory):
    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always", audit_rate=0) as cache:
        first = evaluate(model, cache)
        cache.flush()
        before = cache.stats().hits
        for _ in range(3):
            assert evaluate(model, cache) == pytest.approx(first, abs=1e-6)
        assert cache.stats().hits - before == 3 * 32
