"""Ways in which something stale or foreign could be served; each is caught."""

from __future__ import annotations

import copy
import fcntl
import multiprocessing
import os

import pytest
import torch
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.batch.tensor import unwrap
from egeria_cache.store.disk.budget import Budget
from tests.helpers.nets import Images, freeze, make_net, sgd, train_steps


@pytest.fixture
def frozen():
    model = make_net()
    freeze(model, "layer1")
    return model.eval()


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


def test_two_loaders_of_one_name_do_not_share_samples(tmp_path, frozen):
    one, other = numbered(1), numbered(2)
    with ActivationCache(frozen, tmp_path, "layer1", gate="always") as cache:
        loaders = [EgeriaLoader(data, 8, shuffle=True, cache=cache) for data in (one, other)]
        for _ in range(3):
            for loader, data in zip(loaders, (one, other), strict=True):
                assert_right(frozen, loader, data.tensors[0], range(32))
            cache.flush()
        assert cache.stats().hits >= 2 * 2 * 32 - 32


def test_an_audit_sees_labels_that_were_edited(tmp_path, frozen, caplog):
    class Trusted(Images):
        fingerprint = "always the same, it says"

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


def test_a_reopened_generation_is_compared_with_the_first_batch(tmp_path, frozen, caplog):
    class Trusted(Images):
        fingerprint = "always the same, it says"

    data = Trusted(noise=0)
    for run in range(2):
        with ActivationCache(frozen, tmp_path, "layer1", gate="always", audit_rate=0) as cache:
            loader = EgeriaLoader(data, 8, cache=cache)
            for images, _ in loader:
                frozen(images)
                cache.flush()
            assert cache.stats().audit_failures == run
        data.images += 1.0
    assert "is not what an earlier run stored" in caplog.text


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
        first = iter(loader)
        next(first)
        next(iter(loader))  # a peek: DataLoader's shared iterator starts again
        assert len(list(first)) == 7


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


def needs_two(samples):
    assert len(samples) > 1, "a batch of one makes no sense here"
    return torch.utils.data.default_collate(samples)


def test_errors_of_the_users_own_code_leave_the_loader_uncached(tmp_path, frozen, caplog):
    with ActivationCache(frozen, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(numbered(1), 8, cache=cache, collate_fn=needs_two)
        for _ in range(2):
            assert_right(frozen, loader, numbered(1).tensors[0], range(32))
        assert cache.stats().hits == 0
    assert "a batch of one makes no sense here" in caplog.text


def test_file_times_serve_as_versions(frozen):
    loader = EgeriaLoader(numbered(1), seed=0, sample_version=lambda index: 1700000000.25)
    assert loader.source.identify([3]) == [(3, "1700000000.25")]
