"""Loaders of one name over the same data share what is stored, as soon as it is stored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from tests.cache.test_auto import data
from tests.cache.test_filling import frozen_blocks
from tests.helpers.forked import started


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


def test_other_data_other_seeds_and_corrected_labels_are_not_shared(directory):
    model = frozen_blocks()
    x, y = data().tensors
    with ActivationCache(model, directory, "blocks.1", gate="always", audit_rate=0) as cache:
        evaluate(model, cache)
        cache.flush()
        for dataset, options in (
            (TensorDataset(x + 1, y), {}),
            (TensorDataset(x, (y + 1) % 3), {}),
            (None, {"seed": 5}),
        ):
            before = cache.stats().hits
            plain = frozen_blocks().eval()
            with torch.no_grad():
                expected = [
                    F.cross_entropy(plain(a), b).item()
                    for a, b in torch.utils.data.DataLoader(dataset or data(), 8)
                ]
            assert evaluate(model, cache, dataset, **options) == pytest.approx(expected, abs=1e-6)
            assert cache.stats().hits == before


def test_two_processes_see_each_others_records_while_they_run(directory):
    """Each computes one half in its first epoch; in its second it reads the other's half."""
    script = """
        import sys, time
        from pathlib import Path
        from torch.utils.data import SequentialSampler
        from egeria_cache import ActivationCache, EgeriaLoader
        from tests.cache.test_auto import data, train
        from tests.cache.test_filling import frozen_blocks

        rank, place = int(sys.argv[2]), Path(sys.argv[1])

        class Halves:
            epoch = 0
            def __len__(self): return 16
            def __iter__(self):
                start = 16 * ((rank + self.epoch) % 2)
                self.epoch += 1
                return iter(range(start, start + 16))

        model = frozen_blocks()
        with ActivationCache(model, place, "blocks.1", gate="always", audit_rate=0) as cache:
            loader = EgeriaLoader(data(), batch_size=8, sampler=Halves(), cache=cache)
            train(model, loader, 1)
            cache.flush()
            (place.parent / f"done{rank}").touch()
            while not (place.parent / f"done{1 - rank}").exists():
                time.sleep(0.05)
            before = cache.stats().hits
            train(model, loader, 1)
            print(cache.stats().hits - before)
        """
    ranks = [started(script, directory, rank) for rank in range(2)]
    # What another process had stored by the first look is compared once before it is served.
    assert all(int(rank.result()) >= 8 for rank in ranks)
