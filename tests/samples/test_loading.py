"""What is loaded beside the samples themselves, and how often."""

import contextlib
import itertools
import random
from collections import OrderedDict, deque
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader, sample_seed
from egeria_cache.batch import Axis
from egeria_cache.pystate import GENERATORS, RandomState
from egeria_cache.samples import company as module
from egeria_cache.samples.company import FREE_S, MAX_SHARE, Company
from egeria_cache.samples.draws import Draws
from egeria_cache.samples.loading import SampleLoader
from egeria_cache.samples.side_effects import preserved
from egeria_cache.samples.source import LoaderSource
from egeria_cache.samples.task import Task

SIZE = 8


def test_samples_are_compared_in_turns_at_a_share_of_what_loading_takes():
    company = Company()
    assert company.choose(4, ()) == [0, 1, 2, 3]  # all of the first: nothing is known of the cost
    company.compared(4, 4 * FREE_S)
    assert company.choose(4, ()) == []
    company.loaded_s += 10 * FREE_S / MAX_SHARE
    turns = [company.choose(8, ()) for _ in range(50)]
    assert {len(rows) for rows in turns} == {7}
    assert {row for rows in turns for row in rows} == set(range(8))


def words(length, i):
    return [1 + (i + k) % 7 for k in range(length)]


LENGTHS = [3, 9, 5, 7, 4, 8, 6, 9] * 4


class Texts:
    """Rows of numbers of several lengths, in the form that a test wants."""

    def __init__(self, form):
        self.form = form

    def __getitem__(self, i):
        return self.form(words(LENGTHS[i], i))


def joined(items):
    x = pad_sequence([torch.as_tensor(item) for item in items], batch_first=True)
    return {"x": x, "mask": (x != 0).long()}


def from_texts(items):
    return joined([list(map(int, item.split())) for item in items])


def without_masks(items):
    return {"x": from_texts(items)["x"]}


def ended(items):
    """Those that do not end so get a last token, which the first batch has none of."""
    return joined([item if item[-1] != 5 else [*item, 9] for item in items])


def as_text(row):
    return " ".join(map(str, row))


class Alone:
    """Loads batches of padded samples, and counts how many samples it collates alone."""

    def __init__(self, form, collate, monkeypatch):
        monkeypatch.setattr(module, "MAX_SHARE", 0.0)
        monkeypatch.setattr(module, "FREE_S", 0.0)
        self.alone = SimpleQueue()  # which is not put back
        self.samples = SampleLoader(Texts(form), self.counted)
        self.collate = collate

    def counted(self, items):
        if len(items) == 1:
            self.alone.put(items)
        return self.collate(items)

    @property
    def num_alone(self):
        return self.alone.qsize()

    def load(self, start, leaves=("x", "mask"), rows=SIZE):
        indices = list(range(start, start + rows))
        axes = tuple(Axis(f"[{leaf!r}]", 0) for leaf in leaves)
        task = Task(0, indices, indices, [0] * rows, None, axes=axes, compares=True)
        return self.samples.load_task(task)


@pytest.mark.parametrize(
    ("form", "collate", "is_told"),
    [
        (list, joined, True),
        (torch.tensor, joined, True),
        (lambda row: {"deep": [0, torch.tensor(row)]}, lambda s: joined([i["deep"][1] for i in s]),
         True),
        (as_text, from_texts, True),
        (as_text, without_masks, False),
    ],
    ids=["lists", "tensors", "nested", "masks", "nothing"],
)  # fmt: skip
def test_lengths_are_read_from_what_has_told_them(form, collate, is_told, monkeypatch):
    """And not by collating each alone, once a batch has shown where they stand."""
    leaves = ("x",) if collate is without_masks else ("x", "mask")
    alone = Alone(form, collate, monkeypatch)
    for start in (0, SIZE, 2 * SIZE):
        loaded = alone.load(start, leaves)
        assert loaded.lengths[:, -1].tolist() == LENGTHS[start : start + SIZE]
        assert loaded.differs is None
        if not start:
            counted = alone.num_alone
    assert alone.num_alone == (counted if is_told else 3 * counted)


def test_what_loading_takes_is_taken_without_what_is_asked_besides(monkeypatch):
    clock = SimpleQueue()  # which is not put back
    monkeypatch.setattr(f"{SampleLoader.__module__}.time.thread_time", clock.qsize)

    alone = Alone(list, lambda items: clock.put(items) or joined(items), monkeypatch)
    assert alone.load(0).load_s == 1
    assert clock.qsize() > SIZE


