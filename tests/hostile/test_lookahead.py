"""Samplers that see the training, loops that stop early, and workers."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.hostile.harness import hostile, sgd
from tests.hostile.nets import NUM_SAMPLES, Net, inputs, labels, rows, seeded


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


@hostile(served=True)
@pytest.mark.parametrize("early", [1, 2])
def test_an_early_break_leaves_the_order_of_the_next_epoch_alone(run, early):
    model = run.freeze(Dropping())
    loader = run.loader(rows(), shuffle=True)
    optimizer = sgd(model)
    for _ in range(6):
        for x, y in itertools.islice(loader, early):
            run.step(F.cross_entropy(model(x), y), optimizer)
    run.see(model)


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


@hostile(served=True)
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"sampler": WeightedRandomSampler(torch.rand(24, generator=seeded(1)), 24)},
        lambda: {"sampler": SubsetRandomSampler([*range(0, 24, 2)])},
        lambda: {"sampler": RandomSampler(rows(), replacement=True, num_samples=32)},
        lambda: {"sampler": [*range(23, -1, -1)]},
        lambda: {"shuffle": True, "drop_last": True, "batch_size": 7},
        lambda: {"batch_sampler": [[0, 1], [5, 5, 5], [*range(6, 20)]]},
        lambda: {"sampler": [torch.tensor(i) for i in range(24)]},
        lambda: {"sampler": np.arange(24)},
        lambda: {"sampler": [-1 - i for i in range(24)]},
    ],
    ids=[
        "weighted", "subset", "replacement", "list", "drop_last", "batches", "tensors", "array",
        "negative",
    ],
)  # fmt: skip
def test_ordinary_samplers_are_served_in_their_order(run, make):
    run.fit(run.freeze(Dropping()), run.loader(rows(), **make()), 5)


@hostile
def test_weights_that_the_loop_changes_decide_the_next_epoch(run):
    sampler = WeightedRandomSampler(torch.ones(24), 24)

    def each_epoch(epoch):
        sampler.weights = torch.rand(24, generator=seeded(epoch))

    run.fit(run.freeze(Net()), run.loader(rows(), sampler=sampler), 4, each_epoch=each_epoch)


@hostile
def test_a_sampler_that_listens_to_set_epoch_has_each_epochs_order(run):
    class Epochal(Sampler):
        epoch = 0

        def __len__(self):
            return 24

        def __iter__(self):
            return iter(torch.randperm(24, generator=seeded(self.epoch)).tolist())

    sampler = Epochal()
    run.fit(
        run.freeze(Net()), run.loader(rows(), sampler=sampler), 4,
        each_epoch=lambda epoch: setattr(sampler, "epoch", epoch),
    )  # fmt: skip


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


@hostile(served=True)
def test_one_iterator_over_all_epochs_is_served(run):
    """`itertools.cycle` by hand: the loop counts steps, not epochs."""
    model = run.freeze(Dropping())
    loader = run.loader(rows(), shuffle=True)
    iterator = iter(loader)
    optimizer = sgd(model)
    for _ in range(14):
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(loader)
            batch = next(iterator)
        run.step(F.cross_entropy(model(batch[0]), batch[1]), optimizer)
    run.see(model)


@hostile
def test_two_passes_in_step_give_each_its_own_batches(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True)
    optimizer = sgd(model)
    for _ in range(4):
        for a, b in zip(loader, loader, strict=True):
            run.step(F.cross_entropy(model(a[0]), a[1]), optimizer)
            run.step(F.cross_entropy(model(b[0]), b[1]), optimizer)
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


@hostile(served=True)
def test_a_prefetching_wrapper_fetches_ahead(run):
    class Ahead:
        def __init__(self, loader):
            self.loader = loader

        def __len__(self):
            return len(self.loader)

        def __iter__(self):
            iterator = iter(self.loader)
            ahead = next(iterator)
            for batch in iterator:
                yield ahead
                ahead = batch
            yield ahead

    run.fit(run.freeze(Dropping()), Ahead(run.loader(rows(), shuffle=True)), 4)


# ---- workers ----------------------------------------------------------------------------------


class File(Dataset):
    """Opens its file on first use, and seeks in it: an offset that two processes must not share."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return NUM_SAMPLES

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
        run.fit(
            run.freeze(Net()),
            run.loader(data, 4, num_workers=2, persistent_workers=persistent, shuffle=True), 2,
        )  # fmt: skip
        run.see(data.file is None)


@hostile
def test_a_data_set_that_only_works_in_a_worker_works(run):
    class Here(Dataset):
        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            assert get_worker_info() is not None, "loaded in the main process"
            return inputs()[index], labels()[index]

    run.fit(run.freeze(Net()), run.loader(Here(), num_workers=1), 2)


@hostile
def test_a_database_opened_by_the_workers_is_open(run):
    class Opened(Dataset):
        def __init__(self):
            self.database = None

        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            return self.database[index], labels()[index]

    def initialise(worker):
        dataset = get_worker_info().dataset
        getattr(dataset, "dataset", dataset).database = inputs()

    run.fit(run.freeze(Net()), run.loader(Opened(), num_workers=1, worker_init_fn=initialise), 2)


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
    optimizer = sgd(model)
    for _ in range(4):
        for x, y in itertools.islice(loader, 2):
            run.step(F.cross_entropy(model(x), y), optimizer)
    run.see(model)


@hostile
def test_a_module_in_the_data_set_stays_in_the_main_process(run):
    """A data set that tokenises with a small network, in the mode that the loop left it in."""

    class Featuring(Dataset):
        def __init__(self):
            self.network = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval()

        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            with torch.no_grad():
                return self.network(inputs()[index]), labels()[index]

    run.fit(run.freeze(Net()), run.loader(Featuring()), 3)
