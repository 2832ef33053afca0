"""Samplers that see the training, loops that stop early, and workers."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import (
    NUM_SAMPLES,
    ConvNet,
    Net,
    Pairs,
    images,
    inputs,
    labels,
    rows,
    seeded,
)


class Dropping(Net):
    """A head that draws from torch's global generator in every step."""

    def back(self, h):
        return super().back(F.dropout(h, 0.3, self.training))


class Lazily(Sampler):
    """Yields what a function gives, asked as late as possible."""

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

    model = run.freeze(Net())
    loader = run.loader(rows(), sampler=Lazily(draw), batch_size=4)
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in loader:
            each = F.cross_entropy(model(x), y, reduction="none")
            for c in range(3):
                if (y == c).any():
                    losses[c] = each.detach()[y == c].mean()
            run.step(each.mean(), optimizer)
    run.see(model)


@hostile
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_sampler_that_shares_a_generator_with_training_draws_when_asked(run, kind):
    draw = {
        "torch": lambda i: int(torch.randint(NUM_SAMPLES, ())),
        "numpy": lambda i: int(np.random.randint(NUM_SAMPLES)),
        "python": lambda i: random.randrange(NUM_SAMPLES),
    }[kind]

    class Noisy(Net):
        def back(self, h):
            noise = {
                "torch": lambda: float(torch.rand(())),
                "numpy": np.random.rand,
                "python": random.random,
            }[kind]()
            return super().back(h * (1 + noise))

    run.fit(run.freeze(Noisy()), run.loader(rows(), sampler=Lazily(draw)), 4)


@hostile
def test_a_generator_that_the_loader_and_the_loop_share_is_drawn_from_in_order(run):
    generator = seeded(4)
    model = run.freeze(Net())

    def loss(model, batch):
        scale = 1 + torch.rand((), generator=generator)
        return F.cross_entropy(model(batch[0]) * scale, batch[1])

    run.fit(model, run.loader(rows(), shuffle=True, generator=generator), 4, loss=loss)


@hostile
def test_an_early_break_leaves_a_lazy_sampler_where_dataloader_does(run):
    sampler = Lazily(lambda i: int(torch.randint(NUM_SAMPLES, ())))
    model = run.freeze(Dropping())
    loader = run.loader(rows(), sampler=sampler)
    optimizer = sgd(model)
    for _ in range(4):
        for number, (x, y) in enumerate(loader):
            run.step(F.cross_entropy(model(x), y), optimizer)
            run.see(sampler.drawn)
            if number == 1:
                break
    run.see(model)


@hostile
def test_a_sampler_with_a_state_tells_where_training_is(run):
    """As checkpoints of torchdata's samplers do, in the middle of an epoch."""

    class Stateful(Sampler):
        def __init__(self):
            self.at = 0

        def __len__(self):
            return NUM_SAMPLES

        def __iter__(self):
            for i in range(NUM_SAMPLES):
                self.at = i
                yield (7 * i) % NUM_SAMPLES

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    sampler = Stateful()
    model = run.freeze(Net())
    loader = run.loader(rows(), sampler=sampler, batch_size=4)
    run.fit(model, loader, 4, each_step=lambda step: run.see(sampler.state_dict()["at"]))


class Growing(Sampler):
    """Batches whose size the loop sets."""

    def __init__(self, size=2):
        self.size = size

    def __len__(self):
        return NUM_SAMPLES // self.size

    def __iter__(self):
        batch = []
        for i in range(NUM_SAMPLES):
            batch.append(i)
            if len(batch) >= self.size:
                yield batch
                batch = []


@hostile
@pytest.mark.parametrize("when", ["epoch", "step"])
def test_batches_that_grow_grow_when_the_loop_says_so(run, when):
    sampler = Growing()
    model = run.freeze(Net())
    loader = run.loader(rows(), batch_sampler=sampler)
    optimizer = sgd(model)
    for epoch in range(4):
        if when == "epoch":
            sampler.size = 2 * (epoch + 1)
        for number, (x, y) in enumerate(loader):
            if when == "step" and number == 2:
                sampler.size = min(8, sampler.size + 2)
            run.see(len(x))
            run.step(F.cross_entropy(model(x), y), optimizer)
    run.see(model)


