"""Resuming anywhere gives the rest of the epoch, and the epochs after it, unchanged."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from egeria_cache.loader.loader import EgeriaLoader
from tests.helpers.runs import resumable

NUM_SAMPLES = 23


class Augmented(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


class OwnSampler(Sampler):
    """Draws from Python's and NumPy's generators, as samplers of users do."""

    def __init__(self):
        self.epochs = 0

    def __iter__(self):
        import random

        order = random.sample(range(NUM_SAMPLES), NUM_SAMPLES)
        return iter([order[i] for i in np.random.permutation(NUM_SAMPLES)])

    def __len__(self):
        return NUM_SAMPLES


def samplers():
    weights = torch.arange(1.0, NUM_SAMPLES + 1)
    generator = torch.Generator().manual_seed(5)
    return {
        "a user's": {"sampler": OwnSampler()},
        "sequential": {},
        "shuffle": {"shuffle": True},
        "workers": {"shuffle": True, "generator": generator, "num_workers": 2},
        "sampler's generator": {
            "sampler": RandomSampler(range(NUM_SAMPLES), generator=torch.Generator().manual_seed(5))
        },
        "weighted": {"sampler": WeightedRandomSampler(weights, 30)},
        "batch sampler": {
            "batch_size": 1,
            "batch_sampler": BatchSampler(RandomSampler(range(NUM_SAMPLES)), 4, True),
        },
    }


def make(kind="shuffle", seed=3, **kwargs):
    return EgeriaLoader(
        Augmented(), **({"batch_size": 4, "seed": seed} | samplers()[kind] | kwargs)
    )


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert len(buffer.getvalue()) < 40_000
    return torch.load(buffer, weights_only=False)


def same(left, right):
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))


@pytest.mark.parametrize("kind", samplers())
@given(
    cut=st.integers(0, 6),
    epochs_before=st.integers(0, 2),
    second=st.one_of(st.none(), st.integers(0, 3)),
)
@settings(max_examples=12, deadline=None)
def test_the_rest_and_the_following_epochs_are_the_uninterrupted_ones(
    kind, cut, epochs_before, second
):
    torch.manual_seed(11)
    loader, whole = make(kind), []
    for _ in range(epochs_before):
        list(loader)
    for number, batch in enumerate(loader):
        if number == cut:
            state = through_a_file(loader.state_dict())
        whole.append(batch)
    if cut >= len(whole):
        return
    following = [list(loader), list(loader)]

    torch.manual_seed(99)  # another process
    resumed = make(kind)
    resumed.load_state_dict(state)
    rest = []
    for number, batch in enumerate(resumed):
        rest.append(batch)
        if number == second:
            again = make(kind)
            again.load_state_dict(through_a_file(resumed.state_dict()))
            resumed = again
            break
    if second is not None and second < len(rest):
        rest += list(resumed)
    same(rest, whole[cut + 1 :])
    for expected in following:
        same(list(resumed), expected)


def test_numpy_may_have_its_bits_from_another_generator(request):
    before = np.random.get_bit_generator()
    request.addfinalizer(lambda: np.random.set_bit_generator(before))
    np.random.set_bit_generator(np.random.Philox(3))
    next(batches := iter(loader := make("a user's")))
    state, rest = through_a_file(loader.state_dict()), list(batches)
    (resumed := make("a user's")).load_state_dict(state)
    same(list(resumed), rest)


class Restarting:
    """A batch sampler to which iter() is a new epoch, as Lightning's is where it predicts."""

    def __iter__(self):
        self.left = iter(np.arange(20).reshape(5, 4))
        return self

    def __next__(self):
        return next(self.left)

    def __len__(self):
        return 5


@pytest.mark.parametrize("seed", [None, 3])
def test_a_sampler_is_asked_by_next_alone_and_its_batches_may_be_arrays(seed):
    loader, other = (EgeriaLoader(range(20), batch_sampler=Restarting(), seed=seed) for _ in "ab")
    expected = np.arange(20).reshape(5, 4).tolist()
    assert [batch.tolist() for batch in loader] == expected
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    other.load_state_dict(through_a_file(loader.state_dict()))
    assert [batch.tolist() for batch in other] == expected[2:]


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match="not a state of EgeriaLoader"):
        make().load_state_dict({"_num_yielded": 3})


# A frozen run interrupted and resumed: losses and hits of the uninterrupted one.

BATCHES, EPOCHS = 6, 5


def train(directory, variants=1, workers=0, **kwargs):
    """Train to a step, or to the end: losses, hits, and the state then."""
    options = {"augmentation_variants": variants, "num_workers": workers, "reuse": None}
    losses, stats, state = resumable(directory, epochs=EPOCHS, **options, **kwargs)
    return losses, stats.hits, state


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
    torch.testing.assert_close(before + after, whole, rtol=1e-5, atol=1e-6)
    # The first batch of a process shows what the store holds: it is computed once more.
    assert hits - 8 <= hits_before + hits_after <= hits
