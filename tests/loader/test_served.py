"""Every way to draw and name samples, served from the cache: as without it, to the last loss."""

import functools
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.store.records.keys import encode_keys
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
def test_a_generation_cleared_by_the_inspector_while_a_loader_runs_is_left_alone(tmp_path):
    answers = []

    def each_step(step, cache):
        if step == 9:
            answers.append(
                subprocess.run(
                    [sys.executable, "-c", "from egeria_cache.inspect.cli import main; main()",
                     str(tmp_path / "a"), "prune", "--unused", "--yes"],
                    timeout=60, capture_output=True, text=True,
                )
            )  # fmt: skip

    losses, stats = train(tmp_path / "a", each_step=each_step)
    assert losses == train(tmp_path / "b", gate="never")[0]
    assert "0 B freed" in answers[0].stdout, answers[0]
    assert stats.hits == 2 * NUM_SAMPLES


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_limit_reached_in_mid_epoch_gives_mixed_batches(tmp_path, workers):
    settings = {"num_workers": workers, "shuffle": True, "epochs": 2, "data": Images(240)}
    losses, stats = train(tmp_path / "a", limit=300_000, **settings)
    close(losses, train(tmp_path / "b", gate="never", **settings)[0])
    assert stats.bytes_on_disk <= 300_000
    assert stats.partial_batches > 0
    assert 0 < stats.hits < 240


def shared_memory(pids):
    """What these processes have left in shared memory; torch puts the maker's ID in the name."""
    return [name for name in os.listdir("/dev/shm") for pid in pids if f"_{pid}_" in name]


@pytest.mark.cases(1)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_iterator_collected_with_batches_in_flight_leaves_nothing_behind(
    tmp_path, frozen, persistent
):
    model = frozen_net()
    threads, pids = threading.active_count(), {os.getpid()}
    with ActivationCache(model, tmp_path, gate="always") as cache:
        if frozen:
            cache.set_boundary("layer1")
        loader = EgeriaLoader(
            Images(), 8, cache=cache, reuse=None, num_workers=2, prefetch_factor=2,
            persistent_workers=persistent,
        )  # fmt: skip
        for _ in range(3):
            iterator = iter(loader)
            for _ in range(2):
                model(next(iterator)[0])
            pids |= {child.pid for child in multiprocessing.active_children()}
            cache.flush()
            del iterator
            gc.collect()
        outputs = [model(images) for images, _ in loader]
        assert sum(map(len, outputs)) == NUM_SAMPLES
        assert len(multiprocessing.active_children()) == (2 if persistent else 0)
        del loader
        gc.collect()
    assert multiprocessing.active_children() == []
    deadline = time.monotonic() + 120
    while (
        threading.active_count() > threads
    ):  # threads that feed DataLoader's queues are not joined
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
    assert len(pids) > 2
    assert shared_memory(pids) == []


@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_pass_ends_with_its_last_reference(tmp_path, kwargs):
    """Left to the garbage collector, DataLoader's workers are stopped by time-outs alone."""
    model = frozen_net()
    gc.collect()
    gc.disable()
    try:
        with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
            for _ in range(2):
                loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None, **kwargs)
                iterator = iter(loader)
                for _ in range(3):
                    images, _ = next(iterator)
                    model(images)
                    cache.flush()
                ends = weakref.ref(iterator), weakref.ref(loader)
                del iterator
                assert ends[0]() is None
                del loader
                assert ends[1]() is None
                assert images.shape == (8, 1, 10, 10)
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


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


