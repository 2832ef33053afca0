"""Samplers that see the training, loops that stop early, and workers."""

import itertools
import random
import threading
from queue import Queue

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.hostile.harness import hostile
from tests.hostile.loops import one_ahead, trained
from tests.hostile.nets import NUM_SAMPLES, Net, inputs, labels, made, net, rows, seeded


def dropping():
    """Return a net whose head draws from torch's global generator in every step."""
    return net(back=lambda m, h: Net.back(m, F.dropout(h, 0.3, m.training)))


class Lazily(Sampler):
    """Yields what a function gives, asked as late as possible, and says how far it is."""

    def __init__(self, draw, n=NUM_SAMPLES):
        self.draw, self.n, self.drawn = draw, n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        for i in range(self.n):
            self.drawn += 1
            yield self.draw(i)


@hostile
def test_a_sampler_that_adapts_to_losses_sees_the_losses_so_far(run):
    """The next sample is the one whose class has the largest loss."""
    losses = torch.ones(3)
    by_class = [torch.nonzero(labels() == c).flatten().tolist() for c in range(3)]

    def draw(i):
        members = by_class[int(losses.argmax())]
        return members[i % len(members)]

    def loss(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        for c in batch[1].unique().tolist():
            losses[c] = each.detach()[batch[1] == c].mean()
        return each.mean()

    trained(run, loss, sampler=Lazily(draw), batch_size=4)


DRAWS = {
    "torch": (lambda i: int(torch.randint(NUM_SAMPLES, ())), lambda: float(torch.rand(()))),
    "numpy": (lambda i: int(np.random.randint(NUM_SAMPLES)), np.random.rand),
    "python": (lambda i: random.randrange(NUM_SAMPLES), random.random),
}


@hostile(over=DRAWS)
def test_a_sampler_that_shares_a_generator_with_training_draws_when_asked(run, draw, noise):
    model = net(back=lambda m, h: Net.back(m, h * (1 + noise())))
    trained(run, model=model, sampler=Lazily(draw), epochs=4)


@hostile
def test_a_generator_that_the_loader_and_the_loop_share_is_drawn_from_in_order(run):
    generator = seeded(4)

    def loss(model, batch):
        scale = 1 + torch.rand((), generator=generator)
        return F.cross_entropy(model(batch[0]) * scale, batch[1])

    # With the last batch, a short one, the sampler draws once more.
    trained(run, loss, shuffle=True, generator=generator, epochs=4, batch_size=10)


def first_two(loader, epochs=4):
    return (batch for _ in range(epochs) for batch in itertools.islice(loader, 2))


@hostile
def test_an_early_break_leaves_a_lazy_sampler_where_dataloader_does(run):
    sampler = Lazily(DRAWS["torch"][0])

    def batches(loader):
        for batch in first_two(loader):
            run.see(sampler.drawn)
            yield batch

    model = run.freeze(dropping())
    run.fit(model, batches(run.loader(rows(), sampler=sampler)), 1)


class AtOnce(Sampler):
    """Draws all of its batches when it is asked for an iterator: each one is another epoch."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(torch.randperm(NUM_SAMPLES).view(3, 8).tolist())


SAMPLERS = {
    "batches drawn at once": lambda: {"batch_sampler": AtOnce(), "num_workers": 1},
    "weighted": lambda: {"sampler": WeightedRandomSampler(range(1, 25), 24, generator=seeded(1))},
    "subset": lambda: {"sampler": SubsetRandomSampler([*range(0, 24, 2)])},
    "replacement": lambda: {"sampler": RandomSampler(rows(), replacement=True, num_samples=32)},
    "list": lambda: {"sampler": [*range(23, -1, -1)]},
    "array": lambda: {"sampler": np.arange(24)},
    "a last partial batch": lambda: {"shuffle": True, "batch_size": 7},
    "batches of one": lambda: {"batch_size": 1},
    "all in one": lambda: {"batch_size": 24},
    "batches": lambda: {"batch_sampler": [[0, 1], [5, 5, 5], [*range(6, 20)]]},
}


@hostile(over=SAMPLERS, cases=4, served=True)
def test_ordinary_samplers_are_served_in_their_order(run, options):
    trained(run, model=dropping(), epochs=5, **options())


@hostile
def test_weights_that_the_loop_changes_decide_the_next_epoch(run):
    sampler = WeightedRandomSampler(torch.ones(24), 24)

    def each_epoch(model, epoch):
        sampler.weights = torch.rand(24, generator=seeded(epoch))

    trained(run, sampler=sampler, each_epoch=each_epoch, epochs=4)


class Epochal(Sampler):
    epoch = 0

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(torch.randperm(24, generator=seeded(self.epoch)).tolist())


@hostile
def test_a_sampler_that_listens_to_set_epoch_has_each_epochs_order(run):
    sampler = Epochal()
    trained(run, sampler=sampler, each_epoch=lambda m, e: setattr(sampler, "epoch", e), epochs=4)


@hostile
def test_an_endless_sampler_is_drawn_from_as_far_as_is_needed(run):
    sampler = Lazily(lambda i: i % NUM_SAMPLES, 10**9)

    def batches(loader):
        for batch in itertools.islice(loader, 12):
            yield batch
            run.see(sampler.drawn)

    run.fit(run.freeze(Net()), batches(run.loader(rows(), sampler=sampler)), 1)


def by_hand(loader, other):
    """`itertools.cycle` by hand: the loop counts steps, not epochs."""
    iterator = iter(loader)
    for _ in range(14):
        if (batch := next(iterator, None)) is None:
            batch = next(iterator := iter(loader))
        yield batch


def in_a_thread(loader, other):
    def work(queue):
        for batch in loader:
            queue.put(batch)
        queue.put(None)

    for _ in range(4):
        queue = Queue(2)
        thread = threading.Thread(target=work, args=[queue])
        thread.start()
        yield from iter(queue.get, None)
        thread.join()


def in_step(left, right):
    return (b for _ in range(4) for pair in zip(left, right, strict=True) for b in pair)


PASSES = {
    "one iterator": by_hand,
    "fetched ahead": lambda loader, other: (b for _ in range(4) for b in one_ahead(loader)),
    "broken off": lambda loader, other: first_two(loader, 6),
    "the first alone": lambda loader, other: (next(iter(loader)) for _ in range(9)),
    "two in step": lambda loader, other: in_step(loader, loader),
    "two loaders": lambda loader, other: in_step(loader, other),
    "chained": lambda loader, other: (b for _ in range(4) for b in [*loader, *other]),
    "cycled": lambda loader, other: itertools.islice(itertools.cycle(loader), 10),
    "in a thread": in_a_thread,
}


@hostile(over=PASSES, cases=4)
def test_however_a_loop_passes_over_its_loaders_the_batches_are_the_same(run, passes):
    model = run.freeze(dropping())
    loader = run.loader(rows(), shuffle=passes is not PASSES["cycled"])
    run.fit(model, passes(loader, run.loader(rows(seed=7), shuffle=True)), 1)


@hostile(over={how: PASSES[how] for how in ("one iterator", "fetched ahead", "broken off")},
         served=True)  # fmt: skip
def test_and_served_where_all_is_asked_for_in_turn(run, passes):
    run.fit(run.freeze(dropping()), passes(run.loader(rows(), shuffle=True), None), 1)


@hostile(served=True)
def test_a_pass_over_the_loader_without_the_model_does_no_harm(run):
    """A mean over the data set, a count of classes."""
    model = run.freeze(dropping())
    loader = run.loader(rows(), shuffle=True)
    means = lambda epoch: [run.see(x.mean() + y.float().mean()) for x, y in loader]  # noqa: E731
    run.fit(model, loader, 4, each_epoch=means)


@hostile
def test_a_thread_beside_the_training_loads_each_sample_once(run):
    """What draws meanwhile may be the training: nothing is put back, and loaded again."""
    data = made(lambda d, i: (d.log.append(i), d.x[i] + torch.rand(6), d.y[i])[1:], log=[])
    run.fit(run.freeze(Net(), None), in_a_thread(run.loader(data), None), 1)
    run.see(torch.tensor(data.log))
    trained(run)


# ---- workers ----------------------------------------------------------------------------------


def only_in_a_worker(data, index):
    assert get_worker_info() is not None, "loaded in the main process"
    return data.x[index], data.y[index]


def of_a_database(data, index):
    return data.database[index], data.y[index]


def opening(worker):
    dataset = get_worker_info().dataset
    getattr(dataset, "dataset", dataset).database = inputs()


@hostile(over={"asked in a worker": only_in_a_worker, "opened by a worker": of_a_database})
def test_a_data_set_that_only_works_in_a_worker_works(run, get):
    data = made(get, database=None)
    trained(run, data=data, num_workers=1, worker_init_fn=opening, epochs=2)


@hostile(served=True)
def test_an_early_break_with_workers_leaves_the_order_alone(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True, num_workers=1)
    for _ in range(4):
        run.fit(model, [*itertools.islice(loader, 2)], 1)