SAMPLERS = {
    "weighted": lambda: {"sampler": WeightedRandomSampler(range(1, 25), 24, generator=seeded(1))},
    "subset": lambda: {"sampler": SubsetRandomSampler([*range(0, 24, 2)])},
    "replacement": lambda: {"sampler": RandomSampler(rows(), replacement=True, num_samples=32)},
    "list": lambda: {"sampler": [*range(23, -1, -1)]},
    "tensors": lambda: {"sampler": [torch.tensor(i) for i in range(24)]},
    "array": lambda: {"sampler": np.arange(24)},
    "negative": lambda: {"sampler": [-1 - i for i in range(24)]},
    "drop_last": lambda: {"shuffle": True, "drop_last": True, "batch_size": 7},
    "a last partial batch": lambda: {"shuffle": True, "batch_size": 7},
    "batches of one": lambda: {"batch_size": 1},
    "all in one": lambda: {"batch_size": 24},
    "batches": lambda: {"batch_sampler": [[0, 1], [5, 5, 5], [*range(6, 20)]]},
}


@hostile(served=True)
@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_ordinary_samplers_are_served_in_their_order(run, kind):
    trained(run, model=Dropping(), epochs=5, **SAMPLERS[kind]())


@hostile(served=True)
@pytest.mark.parametrize("kind", ["replacement", "batches"])
def test_the_same_of_images_with_norms(run, kind):
    trained(run, epochs=4, model=ConvNet(), data=images(), boundary="body", **SAMPLERS[kind]())


@hostile
def test_weights_that_the_loop_changes_decide_the_next_epoch(run):
    sampler = WeightedRandomSampler(torch.ones(24), 24)

    def each_epoch(model, epoch):
        sampler.weights = torch.rand(24, generator=seeded(epoch))

    trained(run, sampler=sampler, each_epoch=each_epoch, epochs=4)


@hostile
def test_a_sampler_that_listens_to_set_epoch_has_each_epochs_order(run):
    class Epochal(Sampler):
        epoch = 0

        def __len__(self):
            return 24

        def __iter__(self):
            return iter(torch.randperm(24, generator=seeded(self.epoch)).tolist())

    sampler = Epochal()
    trained(run, sampler=sampler, each_epoch=lambda m, e: setattr(sampler, "epoch", e), epochs=4)


@hostile
def test_an_endless_sampler_is_drawn_from_as_far_as_is_needed(run):
    drawn = itertools.count()
    last = [0]

    class Endless(Sampler):
        def __len__(self):
            return 10**9

        def __iter__(self):
            for i in drawn:
                last[0] = i
                yield i % NUM_SAMPLES

    model = run.freeze(Net())
    iterator = iter(run.loader(rows(), sampler=Endless()))
    optimizer = sgd(model)
    for _ in range(12):
        x, y = next(iterator)
        run.step(F.cross_entropy(model(x), y), optimizer)
        run.see(last[0])
    del iterator
    run.see(model)


def by_hand(loader, other):
    """`itertools.cycle` by hand: the loop counts steps, not epochs."""
    iterator = iter(loader)
    for _ in range(14):
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(loader)
            batch = next(iterator)
        yield batch


def fetched_ahead(loader, other):
    for _ in range(4):
        iterator = iter(loader)
        ahead = next(iterator)
        for batch in iterator:
            yield ahead
            ahead = batch
        yield ahead


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


PASSES = {
    "one iterator": by_hand,
    "fetched ahead": fetched_ahead,
    "broken off": lambda loader, other: (b for _ in range(6) for b in itertools.islice(loader, 2)),
    "the first alone": lambda loader, other: (next(iter(loader)) for _ in range(9)),
    "two in step": lambda loader, other: (
        b for _ in range(4) for pair in zip(loader, loader, strict=True) for b in pair
    ),
    "two loaders": lambda loader, other: (
        b for _ in range(4) for pair in zip(loader, other, strict=True) for b in pair
    ),
    "chained": lambda loader, other: (b for _ in range(4) for b in [*loader, *other]),
    "cycled": lambda loader, other: itertools.islice(itertools.cycle(loader), 10),
    "in a thread": in_a_thread,
}


@hostile
@pytest.mark.cases(4)
@pytest.mark.parametrize("how", PASSES)
def test_however_a_loop_passes_over_its_loaders_the_batches_are_the_same(run, how):
    model = run.freeze(Dropping())
    loader = run.loader(rows(), shuffle=how != "cycled")
    batches = PASSES[how](loader, run.loader(rows(seed=7), shuffle=True))
    optimizer = sgd(model)
    for batch in batches:
        run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile(served=True)
