"""`cache.fill(loader)`: everything is stored before training, which then has hits only."""

import os

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from egeria_cache import ActivationCache, EgeriaError, EgeriaLoader
from tests.cache.test_auto import Blocks, data, freeze, train
from tests.helpers.forked import started


def frozen_blocks():
    torch.manual_seed(0)
    model = Blocks()
    freeze(model, "stem", "blocks.0", "blocks.1")
    return model


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("boundary", ["blocks.1", "auto"])
def test_training_has_hits_only_from_its_first_batch_on(directory, workers, boundary):
    expected = train(frozen_blocks(), EgeriaLoader(data(), batch_size=8), 2)
    model = frozen_blocks()
    with ActivationCache(model, directory, boundary, gate="always", audit_rate=0) as cache:
        loader = EgeriaLoader(data(), batch_size=8, cache=cache, num_workers=workers)
        before, torch_state = state_of(model), torch.get_rng_state()
        report = cache.fill(loader, progress=False)
        assert (report.num_samples, report.num_stored, report.why_not) == (32, 32, None)
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert all(torch.equal(before[name], value) for name, value in state_of(model).items())
        assert model.training
        assert cache.stats().hits == cache.stats().misses == 0
        assert train(model, loader, 2) == pytest.approx(expected, abs=1e-6)
        assert (cache.stats().hits, cache.stats().misses) == (64, 0)
        again = cache.fill(loader, progress=False)
        assert str(again) == "32 of 32 samples are stored"


class Noisy(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x, y = data()[index]
        return x + torch.randn(6), y


def test_draws_that_are_replaced_are_stored_for_the_next_epoch(directory):
    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always", audit_rate=0) as cache:
        loader = EgeriaLoader(Noisy(), batch_size=8, cache=cache)
        assert str(cache.fill(loader, progress=False)) == "16 of 16 samples are stored"
        train(model, loader, 1)
        assert (cache.stats().hits, cache.stats().misses) == (16, 0)


def test_the_loop_s_own_way_of_calling_the_model_can_be_given(directory):
    class Named(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            x, y = data()[index]
            return {"x": x, "labels": y}

    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        loader = EgeriaLoader(Named(), batch_size=8, cache=cache)
        assert cache.fill(loader, progress=False).num_stored == 16  # by the forward's names
        other = EgeriaLoader(TensorDataset(*data().tensors[::-1]), batch_size=8, cache=cache)
        report = cache.fill(other, lambda batch: model(batch[1]), progress=False)
        assert report.num_stored == 32


class Watched(Dataset):
    """Notes what is loaded; `fingerprint` tells what it is."""

    fingerprint = "the same for ever"

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 32

    def __getitem__(self, index):
        self.rows.append(index)
        return data()[index]


def test_only_what_is_missing_is_computed(directory):
    model, rows = frozen_blocks(), []
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        loader = EgeriaLoader(Watched(rows), batch_size=4, cache=cache)
        cache.fill(loader, progress=False)
        rows.clear()
        assert cache.fill(loader, progress=False).num_stored == 32
        assert rows == []
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        cache.fill(EgeriaLoader(Watched(rows), batch_size=4, cache=cache), progress=False)
    assert len(set(rows)) < 16  # what it takes to prove the cut, and to name the data set


def test_a_fill_that_was_killed_goes_on_where_it_was(directory):
    script = """
        import signal, sys, torch
        from torch.utils.data import Dataset
        from egeria_cache import ActivationCache, EgeriaLoader
        from tests.cache.test_filling import frozen_blocks

        class Slow(Dataset):
            def __len__(self): return 400
            def __getitem__(self, index):
                if index == int(sys.argv[2]):
                    print("halfway", flush=True)
                    signal.pause()  # until it is killed
                g = torch.Generator().manual_seed(index)
                return torch.randn(6, generator=g), index % 3

        model = frozen_blocks()
        with ActivationCache(model, sys.argv[1], "blocks.1") as cache:
            before = cache.stats().num_samples
            report = cache.fill(EgeriaLoader(Slow(), batch_size=4, cache=cache), progress=False)
            print(report.num_stored, flush=True)
        """
    with started(script, directory, 200) as killed:
        assert "halfway\n" in killed.stdout
        killed.kill()
    with started(script, directory, -1) as one, started(script, directory, -1) as other:
        # Two at once finish it.
        assert [one.result().split()[-1], other.result().split()[-1]] == ["400", "400"]


def test_a_cache_that_stores_nothing_cannot_be_filled(directory):
    with ActivationCache(frozen_blocks(), directory, "blocks.1", gate="never") as cache:
        loader = EgeriaLoader(data(), batch_size=8, cache=cache)
        with pytest.raises(EgeriaError, match="never"):
            cache.fill(loader)


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.last = torch.nn.Linear(12, 5).requires_grad_(False), torch.nn.Linear(5, 3)

    def forward(self, x, y, mask=None):
        return self.last(self.front(torch.cat([x, y], 1)))


def test_a_forward_gets_as_many_parts_of_a_batch_as_it_requires(directory):
    model, (x, labels) = Pair(), data().tensors
    with ActivationCache(model, directory, "front", gate="always") as cache:
        loader = EgeriaLoader(TensorDataset(x, x + 1, labels), batch_size=8, cache=cache)
        assert cache.fill(loader, progress=False).num_stored == 32
        for first, second, _ in loader:
            model(first, second)
        assert cache.stats().hits == 32
        with pytest.raises(EgeriaError, match=r"requires 2 arguments, a batch has 1; give fill"):
            cache.fill(EgeriaLoader(TensorDataset(x), cache=cache), progress=False)


def test_a_loader_that_cannot_be_cached_gives_the_reason(directory):
    class Random(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            x, y = data()[index]
            return x + int.from_bytes(os.urandom(2), "little"), y

    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        report = cache.fill(EgeriaLoader(Random(), batch_size=8, cache=cache), progress=False)
        assert report.num_stored == 0
        assert "not the same when it is loaded again" in report.why_not
