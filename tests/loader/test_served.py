"""Every way to draw and name samples, served from the cache: as without it, to the last loss."""

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch.utils.data import default_collate

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.store.generation import encode_keys
from tests.helpers.forked import nursery
from tests.helpers.nets import Images, frozen_net
from tests.helpers.runs import cached, run

pytestmark = pytest.mark.usefixtures("way_of_rows")

NUM_SAMPLES = 48


def train(directory, *, gate="always", **kwargs):
    """A frozen run from a fixed start: its losses and the cache's counts."""
    losses, _, _, stats, _ = run(directory, gate=gate, **{"shuffle": False} | kwargs)
    return losses, stats


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


class Keyed(Images):
    """Indexed by its keys alone, as a data set of files or records is."""

    def __init__(self, keys):
        super().__init__()
        self.at = {key: i for i, key in enumerate(keys)}

    def __getitem__(self, key):
        return super().__getitem__(self.at[key])


def counted(samples):
    """Collate images, labels, and how many there are."""
    images, targets = default_collate(samples)
    return {"images": images, "targets": targets, "size": len(samples)}


def test_a_leaf_that_counts_the_samples_of_a_batch_is_served_with_them(tmp_path):
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Images(noise=0), 10, cache=cache, collate_fn=counted)
        for _ in range(3):
            batches = list(map(dict, loader))
            assert [batch["size"] for batch in batches] == [10, 10, 10, 10, 8]
            assert len([model(batch["images"]) for batch in batches]) == 5
            cache.flush()
        loaded = loader.dataset.num_loaded
        assert [batch["size"] for batch in loader] == [10, 10, 10, 10, 8]
        assert loader.dataset.num_loaded <= loaded + 4, (
            "but for two that are read again at each end"
        )
        assert cache.stats().hits > 0


KEYS = {
    "strings": [f"n{i % 5}/image-{i:03}.jpg" for i in range(NUM_SAMPLES)],
    "tuples": [("scene", i // 8, (i % 8, "left")) for i in range(NUM_SAMPLES)],
    "negative": [-1 - i for i in range(NUM_SAMPLES)],
    "huge": [(1 << 61) + i for i in range(NUM_SAMPLES)],
    "mixed": [str(i) if i % 2 else i for i in range(NUM_SAMPLES)],
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_every_kind_are_served(tmp_path, kind, workers):
    if workers and kind != "tuples":
        pytest.skip("one kind of key is enough with workers")
    settings = {"data": Keyed(KEYS[kind]), "sampler": KEYS[kind], "num_workers": workers}
    losses, stats = train(tmp_path / "a", **settings)
    assert losses == train(tmp_path / "b", gate="never", **settings)[0]
    assert (stats.hits, stats.misses) == (2 * NUM_SAMPLES, NUM_SAMPLES)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_limit_reached_in_mid_epoch_gives_mixed_batches(tmp_path, workers):
    settings = {"num_workers": workers, "shuffle": True, "epochs": 2, "data": Images(240)}
    losses, stats = train(tmp_path / "a", limit=300_000, **settings)
    close(losses, train(tmp_path / "b", gate="never", **settings)[0])
    assert stats.bytes_on_disk <= 300_000
    assert stats.partial_batches > 0
    assert 0 < stats.hits < 240


NESTED = [("a", 1, 2), (("a", 1), 2), ("a", (1, 2)), ("", "('a', 1)"), (("", "('a', 1)"), 2),
          ("", "(('a', 1), 2)"), ("",), ("", ""), "", "('a', 1)"]  # fmt: skip


def test_no_two_ids_become_one():
    loader = EgeriaLoader(Images(), sample_id=NESTED.__getitem__, seed=0)
    ids = loader.source.identify(range(len(NESTED)))
    assert len(set(ids)) == len(NESTED)
    assert len(set(encode_keys(ids))) == len(NESTED)
    assert ids[0] == NESTED[0]


class Deadly(Images):
    """A worker that loads one sample dies; a glance at 32 of the 48 does not meet that one."""

    deadly = 41

    def __getitem__(self, index):
        if index == self.deadly and torch.utils.data.get_worker_info() is not None:
            self.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

    def wait(self):
        pass


class Killed(Deadly):
    """It dies once all that it sent before has arrived."""

    deadly = 20

    def __init__(self):
        super().__init__()
        self.asked, self.answered = os.pipe()

    def wait(self):
        os.read(self.asked, 1)


class Stuck(Killed):
    """It goes on when nobody waits for it any more."""

    def __getitem__(self, index):
        if index == self.deadly and torch.utils.data.get_worker_info() is not None:
            self.wait()
        return Images.__getitem__(self, index)


@pytest.mark.parametrize(
    ("data", "kwargs", "match"),
    [
        (Killed, {}, r"DataLoader worker \(pid\(?s?\)? .*(killed by signal|exited unexpectedly)"),
        (Stuck, {"timeout": 1}, "DataLoader timed out after 1 seconds"),
    ],
)
def test_a_dead_or_stuck_worker_gives_dataloaders_own_error(tmp_path, data, kwargs, match):
    with cached(tmp_path) as (model, cache):
        dataset = data()
        loader = EgeriaLoader(dataset, 8, num_workers=1, cache=cache, reuse=None, **kwargs)

        def use(loader=loader):
            for number, (images, _) in enumerate(loader):
                model(images)
                if number == 1 and data is Killed:
                    os.write(dataset.answered, b"x")

        with pytest.raises(RuntimeError, match=match):
            use()
        os.write(dataset.answered, b"x")
        del loader, use
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_other_ways_to_start_workers_are_served_the_same(tmp_path, context):
    nursery()  # if nobody has begun to fork yet
    settings = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}
    losses, stats = train(tmp_path / "a", epochs=2, **settings)
    assert losses == train(tmp_path / "b", gate="never", epochs=2)[0]
    assert stats.hits == NUM_SAMPLES


class Uneven(Images):
    """The first samples take longest, so that later batches are ready before."""

    def __getitem__(self, index):
        if index < 8:
            time.sleep(0.02)
        return super().__getitem__(index)


def test_batches_out_of_order_are_each_right(tmp_path):
    data = Uneven(noise=0)
    model = frozen_net()
    model.eval()
    with torch.no_grad():
        expected = model(data.images)
    by_image = {tuple(image.flatten().tolist()): i for i, image in enumerate(data.images)}
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(data, 8, cache=cache, reuse=None, num_workers=2, in_order=False)
        for epoch in range(3):
            seen = []
            for images, targets in loader:
                with torch.no_grad():
                    outputs = model(images)
                rows = [by_image[tuple(image.flatten().tolist())] for image in images + 0]
                torch.testing.assert_close(outputs, expected[rows])
                assert torch.equal(targets, data.targets[rows])
                seen += rows
                cache.flush()
            assert sorted(seen) == list(range(NUM_SAMPLES)), epoch
        assert cache.stats().hits >= NUM_SAMPLES
