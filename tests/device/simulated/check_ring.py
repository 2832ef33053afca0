"""What stays on the device spares: the share of served rows that are not copied to the device.

These are the figures of docs/device.md, counted and not estimated. B = 8 rows a batch.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import RandomSampler

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.prefetch import prefetcher
from tests.device.backend import counts
from tests.device.simulated.runs import DEVICE
from tests.helpers.nets import Images, freeze, make_net

ROW_BYTES = 4 * 10 * 10 * 4


def shuffled(data):
    return RandomSampler(data, generator=torch.Generator().manual_seed(0))


def in_order(data):
    return range(len(data))


def spared(directory, sampler, *, rows, whole_bytes):
    """Serve some passes, and return the share of rows that did not cross in the last one."""
    model = make_net().to(DEVICE).eval()
    freeze(model, "layer1")
    with ActivationCache(
        model, directory, "layer1", gate="always", audit_rate=0
    ) as cache, pytest.MonkeyPatch.context() as patch, torch.no_grad():  # fmt: skip
        patch.setattr(prefetcher, "WHOLE_BYTES", whole_bytes)
        data = Images(rows, noise=0)
        cache.fill(EgeriaLoader(data, 8, cache=cache, seed=3, name="train"), progress=False,
                   forward=lambda batch: model(batch[0].to(DEVICE)))  # fmt: skip
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
    # sampler, bytes that all rows may take: share spared, in percent
    (shuffled, FEW): 0,
    (in_order, FEW): 0,
    (shuffled, MANY): 100,
    (in_order, MANY): 100,
}
"""Of 480 rows, of the third pass."""


@pytest.mark.parametrize(
    ("sampler", "whole_bytes"), FIGURES,
    ids=[f"{sampler.__name__}-{'all' if whole else 'none'}" for sampler, whole in FIGURES],
)  # fmt: skip
def test_what_stays_spares_what_the_document_says(tmp_path, sampler, whole_bytes):
    found = 100 * spared(tmp_path, sampler, rows=480, whole_bytes=whole_bytes)
    assert abs(found - FIGURES[sampler, whole_bytes]) <= 3  # an audit loads its sample
