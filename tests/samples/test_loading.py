"""What is loaded beside the samples themselves, and how often."""

import itertools
from collections import OrderedDict, deque

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from egeria_cache.batch import Axis
from egeria_cache.samples.company import FREE_S, MAX_SHARE, Company
from egeria_cache.samples.draws import Draws
from egeria_cache.samples.loading import CollateLoaded, SampleLoader, SeededDataset, Task
from egeria_cache.samples.source import LoaderSource

SIZE = 8


def test_samples_are_compared_in_turns_at_a_share_of_what_loading_takes():
    company = Company()
    assert company.choose(4) == [0, 1, 2, 3]  # all of the first: nothing is known of the cost
    company.compared(4, 4 * FREE_S)
    assert company.choose(4) == []
    company.loaded_s += 10 * FREE_S / MAX_SHARE
    turns = [company.choose(8) for _ in range(50)]
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


def test_lengths_are_those_of_samples_alone_and_one_that_differs_is_told():
    def ended(items):  # those that do not end so get a last token, the second batch alone
        return joined([item if item[-1] != 5 else [*item, 9] for item in items])

    def load(collate, start):
        task = Task(0, rows := [*range(start, start + SIZE)], rows, [0] * SIZE, None, axes=axes)
        return CollateLoaded(collate)(SeededDataset(samples).__getitems__(task))

    axes, samples = (Axis("['x']", 0), Axis("['mask']", 0)), SampleLoader(Texts(list), joined)
    for start in (0, SIZE):
        loaded = load(joined, start)
        assert loaded.lengths.T.tolist() == [LENGTHS[start : start + SIZE]] * 2
        assert loaded.differs is None
    ends = [words(length, i)[-1] == 5 for i, length in enumerate(LENGTHS)]
    longer = [length + end for length, end in zip(LENGTHS, ends, strict=True)]
    assert load(ended, 0).lengths[:, 0].tolist() == longer[:SIZE]
    assert load(lambda items: joined([items[0], *items[:-1]]), 0).differs == "['x']"


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
