"""The schedule of random draws: stateless, staggered, never an old one for a new one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from egeria_cache.loader.loader import EgeriaLoader
from egeria_cache.samples import Clock, Draws
from egeria_cache.samples.draws import NO_DRAW
from egeria_cache.samples.loading import SampleLoader
from egeria_cache.samples.task import Task

IDS = st.integers(-(2**70), 2**70) | st.text(max_size=4) | st.tuples(st.integers(), st.text())
SCHEDULES = st.builds(
    Draws, st.integers(0, 2**63), st.none() | st.integers(1, 20), st.integers(1, 5)
)


@given(SCHEDULES, st.lists(IDS, min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 60))
def test_a_draw_is_a_function_of_the_sample_and_the_clock_alone(draws, ids, since, passed):
    clock = Clock(since + passed, since)
    together = draws.at(ids, clock).tolist()
    assert together == [draws.at([one], clock)[0] for one in ids]
    assert together == draws.at(ids[::-1], clock).tolist()[::-1]


@given(SCHEDULES, IDS, st.integers(0, 40))
def test_a_sample_goes_through_its_draws_in_order_and_leaves_none_out(draws, sample, since):
    made, seen = [], []
    for passed in range(60):
        (draw,) = draws.at([sample], Clock(since + passed, since)).tolist()
        if draw not in seen:
            made.append((passed, draw))
        seen.append(draw)
        newest = max(seen)
        assert newest - draws.kept < draw <= newest, "only the newest ones are used"
    assert [draw for _, draw in made] == list(range(since, since + len(made)))
    epochs = [passed for passed, _ in made]
    if draws.reuse is None:
        assert epochs == list(range(draws.kept)), "made one after the other, then kept for ever"
    else:
        assert set(np.diff(epochs[1:])) <= {draws.reuse}
        assert epochs[1] <= draws.reuse


@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("reuse", [1, 2, 4, 8])
def test_every_epoch_makes_about_as_many_new_draws_as_any_other(reuse, kept):
    draws, ids = Draws(3, reuse, kept), list(range(4000))
    seen: set[tuple[int, int]] = set()
    for passed in range(1, 20):
        before = draws.at(ids, Clock(passed - 1, 0)).tolist()
        seen |= set(zip(ids, before, strict=True))
        now = draws.at(ids, Clock(passed, 0)).tolist()
        new = sum(one not in seen for one in zip(ids, now, strict=True))
        assert new == pytest.approx(len(ids) / reuse, rel=0.15)


@given(SCHEDULES, st.lists(IDS, min_size=1, max_size=8), st.integers(0, 60))
def test_what_was_stored_when_the_boundary_was_set_is_used_on(draws, ids, tick):
    """While nothing is frozen every epoch has draws of its own: those of its number."""
    assert draws.at(ids, Clock(tick, tick)).tolist() == [tick] * len(ids)
    after = draws.at(ids, Clock(tick + 1, tick))
    assert set(after.tolist()) <= {tick, tick + 1}


@given(st.integers(1, 9), st.integers(1, 4), IDS)
def test_what_is_superseded_is_never_asked_for_again(reuse, kept, sample):
    draws = Draws(1, reuse, kept)
    gone: set[int] = set()
    for tick in range(50):
        draw = draws.at([sample], Clock(tick, 0))
        assert int(draw[0]) not in gone
        superseded = draws.superseded(draw)
        assert superseded is not None
        assert (superseded[0] == NO_DRAW) == (draw[0] < kept)
        gone |= set(superseded.tolist())
    assert Draws(1, None, kept).superseded(np.array([3])) is None


# Sample identities, versions, transforms with a state of their own.


class OwnState:
    """A transform with its own generator, seeded as albumentations' are."""

    def __init__(self):
        self.random = random.Random()

    def set_random_seed(self, seed):
        self.random.seed(seed)

    def __call__(self, value):
        return value + self.random.random()


class Transformed(Dataset):
    def __init__(self):
        self.transform = OwnState()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.transform(float(index))


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(6))])
def test_a_transform_with_its_own_state_is_seeded_per_sample(wrap):
    first = [b.tolist() for b in EgeriaLoader(wrap(Transformed()), 2, seed=0)]
    assert first == [b.tolist() for b in EgeriaLoader(wrap(Transformed()), 2, seed=0)]
    workers = EgeriaLoader(wrap(Transformed()), 3, seed=0, num_workers=1)
    assert torch.cat(list(workers)).tolist() == [x for b in first for x in b]


class Files(Dataset):
    """Named samples whose content may change."""

    def __init__(self, names, versions=None):
        self.names, self.versions = names, versions or dict.fromkeys(names, 0)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.rand(1)

    def sample_id(self, index):
        return self.names[index]

    def sample_version(self, index):
        return self.versions[self.names[index]]


def test_named_samples_keep_their_augmentation_when_the_list_is_reordered():
    one = torch.cat(list(EgeriaLoader(Files(["a", "b", "c"]), seed=0)))
    other = torch.cat(list(EgeriaLoader(Files(["c", "a", "b"]), seed=0)))
    assert torch.equal(other, one[[2, 0, 1]])


def test_a_new_version_is_a_new_sample():
    names = ["a", "b"]
    loader = EgeriaLoader(Files(names, {"a": 1, "b": 1}), seed=0)
    edited = EgeriaLoader(Files(names, {"a": 1, "b": 2}), seed=0)
    assert loader.source.identify([0, 1]) == [("a", "1"), ("b", "1")]
    assert edited.source.identify([0, 1]) == [("a", "1"), ("b", "2")]


class Batched(Dataset):
    """Has only a batched access."""

    def __len__(self):
        return 4

    def __getitems__(self, indices):
        return [10 * index for index in indices]


def test_a_dataset_with_batched_access_alone_works():
    assert next(iter(EgeriaLoader(Batched(), 4, seed=0))).tolist() == [0, 10, 20, 30]
    assert SampleLoader(Batched(), list).load(Task(0, [2], [2], [0], None)) == [20]