def test_nothing_is_believed_of_samples_of_one_length(monkeypatch):
    monkeypatch.setattr(f"{__name__}.LENGTHS", [6] * SIZE + LENGTHS)
    alone = Alone(list, joined, monkeypatch)
    alone.load(0)
    before = alone.num_alone
    assert alone.load(SIZE).lengths[:, 0].tolist() == LENGTHS[SIZE : 2 * SIZE]
    assert alone.num_alone == before + SIZE


def test_what_tells_different_lengths_tells_none(monkeypatch):
    """Two lists were as long as each other; where they are not, neither is believed."""
    alone = Alone(
        lambda row: (row, row[: max(8, 2 * row[0])]),
        lambda s: joined([i[0] for i in s]),
        monkeypatch,
    )
    monkeypatch.setattr(f"{__name__}.LENGTHS", [3, 4, 5, 6, 7, 8, 3, 4] + [5, 9, 9] * 4)
    assert alone.load(0).lengths is not None
    assert alone.load(SIZE).lengths is None  # the loader's owner has them measured


def test_a_sample_that_is_longer_than_was_told_is_told(monkeypatch):
    monkeypatch.setattr(f"{__name__}.words", lambda length, i: [1 + i // 8 * 4] * length)
    alone = Alone(list, ended, monkeypatch)
    assert alone.load(0).differs is None
    monkeypatch.setattr(module, "FREE_S", 60.0)
    assert alone.load(SIZE).differs == "['x']"


LOADS = 0


class Logging:
    """Counts its loads in several ways, and is wrapped."""

    shared = 0

    def __init__(self):
        self.dataset, self.number, self.log, self.times = Texts(list), 0, [], {}
        self.ticks, self.order = itertools.count(), OrderedDict.fromkeys(range(9))
        self.sum, self.last, self.recent = torch.zeros(1), np.zeros(1), deque(maxlen=2)
        self.seen, self.many = set(), [0] * 5000
        self.rng, self.drawn = np.random.default_rng(0), torch.Generator()
        total = 0

        def count():
            nonlocal total
            total += 1
            return total

        self.count = count

    def __getitem__(self, i):
        global LOADS
        LOADS += 1
        Logging.shared += 1
        self.number, self.times[i] = self.number + 1, self.times.get(i, 0) + 1
        self.log.append(i)
        self.order.move_to_end(i)
        self.sum += i
        self.last[0] = i
        self.recent.append(i)
        self.seen.add(i)
        self.many.append(i)
        self.opened = object()
        return self.dataset[i]

    def state(self):
        """What it is like, which moves it on."""
        own = self.number, [*self.log], {**self.times}, [*self.order], self.sum.item(), [*self.last]
        held = [*self.recent], {*self.seen}, len(self.many), hasattr(self, "opened")
        drawn = self.rng.random(), torch.rand(1, generator=self.drawn).item()
        return own, held, drawn, next(self.ticks), self.count(), LOADS, Logging.shared


def test_what_loading_moves_is_put_back_when_samples_are_loaded_out_of_turn():
    data = Logging()
    loader = SampleLoader(data, joined)
    log, ticks, task = data.log, data.ticks, Task(0, [3, 4, 3], [3, 4, 3], [0] * 3, None)
    loader.load(task)
    with loader.out_of_turn():
        before = data.state()
    with loader.out_of_turn():
        loader.load(task)
        assert len(log) == 6
        data.state()
    assert data.log is log
    assert data.ticks is ticks
    assert data.state() == before


class Reusing:
    """Collates to memory of its own."""

    def __init__(self):
        self.memory = torch.zeros(2)

    def __call__(self, samples):
        return self.memory.copy_(torch.tensor(samples))


def test_what_is_loaded_out_of_turn_stays_what_it_is_in_memory_that_is_put_back():
    options = {"sample_id": None, "sample_version": None, "name": "train", "seed": 0}
    source = LoaderSource([1.0, 2.0, 3.0], collate := Reusing(), draws=Draws(0, None), **options)
    loaded = source.load(Task(0, [1, 2], [1, 2], [0, 0], 0))
    assert (loaded.tolist(), collate.memory.tolist()) == ([2.0, 3.0], [0.0, 0.0])


# Seeds are set where they are drawn from, and nowhere else; what is drawn is always stateless.

DRAWS = {
    "nothing": lambda: 0.0,
    "random": random.random,
    "shuffle": lambda: float(random.sample(range(100), 1)[0]),
    "numpy": np.random.rand,
    "normal": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "torch's seed": lambda: float(torch.initial_seed() % 1000),
}


class Sometimes(Dataset):
    """Samples from `first` on draw; those before do not."""

    def __init__(self, draw, first):
        self.draw, self.first, self.num_loaded = draw, first, 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.num_loaded += 1
        return float(index), self.draw() if index >= self.first else -1.0


def expected(kind, first, epoch=0):
    values = []
    with preserved():
        for index in range(24):
            for generator in GENERATORS.values():
                generator.seed(sample_seed(7, index, epoch))
            values.append((float(index), DRAWS[kind]() if index >= first else -1.0))
    return values


def rows(loader):
    return [tuple(row) for x, y in loader for row in zip(x.tolist(), y.tolist(), strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [0, 2, 4, 9, 24])
@pytest.mark.parametrize("kind", DRAWS)
def test_what_a_sample_draws_is_its_own_wherever_drawing_begins(kind, first, workers):
    if workers and (first != 9 or kind == "shuffle"):
        pytest.skip("one is enough with workers")
    np.random.randn()  # NumPy now keeps a second normal deviate
    loader = EgeriaLoader(Sometimes(DRAWS[kind], first), 4, seed=7, num_workers=workers)
    for epoch in range(2):
        assert rows(loader) == expected(kind, first, epoch)


@pytest.mark.parametrize("keeps_a_normal_deviate", [False, True])
@pytest.mark.parametrize("first", [0, 9, 24])
@pytest.mark.parametrize("kind", DRAWS)
def test_the_training_loops_own_generators_are_left_alone(kind, first, keeps_a_normal_deviate):
    def drawn(use):
        for generator in GENERATORS.values():
            generator.seed(3)
        if keeps_a_normal_deviate:
            np.random.randn()
            with preserved():
                np.random.randn(), GENERATORS["numpy"].look()  # taken, and put back
        use()
        return [random.random(), np.random.randn(), np.random.randn(), torch.rand(()).item()]

    samples = SampleLoader(Sometimes(DRAWS[kind], first), list)

    def load():
        for start in range(0, 24, 4):
            samples.load(Task(0, ids := [*range(start, start + 4)], ids, [0] * 4, 7))

    assert drawn(load) == drawn(lambda: None)
    assert drawn(load) == drawn(lambda: None)


@pytest.mark.parametrize("proves", [True, False])
def test_a_normal_deviate_that_a_loop_has_put_back_is_kept(proves):
    np.random.randn()  # NumPy now keeps a second one
    state = np.random.get_state()
    np.random.randn(), GENERATORS["numpy"].look()
    np.random.set_state(state)
    expected, _ = np.random.randn(), np.random.set_state(state)
    with contextlib.ExitStack() as stack:
        stack.callback(RandomState.now().restore) if proves else stack.enter_context(preserved())
        np.random.rand()
    assert np.random.randn() == expected


def test_while_nothing_is_frozen_a_data_set_that_draws_nothing_is_not_seeded(tmp_path):
    """It may see the seed of the training loop's own generator, as it would under DataLoader."""
    torch.manual_seed(12)
    with ActivationCache(nn.Linear(1, 1), tmp_path) as cache:
        loader = EgeriaLoader(Sometimes(DRAWS["torch's seed"], 0), 4, cache=cache, seed=7)
        assert {drawn for _, drawn in rows(loader)} == {12.0}
    assert rows(EgeriaLoader(loader.dataset, 4, seed=7)) == expected("torch's seed", 0)


class Failing(Sometimes):
    def __getitem__(self, index):
        value = super().__getitem__(index)
        if index == 10:
            raise OSError(f"unreadable after {value}")
        return value


@pytest.mark.parametrize("kind", ["nothing", "random"])
def test_an_exception_is_the_seeded_samples_own(kind):
    iterator = iter(EgeriaLoader(Failing(DRAWS[kind], 9), 4, seed=7))
    next(iterator), next(iterator)
    state = random.getstate()
    with pytest.raises(OSError, match=str(expected(kind, 9)[10][1])):
        next(iterator)
    assert random.getstate() == state
    assert next(iterator)[0].tolist() == [12, 13, 14, 15]


def test_another_global_bit_generator_of_numpy_is_no_trouble():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(5))
    try:
        assert rows(EgeriaLoader(Sometimes(np.random.rand, 5), 4, seed=7)) == expected("numpy", 5)
    finally:
        np.random.set_bit_generator(before)
