"""What the ring spares: the share of served rows that are not copied to the device.

These are the figures of docs/device.md, counted and not estimated. B = 8 rows a batch.
"""

import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.prefetch import prefetcher
from tests.device.backend import counts
from tests.device.simulated.runs import DEVICE
from tests.helpers.nets import Images, freeze, make_net

ROW_BYTES = 4 * 10 * 10 * 4


def shuffled(data):
    return RandomSampler(data, generator=torch.Generator().manual_seed(0))


def with_replacement(data):
    generator = torch.Generator().manual_seed(0)
    return RandomSampler(data, replacement=True, num_samples=len(data), generator=generator)


def skewed(data):
    """A tenth of the samples is drawn half of the time."""
    weights = [9.0 if i < len(data) // 10 else 1.0 for i in range(len(data))]
    generator = torch.Generator().manual_seed(0)
    return WeightedRandomSampler(weights, len(data), generator=generator)


def in_order(data):
    return range(len(data))


def spared(directory, sampler, *, rows, recent, whole_bytes):
    """Serve some passes, and return the share of rows that did not cross in the last one."""
    model = make_net().to(DEVICE).eval()
    freeze(model, "layer1")
    with ActivationCache(
        model, directory, "layer1", gate="always", ring_batches=recent, audit_rate=0
    ) as cache, pytest.MonkeyPatch.context() as patch, torch.no_grad():  # fmt: skip
        patch.setattr(prefetcher, "WHOLE_BYTES", whole_bytes)
        data = Images(rows, noise=0)
        for images, _ in EgeriaLoader(data, 8, cache=cache, seed=3, name="train"):
            model(images.to(DEVICE))
        cache.flush()
        loader = EgeriaLoader(
            data, 8, sampler=sampler(data), cache=cache, reuse=None, seed=3, name="train"
        )

        def one_pass():
            for images, _ in loader:
                model(images.to(DEVICE))

        for _ in range(2):
            one_pass()
        hits, before = cache.stats().hits, counts(all_threads=True).to_device
        one_pass()
        crossed = counts(all_threads=True).to_device - before
        return 1 - crossed / ((cache.stats().hits - hits) * ROW_BYTES)


FEW, MANY = 0, 1 << 26

FIGURES = {
    # sampler, recent batches, bytes that all rows may take: share spared, in percent
    (shuffled, 5, FEW): 2,
    (in_order, 5, FEW): 0,
    (with_replacement, 5, FEW): 22,
    (with_replacement, 20, FEW): 70,
    (skewed, 5, FEW): 44,
    (shuffled, 5, MANY): 100,
    (in_order, 5, MANY): 100,
}
"""Of 480 rows, of the third pass. A ring of 5 has slots for 12 batches, a fifth of the rows: those
that are used, read ahead, and recent."""


@pytest.mark.parametrize(
    ("sampler", "recent", "whole_bytes"), FIGURES,
    ids=[f"{s.__name__}-{r}-{'all' if w else 'recent'}" for s, r, w in FIGURES],
)  # fmt: skip
def test_the_ring_spares_what_the_document_says(tmp_path, sampler, recent, whole_bytes):
    found = 100 * spared(tmp_path, sampler, rows=480, recent=recent, whole_bytes=whole_bytes)
    # What the table is told takes 2 % of these rows, and an audit its sample.
    assert abs(found - FIGURES[sampler, recent, whole_bytes]) <= 3
