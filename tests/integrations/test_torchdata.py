"""A loader's state against torchdata's StatefulDataLoader: the same batches before and after.

The cases are those of torchdata's own tests: a state taken before the first batch, in mid-epoch,
with the last batch and after the end; with and without workers; samplers, batch samplers and
iterators with states of their own.
"""

import copy

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, TensorDataset, get_worker_info

pytest.importorskip("torchdata.stateful_dataloader")

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from egeria_cache import ActivationCache, EgeriaLoader

N, BATCH, WHOLE = 23, 4, 6
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's


class Stateful:
    """Its state is all that it holds."""

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Place(Stateful, Sampler):
    """Keeps its place in the epoch."""

    number = N

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < self.number:
            self.place += 1
            yield self.given()
        self.place = 0

    def __len__(self):
        return self.number

    def given(self):
        return (self.place * 5) % N


class Epochs(Sampler):
    """Counts its epochs: every epoch's order depends on how many there have been."""

    def __init__(self):
        self.epoch, self.place, self.goes_on = -1, 0, False

    def __iter__(self):
        if not self.goes_on:
            self.epoch, self.place = self.epoch + 1, 0
        self.goes_on = False
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < N:
            self.place += 1
            yield order[self.place - 1]

    def __len__(self):
        return N

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]
        self.goes_on = self.epoch >= 0 and self.place < N


class Batches(Place):
    """A batch sampler that keeps its place."""

    number = WHOLE

    def given(self):
        return list(range((self.place - 1) * BATCH, min(N, self.place * BATCH)))


DATA = range(N)
FIXED = {
    "sequential": lambda: {"batch_size": BATCH},
    "drop_last": lambda: {"batch_size": BATCH, "drop_last": True},
    "place": lambda: {"batch_size": BATCH, "sampler": Place()},
    "epochs": lambda: {"batch_size": BATCH, "sampler": Epochs()},
    "batches": lambda: {"batch_sampler": Batches()},
    "torchdata's random": lambda: {
        "batch_size": BATCH,
        "sampler": RandomSampler(DATA, generator=torch.Generator().manual_seed(3)),
    },
    "torchdata's distributed": lambda: {
        "batch_size": BATCH, "sampler": StatefulDistributedSampler(DATA, 2, 1, seed=2),
    },
}  # fmt: skip
"""Their order is a function of what they have drawn: both loaders must give the same."""
FREE = {"shuffle": lambda: {"batch_size": BATCH, "shuffle": True}}


def batches(loader):
    return [rows.tolist() for rows in loader]


def ours(workers, seed=0, **kwargs):
    return EgeriaLoader(DATA, num_workers=workers, seed=seed, **kwargs)


def theirs(workers, **kwargs):
    return StatefulDataLoader(DATA, num_workers=workers, **kwargs)


def run(make, moment):
    """Return an epoch, the one after it, and what a loader with the state of `moment` gives.

    `moment` is the number of batches of the second epoch after which the state is taken; -1 for
    before any batch of it, and None for after its end.
    """
    torch.manual_seed(1)
    loader = make()
    batches(loader)
    state = copy.deepcopy(loader.state_dict()) if moment == -1 else None
    epoch = []
    for rows in loader:
        epoch.append(rows.tolist())
        if len(epoch) == moment:
            state = copy.deepcopy(loader.state_dict())
    state = copy.deepcopy(loader.state_dict()) if moment is None else state
    following = batches(loader)
    torch.manual_seed(77)  # another process
    resumed = make()
    resumed.load_state_dict(state)
    return epoch, following, batches(resumed), batches(resumed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("moment", [1, 2])
@pytest.mark.parametrize("kind", [*FIXED, "shuffle"])
@pytest.mark.parametrize("seed", [None, 0])
def test_in_mid_epoch_both_loaders_go_on_alike(kind, moment, workers, seed):
    options = (FIXED | FREE)[kind]
    epoch, following, rest, after = run(lambda: ours(workers, seed, **options()), moment)
    assert rest == epoch[moment:]
    if workers or seed is not None or kind != "shuffle":  # else the batches' own draws move it
        assert after == following
    their_epoch, their_following, their_rest, their_after = run(
        lambda: theirs(workers, **options()), moment
    )
    assert (their_rest, their_after) == (their_epoch[moment:], their_following)
    # With workers, StatefulDataLoader asks a sampler for an iterator twice, which draws twice.
    if kind != "shuffle" and not (workers and kind == "torchdata's random"):
        assert (epoch, following, rest, after) == (
            their_epoch, their_following, their_rest, their_after
        )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *((kind, WHOLE) for kind in ("sequential", "batches", "shuffle")),
        *((kind, moment) for kind in FIXED for moment in (None, -1)),
    ],
)
@pytest.mark.cases(6)
def test_a_state_at_either_end_of_an_epoch_leaves_what_is_left(kind, moment, workers):
    options = (FIXED | FREE)[kind]
    epoch, following, rest, after = run(lambda: ours(workers, **options()), moment)
    assert rest == {None: following, -1: epoch, WHOLE: []}[moment]
    if moment == -1:
        assert after == following
    # Their distributed sampler has an empty rest at the end.
    if moment == WHOLE or (not (moment or workers) and kind != "torchdata's distributed"):
        assert rest == run(lambda: theirs(workers, **options()), moment)[2]


