"""Loaders of one name over the same data share what is stored, as soon as it is stored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from tests.cache.test_auto import data
from tests.cache.test_filling import frozen_blocks


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