def test_hits_are_served_although_their_workers_would_die(tmp_path):
    train(tmp_path, epochs=1, data=Deadly())
    losses, stats = train(tmp_path, epochs=1, data=Deadly(), num_workers=1)
    # A worker is given its first batches before the model shows what the store holds.
    assert stats.hits == NUM_SAMPLES - 3 * 8
    assert losses == train(tmp_path / "other", epochs=1, gate="never", data=Images())[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_other_ways_to_start_workers_are_served_the_same(tmp_path, context):
    nursery()  # if nobody has begun to fork yet
    settings = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}
    losses, stats = train(tmp_path / "a", epochs=2, **settings)
    assert losses == train(tmp_path / "b", gate="never", epochs=2)[0]
    assert stats.hits == NUM_SAMPLES


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pins")
@pytest.mark.parametrize("workers", [0, 1])
def test_asking_for_pinned_memory_without_a_device_warns_as_dataloader_does(tmp_path, workers):
    data = Images()

    def warned(use):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
        return {str(w.message) for w in caught if "pin" in str(w.message)}

    plain = warned(lambda: list(DataLoader(data, 8, pin_memory=True, num_workers=workers)))
    results = []
    settings = {"pin_memory": True, "num_workers": workers, "data": data}
    served = warned(lambda: results.append(train(tmp_path / "a", **settings)))
    assert served == plain
    assert results[0][0] == train(tmp_path / "b", gate="never", data=data)[0]
    assert results[0][1].hits == 2 * NUM_SAMPLES


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


def _collate_pairs(samples, scale):
    images, targets = torch.utils.data.default_collate(samples)
    return {"x": images * scale, "y": targets, "names": [f"t{int(t)}" for t in targets]}


def test_a_batch_of_another_type_comes_back_with_hits_as_it_was(tmp_path):
    model = frozen_net()
    collate = functools.partial(_collate_pairs, scale=2.0)
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None, collate_fn=collate, seed=3)
        epochs = []
        for _ in range(3):
            epoch = []
            for batch in loader:
                model(batch["x"])
                epoch.append((batch["y"].tolist(), batch["names"], list(batch)))
                cache.flush()
            epochs.append(epoch)
        assert epochs[0] == epochs[1] == epochs[2]
        assert cache.stats().hits == 2 * NUM_SAMPLES


class Augmented(Dataset):
    """Images through an albumentations 2.x pipeline, which has random generators of its own."""

    def __init__(self, transform):
        self.images = Images(noise=0)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, target = self.images[index]
        image = self.transform(image=image.permute(1, 2, 0).numpy())["image"]
        return torch.from_numpy(image.copy()).reshape(1, 10, 10), target


@pytest.mark.parametrize("workers", [0, 2])
def test_albumentations_draw_from_the_samples_own_seed(tmp_path, workers, monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    albumentations = pytest.importorskip("albumentations", minversion="2")
    data = Augmented(
        albumentations.Compose(
            [
                albumentations.HorizontalFlip(p=0.5),
                albumentations.RandomBrightnessContrast(p=0.5),
                albumentations.OneOf([albumentations.RandomRotate90(), albumentations.Transpose()]),
            ]
        )
    )
    settings = {"data": data, "num_workers": workers, "augmentation_variants": 2, "epochs": 4}
    losses, stats = train(tmp_path / "a", **settings)
    assert losses == train(tmp_path / "b", gate="never", **(settings | {"num_workers": 0}))[0]
    assert stats.hits == 2 * NUM_SAMPLES
    assert stats.why_not is None
    varied = [torch.cat([x for x, _ in EgeriaLoader(data, 8, seed=s)]) for s in (0, 0, 1)]
    assert torch.equal(varied[0], varied[1])
    assert not torch.equal(varied[0], varied[2])


def test_the_directory_of_a_removed_cache_may_be_used_again(tmp_path):
    train(tmp_path / "a", epochs=1)
    shutil.rmtree(tmp_path / "a")
    losses, stats = train(tmp_path / "a", epochs=2)
    assert stats.hits == NUM_SAMPLES
    assert losses == train(tmp_path / "b", epochs=2, gate="never")[0]


def test_what_this_process_loads_passes_by_the_inner_loader(tmp_path, monkeypatch):
    asked = []
    own = _SingleProcessDataLoaderIter._next_data
    monkeypatch.setattr(
        _SingleProcessDataLoaderIter, "_next_data", lambda self: (asked.append(1), own(self))[1]
    )
    epochs, batches = 3, NUM_SAMPLES // 8
    _, stats = train(tmp_path, epochs=epochs)
    assert stats.hit_batches == (epochs - 1) * batches
    assert len(asked) == epochs  # each time for the end