@pytest.mark.parametrize("how", ["one iterator", "fetched ahead", "broken off"])
def test_and_served_where_all_is_asked_for_in_turn(run, how):
    model = run.freeze(Dropping())
    optimizer = sgd(model)
    for batch in PASSES[how](run.loader(rows(), shuffle=True), None):
        run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile
def test_a_batch_size_that_the_loop_changes(run):
    model = run.freeze(Net())
    optimizer = sgd(model)
    for size in (4, 8, 24, 3):
        for batch in run.loader(rows(), size):
            run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile(served=True)
def test_a_peek_at_the_first_batch_changes_nothing_that_it_does_not_under_dataloader(run):
    model = run.freeze(Dropping())
    loader = run.loader(rows(), shuffle=True)
    run.see(next(iter(loader))[0].shape[0])
    run.fit(model, loader, 2)
    run.see(next(iter(loader))[0].sum())
    run.fit(model, loader, 2)


@hostile(served=True)
def test_a_pass_over_the_loader_without_the_model_does_no_harm(run):
    """A mean over the data set, a count of classes."""
    model = run.freeze(Dropping())
    loader = run.loader(rows(), shuffle=True)

    def each_epoch(epoch):
        for x, y in loader:
            run.see(x.mean() + y.float().mean())

    run.fit(model, loader, 4, each_epoch=each_epoch)


# ---- workers ----------------------------------------------------------------------------------


class File(Pairs):
    """Opens its file on first use, and seeks in it: an offset that two processes must not share."""

    def __init__(self, path):
        super().__init__()
        self.path, self.file = path, None

    def __getitem__(self, index):
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(28 * index)
        first = self.file.read(12)
        row = np.frombuffer(first + self.file.read(16), np.float32)
        return torch.from_numpy(row[:6].copy()), int(row[6])

    def __del__(self):
        if self.file is not None:
            self.file.close()


@hostile(served=True)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_file_opened_lazily_is_each_workers_own(run, persistent):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        table = np.concatenate([inputs().numpy(), labels().numpy()[:, None]], 1)
        path.write_bytes(table.astype(np.float32).tobytes())
        data = File(path)
        trained(run, data=data, num_workers=2, persistent_workers=persistent, shuffle=True)
        run.see(data.file is None)


@hostile
def test_a_data_set_that_only_works_in_a_worker_works(run):
    class Here(Pairs):
        def __getitem__(self, index):
            assert get_worker_info() is not None, "loaded in the main process"
            return super().__getitem__(index)

    trained(run, data=Here(), num_workers=1, epochs=2)


@hostile
def test_a_database_opened_by_the_workers_is_open(run):
    class Opened(Pairs):
        database = None

        def __getitem__(self, index):
            return self.database[index], self.y[index]

    def initialise(worker):
        dataset = get_worker_info().dataset
        getattr(dataset, "dataset", dataset).database = inputs()

    trained(run, data=Opened(), num_workers=1, worker_init_fn=initialise, epochs=2)


@hostile(served=True)
def test_workers_that_start_when_much_is_stored_load_at_once(run):
    """A fork after use: first no workers, then a loader with some."""
    model = run.freeze(Net())
    run.fit(model, run.loader(rows()), 2)
    run.fit(model, run.loader(rows(), num_workers=1), 2)


@hostile
def test_a_fork_of_the_loops_own_may_use_the_model(run):
    """A child process evaluates what was trained, as `multiprocessing` users do."""
    context = torch.multiprocessing.get_context("fork")
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    receiver, sender = context.Pipe(duplex=False)

    def evaluate():
        with torch.no_grad():
            sender.send(float(model(inputs()).sum()))

    child = context.Process(target=evaluate)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    run.see(receiver.recv())
    run.fit(model, loader, 1)


@hostile(served=True)
def test_an_early_break_with_workers_leaves_the_order_alone(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True, num_workers=1)
    for _ in range(4):
        run.fit(model, [*itertools.islice(loader, 2)], 1)


@hostile
def test_a_module_in_the_data_set_stays_in_the_main_process(run):
    """A data set that tokenises with a small network, in the mode that the loop left it in."""

    class Featuring(Pairs):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval()

        def __getitem__(self, index):
            with torch.no_grad():
                return self.network(self.x[index]), self.y[index]

    trained(run, data=Featuring())
