"""Nothing waits, and nothing crosses twice: counted, not timed."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.gate import policy
from egeria_cache.skip.state import guards
from tests.device.backend import Counts, counts
from tests.device.simulated.runs import DEVICE
from tests.helpers.nets import Images, freeze, make_net, sgd
from tests.helpers.steps import take_step

B, ROWS, ROW_BYTES, LABEL_BYTES, IMAGE_BYTES = 8, 48, 4 * 10 * 10 * 4, 8, 400
INDEX_BYTES, ENTRY_BYTES = 8, 12
"""A sample's number, with every batch that it is in; and what the table is told when a row comes,
or goes."""


def steps(loader, epochs=1, model=None, end=lambda: None):
    """Train without reading a loss; return each step's counts of this thread, by epoch."""
    model = _frozen() if model is None else model
    optimizer, found = sgd(model), []
    for _ in range(epochs):
        model.train()
        iterator, of_epoch = iter(loader), []
        while True:
            before = counts()
            batch = next(iterator, None)
            if batch is None:
                break
            images, targets = (part.to(DEVICE, non_blocking=True) for part in batch)
            take_step(F.cross_entropy(model(images), targets), optimizer)
            of_epoch.append(counts() - before)
            end()
        found.append(of_epoch)
    return found


def _frozen():
    model = make_net().to(DEVICE)
    freeze(model, "layer1")
    return model


def cached(directory, epochs, *, ring_batches=5, sampler=None, rows=ROWS, audit_rate=0):
    """Train with a cache; return the steps' counts, and each epoch's of all threads."""
    model, whole = _frozen(), []
    with (
        pytest.MonkeyPatch.context() as patch,
        ActivationCache(
            model, directory, "layer1", gate="always", audit_rate=audit_rate,
            ring_batches=ring_batches,
        ) as cache,
    ):  # fmt: skip
        patch.setattr(policy, "MAX_COST", 0.0)  # the first hit is recomputed, and no other
        data = Images(rows)
        loader = EgeriaLoader(
            data, B, shuffle=sampler is None, sampler=sampler and sampler(data), cache=cache,
            reuse=None, seed=3, pin_memory=True,
        )  # fmt: skip
        found = []
        for _ in range(epochs):
            before = counts(all_threads=True)
            found += steps(loader, 1, model, cache.flush)
            whole.append(counts(all_threads=True) - before)
        return found, whole, cache.stats()


@pytest.fixture(scope="module", autouse=True)
def _steps_are_long():
    """So long that weights are looked at in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "LOOK_EVERY_S", 0.0)
        yield


@pytest.fixture(scope="module")
def plain():
    """One step of a plain loop in this thread."""
    loader = DataLoader(Images(ROWS), B, shuffle=True, pin_memory=True)
    return steps(loader, 2)[1][3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cached(tmp_path_factory.mktemp("cache"), 4)


def test_a_plain_step_counts_what_it_copies(plain):
    assert plain == Counts(waits=0, to_device=B * (IMAGE_BYTES + LABEL_BYTES), copies_to_device=2)


def test_a_step_of_hits_makes_the_host_wait_no_more_than_a_plain_one(run, plain):
    for number, epoch in enumerate(run[0][1:]):
        # The first batch of all has an audit whose outcome is waited for.
        expected = [plain.waits + (number == 0)] + [plain.waits] * (ROWS // B - 1)
        assert [step.waits for step in epoch] == expected


def test_on_a_step_of_hits_labels_alone_are_copied_by_the_training_thread(run):
    for epoch in run[0][1:]:
        for step in epoch[1:]:
            assert (step.to_device, step.copies_to_device) == (B * LABEL_BYTES, 1)
            assert step.pageable == 0
            assert (step.to_host, step.copies_to_host) == (1, 1)  # the guard's verdict


def test_a_step_of_misses_waits_for_nothing_and_copies_once_to_the_host(run, plain):
    for step in run[0][0][1:]:  # the first one is proved
        assert step.waits == plain.waits
        assert step.to_device == plain.to_device
        assert (step.to_host, step.copies_to_host) == (B * ROW_BYTES + 1, 2)  # and the verdict
        assert step.pageable == 0


def test_after_the_first_step_training_locks_no_pages_of_memory(tmp_path):
    """As CUDA's allocator does, this one gives freed pieces to whoever asks for as many bytes."""
    torch.ops.simulated.forget_pinned()
    found, whole, _ = cached(tmp_path, 3)
    first, *later = [step.pinned for epoch in found for step in epoch]
    assert first >= 4 * B * ROW_BYTES
    assert later == [0] * len(later)
    assert whole[1].pinned < ROW_BYTES  # by readers: a few numbers of samples
    assert whole[2].pinned == 0


def test_over_an_epoch_each_row_crosses_once_and_then_no_more(run):
    audited = IMAGE_BYTES + LABEL_BYTES
    first, *later = [whole.to_device - ROWS * LABEL_BYTES for whole in run[1][1:]]
    placed = ROWS * (ROW_BYTES + INDEX_BYTES + ENTRY_BYTES)
    assert placed <= first <= placed + audited
    for epoch in later:
        assert epoch <= ROWS * INDEX_BYTES + audited
    assert run[2].hits == 3 * ROWS
