"""A frozen run interrupted and resumed: losses and hits of the uninterrupted one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.nets import Images, freeze, make_net, sgd
from tests.helpers.steps import take_step

BATCHES, EPOCHS = 6, 5


def state_of(*things):
    buffer = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def train(directory, *, until=None, state=None, moves=None, gate="always", variants=1, workers=0):
    """Train to the step `until`, or to the end: (losses, cache hits, state at `until`)."""
    torch.manual_seed(5)
    model = make_net()
    optimizer = sgd(model)
    data = Images()
    moves = {0: "layer1"} if moves is None else moves
    losses, start = [], 0
    if state is not None:
        start = state[3]["step"]
        model.load_state_dict(state[1])
    boundary = [name for step, name in sorted(moves.items()) if step <= start][-1:]
    boundary = boundary[0] if boundary else None
    freeze(model, boundary)
    if state is not None:
        optimizer.load_state_dict(state[2])
    with ActivationCache(model, directory, boundary, gate=gate, audit_rate=0) as cache:
        loader = EgeriaLoader(
            data, 8, shuffle=True, cache=cache, seed=3, num_workers=workers,
            augmentation_variants=variants, reuse=None,
        )  # fmt: skip
        if state is not None:
            loader.load_state_dict(state[0])
        step = start
        while step < EPOCHS * BATCHES:
            model.train()
            for images, targets in loader:
                loss = take_step(F.cross_entropy(model(images), targets), optimizer)
                losses.append(loss.item())
                step += 1
                if step in moves:
                    freeze(model, moves[step])
                    cache.set_boundary(moves[step])
                cache.flush()
                if step == until:
                    saved = copy.deepcopy(state_of(loader, model, optimizer))
                    return losses, cache.stats().hits, [*saved, {"step": step}]
        return losses, cache.stats().hits, None


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    known = {}

    def run(**kwargs):
        key = repr(kwargs)
        if key not in known:
            known[key] = train(tmp_path_factory.mktemp("whole"), **kwargs)
        return known[key]

    return run


@pytest.mark.cases(1)
@pytest.mark.parametrize("variants", [1, 2])
@given(cut=st.integers(1, EPOCHS * BATCHES - 1))
@settings(max_examples=6, deadline=None)
def test_a_frozen_run_resumed_anywhere_is_the_uninterrupted_one(
    tmp_path_factory, uninterrupted, variants, cut
):
    directory = tmp_path_factory.mktemp("cache")
    whole, hits, _ = uninterrupted(variants=variants)
    before, hits_before, state = train(directory, until=cut, variants=variants)
    after, hits_after, _ = train(directory, state=state, variants=variants)
    assert hits == 48 * (EPOCHS - variants)
    torch.testing.assert_close(
        torch.tensor(before + after), torch.tensor(whole), rtol=1e-5, atol=1e-6
    )
    # The first batch of a process shows what the store holds: it is computed once more.
    assert hits - 8 <= hits_before + hits_after <= hits


@pytest.mark.parametrize("cut", [8, 13, 18])
@pytest.mark.parametrize("workers", [(0, 1), (1, 0)])
def test_a_boundary_set_in_mid_run_keeps_its_versions_through_a_resume(
    tmp_path, uninterrupted, cut, workers
):
    settings = {"moves": {7: "layer1"}, "variants": 2}
    whole, hits, _ = uninterrupted(**settings)
    assert hits > 0
    before, hits_before, state = train(tmp_path, until=cut, workers=workers[0], **settings)
    after, hits_after, _ = train(tmp_path, state=state, workers=workers[1], **settings)
    torch.testing.assert_close(
        torch.tensor(before + after), torch.tensor(whole), rtol=1e-5, atol=1e-6
    )
    # A worker is given its first two batches before the model shows what the store holds.
    assert hits - 8 * (1 + 2 * max(workers)) <= hits_before + hits_after <= hits


def test_a_second_resume_in_one_epoch_goes_on_with_hits(tmp_path, uninterrupted):
    whole, hits, _ = uninterrupted(variants=1)
    first = train(tmp_path, until=8)
    second = train(tmp_path, until=10, state=first[2])
    third = train(tmp_path, state=second[2])
    torch.testing.assert_close(
        torch.tensor(first[0] + second[0] + third[0]), torch.tensor(whole), rtol=1e-5, atol=1e-6
    )
    assert hits - 16 <= first[1] + second[1] + third[1] <= hits