@pytest.mark.parametrize("kind", ["place", "epochs", "batches"])
def test_a_sampler_with_a_state_is_resumed_while_batches_are_served(tmp_path, kind):
    """The look-ahead must not have moved the state that is saved."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    data = TensorDataset(torch.arange(float(N)).reshape(N, 1))
    options = (FIXED | FREE)[kind]
    with ActivationCache(model, tmp_path, "0", gate="always") as cache:
        loader = EgeriaLoader(data, cache=cache, **options())
        for _ in range(2):
            for (rows,) in loader:
                model(rows)
            cache.flush()
        epoch = []
        for (rows,) in loader:
            model(rows)
            epoch.append(rows + 0)
            if len(epoch) == 2:
                state = copy.deepcopy(loader.state_dict())
        assert cache.stats().hits >= 2 * N - 2
        resumed = EgeriaLoader(data, cache=cache, **options())
        resumed.load_state_dict(state)
        rest = [rows + 0 for (rows,) in resumed]
    assert [rows.tolist() for rows in rest] == [rows.tolist() for rows in epoch[2:]]


class Numbers(IterableDataset):
    """Draws from the random generator, and says nothing of its place."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, N, step):
            yield i + 100 * torch.randint(9, ()).item()


class Stream(Stateful, IterableDataset):
    """Knows its place and its epoch."""

    def __init__(self):
        self.epoch, self.place = 0, 0

    def __iter__(self):
        while self.place < N:
            self.place += 1
            yield 100 * self.epoch + self.place
        self.epoch, self.place = self.epoch + 1, 0


class Own(IterableDataset):
    """Its own iterator; there is no state before there is one."""

    def __iter__(self):
        self.place = 0
        return self

    def __next__(self):
        if self.place >= N:
            raise StopIteration
        self.place += 1
        return self.place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("moment", [-1, 1, 3, None])
@pytest.mark.parametrize("kind", [Numbers, Stream, Own])
def test_an_iterable_data_set_goes_on_where_it_was(kind, moment, workers):
    def make(loader):
        return run(lambda: loader(kind(), BATCH, num_workers=workers), moment)

    for loader in (EgeriaLoader, StatefulDataLoader):
        epoch, following, rest, _ = make(loader)
        expected = following if moment is None else epoch[max(0, moment) :]
        # StatefulDataLoader has no random numbers of a data set that keeps none.
        if loader is EgeriaLoader or kind is not Numbers:
            assert rest == expected


def test_no_batches_overtake_each_other():
    data, options = range(N), {"num_workers": 2, "in_order": False, "seed": 0}
    loader, resumed = (EgeriaLoader(data, BATCH, **options) for _ in range(2))
    states, epoch = [], []
    for rows in loader:
        states.append(copy.deepcopy(loader.state_dict()))
        epoch += rows.tolist()
    assert epoch == list(data)
    resumed.load_state_dict(states[1])
    assert [row for rows in resumed for row in rows.tolist()] == epoch[2 * BATCH :]


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("moment", [0, 2, WHOLE])
def test_persistent_workers_do_not_change_the_order_of_a_resumed_run(moment, seed):
    """They draw no base seed in later epochs, and new ones do."""

    def make():
        return EgeriaLoader(
            DATA, BATCH, shuffle=True, num_workers=2, persistent_workers=True, seed=seed
        )

    torch.manual_seed(1)
    loader = make()
    batches(loader)
    iterator = iter(loader)
    epoch = [next(iterator).tolist() for _ in range(moment)]
    if moment == WHOLE:
        assert next(iterator, None) is None
    state = copy.deepcopy(loader.state_dict())
    rest = [rows.tolist() for rows in iterator]
    following = batches(loader)
    for again in (make(), loader):  # one that starts workers, and one that has them
        torch.manual_seed(77)
        again.load_state_dict(state)
        assert batches(again) == (following if moment == WHOLE else rest)
        if moment != WHOLE:
            assert batches(again) == following
    assert len(epoch + rest) == WHOLE
