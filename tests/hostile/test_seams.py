"""Between mechanisms: memory shared across the cut, state that no copy reaches, company."""

from __future__ import annotations

import array
import contextvars
import ctypes
import io
import multiprocessing
import os
import random
import sqlite3
import tempfile
import threading
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, RandomSampler, Subset, TensorDataset, default_collate

from tests.hostile.harness import Run, cross_entropy, hostile, judge, sgd
from tests.hostile.nets import ConvNet, Net, Pairs, inputs, labels, rows, seeded

# ---- memory that is shared across the cut --------------------------------------------------------


class Identity(nn.Module):
    def forward(self, x):
        return x


class Shared(Net):
    """The boundary returns what it is given, or a view; the head begins to write late."""

    def __init__(self, middle, late):
        super().__init__()
        self.middle, self.late_from, self.calls, self.way = middle, late, 0, "relu_"

    def forward(self, x):
        h = torch.tanh(self.early(x))
        z = self.middle(h)
        z = z[0] if isinstance(z, tuple) else z
        self.calls += self.training
        if self.calls > self.late_from:
            h.mul_(0.5)
        return self.head(torch.tanh(z.flatten(1)) + h)


class Views(nn.Module):
    def forward(self, x):
        return x[:, :], x[:, :4]


BOUNDARIES = {
    "identity": Identity,
    "nn.Identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.0),
    "flatten": nn.Flatten,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "views": Views,
}


@pytest.mark.parametrize("kind", list(BOUNDARIES))
@pytest.mark.parametrize("late", [0, 7])
@hostile
def test_a_boundary_that_returns_its_input_and_a_head_that_writes(run, kind, late):
    model = run.freeze(Shared(BOUNDARIES[kind](), late), "middle")
    run.fit(model, run.loader(rows()), 4)


@hostile
def test_a_head_that_writes_to_the_front_s_output_by_a_flag(run):
    class Writing(Net):
        writes = False

        def forward(self, x):
            h = torch.tanh(self.early(x))
            z = self.middle(h)
            keep = z.view(-1, 2, 4)
            if self.writes:
                keep[:, 0] += 1
            return self.head(torch.tanh(z)) + self.head(torch.tanh(h))

    model = run.freeze(Writing())
    run.fit(model, run.loader(rows()), 4, each_epoch=lambda e: setattr(model, "writes", e == 2))


@hostile
def test_a_residual_stream_written_in_place_after_warm_up(run):
    class Stream(Net):
        step = 0

        def forward(self, x):
            h = self.early(x)
            z = h
            z = self.middle.forward(z) if False else self.middle(z)
            self.step += 1
            out = z + h
            if self.step > 8:
                h += 1.0
                out = z + h
            return self.head(torch.tanh(out))

    run.fit(run.freeze(Stream()), run.loader(rows()), 4)


class Writing(Net):
    """Writes to what it was given, late."""

    writes = False

    def forward(self, x, also=0.0):
        h = self.front(x)
        if self.writes:
            x[:, 1:].mul_(0.5)
        return self.back(h) + also


def with_a_view(samples):
    x, y = default_collate(samples)
    return x, x[:, 1:4], y


WRITERS = {
    "seen by the loop": (default_collate, lambda m, b: m(b[0]) + b[0][:, 1:4]),
    "seen in a view": (default_collate, lambda m, b: m(b[0], b[0][:, 1:4])),
    "seen in another leaf": (with_a_view, lambda m, b: m(b[0], b[1])),
}


@pytest.mark.parametrize("kind", list(WRITERS))
@hostile
def test_a_model_that_writes_to_its_input_late(run, kind):
    collate, call = WRITERS[kind]
    model = run.freeze(Writing())
    run.fit(
        model, run.loader(rows(), collate_fn=collate), 5,
        loss=lambda m, b: F.cross_entropy(call(m, b), b[-1]),
        each_epoch=lambda e: setattr(model, "writes", e > 2),
    )  # fmt: skip


@hostile(served=True)
def test_leaves_of_one_memory_are_written_by_the_loop(run):
    def loss(m, b):
        out = m(b[0])
        b[0].mul_(1.5)
        return F.cross_entropy(out + b[1], b[2])

    run.fit(run.freeze(Net()), run.loader(rows(), collate_fn=with_a_view), 4, loss=loss)


# ---- company -------------------------------------------------------------------------------------


def by_difficulty(samples):
    samples = sorted(samples, key=lambda s: float(s[0].sum()))
    return default_collate(samples)


def relabelled(samples):
    x, y = default_collate(samples)
    present = sorted(set(y.tolist()))
    return x, torch.tensor([present.index(v) for v in y.tolist()])


def centred_if_large(samples):
    x, y = default_collate(samples)
    return (x - x.mean(0) if float(x.max()) > 2.2 else x), y


@pytest.mark.parametrize("collate", [by_difficulty, relabelled, centred_if_large])
@pytest.mark.parametrize("shuffle", [False, True])
@hostile
def test_a_collate_function_that_looks_at_company(run, collate, shuffle):
    model = run.freeze(Net())
    run.fit(model, run.loader(rows(96), collate_fn=collate, shuffle=shuffle), 4)


def with_tokens(samples):
    """Padding, lengths, masks, and labels that are shifted behind the padding."""
    x, y = default_collate(samples)
    tokens = [torch.arange(1, 3 + int(label)) for label in y]
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    shifted = torch.cat([padded[:, 1:], torch.full((len(y), 1), -100)], 1)
    return x, y, padded, padded > 0, torch.tensor([*map(len, tokens)]), shifted


@pytest.mark.parametrize(
    ("collate", "leaf"), [(relabelled, "[1]"), (by_difficulty, None), (with_tokens, None)]
)
def test_labels_that_are_made_from_company_are_told_by_name_once(collate, leaf, tmp_path):
    def script(run):
        loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])  # noqa: E731
        run.fit(run.freeze(Net()), run.loader(rows(96), collate_fn=collate), 3, loss=loss)

    trace = Run("always", tmp_path / "cache").run(script)
    told = [word for _, word in trace.words if "from its company" in word]
    assert trace.last_hits
    assert len(told) == (leaf is not None)
    assert all(repr(leaf) in word and "behind the loader" in word for word in told)


def centred_if_very_large(samples):
    x, y = default_collate(samples)
    return (x - x.mean(0) if float(x.max()) > 3.0 else x), y


def relabelled_if_large(samples):
    x, y = default_collate(samples)
    return x, (y + 1) % 3 if float(x.max()) > 3.0 else y


@pytest.mark.parametrize("collate", [centred_if_very_large, relabelled_if_large])
@pytest.mark.parametrize("workers", [0, 2])
@hostile
def test_a_collate_function_that_looks_at_company_in_a_late_batch_alone(run, collate, workers):
    model = run.freeze(Net())
    data = TensorDataset(inputs(96), labels(96))
    data.tensors[0].clamp_(-2, 2)[20, 1] = 3.5
    run.fit(model, run.loader(data, collate_fn=collate, num_workers=workers), 5)


class Counting:
    """A collate function that counts its calls, and what it gives depends on that."""

    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        x, y = default_collate(samples)
        return x + 0.01 * (self.calls > 4), y


@hostile
def test_a_collate_function_that_counts_its_calls(run):
    run.fit(run.freeze(Net()), run.loader(rows(), collate_fn=Counting()), 4)


class Jittering:
    """A collate function with a generator of its own, which it uses late."""

    def __init__(self):
        self.generator, self.calls = random.Random(0), 0

    def __call__(self, samples):
        self.calls += 1
        x, y = default_collate(samples)
        return x + 0.1 * self.generator.random() * (self.calls > 6), y


@hostile
def test_a_collate_function_that_draws_from_a_generator_of_its_own_late(run):
    run.fit(run.freeze(Net()), run.loader(rows(), collate_fn=Jittering()), 4)


class OneBuffer:
    """A collate function that uses its memory again."""

    def __init__(self):
        self.memory = torch.zeros(8, 6)

    def __call__(self, samples):
        x, y = default_collate(samples)
        return self.memory[: len(x)].copy_(x), y


@hostile(served=True)
def test_samples_are_compared_under_a_collate_function_that_uses_its_memory_again(run):
    run.fit(run.freeze(Net()), run.loader(rows(), collate_fn=OneBuffer()), 4)


# ---- state that no copy reaches ------------------------------------------------------------------


class Kept(threading.local):
    calls = 0


def counted(model):
    counted.calls += 1
    return counted.calls


NOW = contextvars.ContextVar("calls")

COUNTERS = {
    "multiprocessing": lambda: multiprocessing.Value("i", 0),
    "ctypes": lambda: ctypes.c_int(0),
    "array": lambda: array.array("i", [0]),
    "thread-local": Kept,
    "text": io.StringIO,
    "sqlite": lambda: sqlite3.connect(":memory:"),
    "function": lambda: counted,
    "context": lambda: NOW,
    "path": lambda: tempfile.NamedTemporaryFile("w", delete=False).name,  # noqa: SIM115
}
COPIED = ("ctypes", "array", "thread-local")


def count(kind, counter):
    if kind in ("multiprocessing", "ctypes"):
        counter.value += 1
        return counter.value
    if kind == "array":
        counter[0] += 1
        return counter[0]
    if kind == "thread-local":
        counter.calls += 1
        return counter.calls
    if kind == "text":
        counter.write("x")
        return counter.tell()
    if kind == "sqlite":
        counter.execute("create table if not exists t (x)")
        counter.execute("insert into t values (1)")
        return counter.execute("select count(*) from t").fetchone()[0]
    if kind == "context":
        counter.set(counter.get(0) + 1)
        return counter.get()
    if kind == "path":
        with open(counter, "a") as file:
            file.write("x")
            return file.tell()
    return counter(None)


@pytest.mark.parametrize("kind", list(COUNTERS))
@pytest.mark.parametrize("place", ["attribute", "global"])
@pytest.mark.parametrize("boundary", ["middle", "auto"])
def test_a_head_that_counts_in_an_object_made_in_c(kind, place, boundary):
    """What a dry run cannot copy it does not use: the first loss is the plain one's."""

    def script(run):
        counter = COUNTERS[kind]()
        if kind == "function":
            counted.calls = 0
        if kind == "context":
            NOW.set(0)

        outside = counter if place == "global" else None

        class Counting(Net):
            def forward(self, x):
                h = self.front(x)
                own = self.counter if outside is None else outside
                return self.back(h) * (1 + 0.05 * count(kind, own))

        model = Counting()
        if place == "attribute":
            model.counter = counter
        where = "middle" if run.is_plain else boundary
        run.fit(run.freeze(model, where, ("early", "middle")), run.loader(rows()), 3)
        run.see(float(count(kind, counter)))
        if hasattr(counter, "close"):
            counter.close()

    judge(script, served=kind in COPIED and place == "attribute")


# ---- what the front reads, wherever it lies ------------------------------------------------------


def scaled(h):
    return h * scaled.by


SCALE = contextvars.ContextVar("scale", default=1.0)
SETTINGS = ModuleType("settings")
PLACES = {
    "array": (lambda: array.array("d", [1.0]), lambda at: at[0],
              lambda at, k: at.__setitem__(0, k)),
    "ctypes": (lambda: ctypes.c_double(1), lambda at: at.value,
               lambda at, k: setattr(at, "value", k)),
    "bytes": (lambda: bytearray([10]), lambda at: at[0] / 10,
              lambda at, k: at.__setitem__(0, int(10 * k))),
    "thread-local": (Kept, lambda at: at.calls + 1, lambda at, k: setattr(at, "calls", k - 1)),
    "function": (lambda: scaled, lambda at: scaled(1.0), lambda at, k: setattr(scaled, "by", k)),
    "context": (lambda: None, lambda at: SCALE.get(), lambda at, k: SCALE.set(k)),
    "environment": (lambda: None, lambda at: float(os.environ["HOSTILE_SCALE"]),
                    lambda at, k: os.environ.update(HOSTILE_SCALE=str(k))),
    "module": (lambda: None, lambda at: SETTINGS.scale,
               lambda at, k: setattr(SETTINGS, "scale", k)),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(PLACES))
@hostile
def test_a_number_that_the_front_reads_wherever_it_lies(run, kind):
    make, read, write = PLACES[kind]
    at = make()
    write(at, 1.0)

    class Reading(Net):
        def forward(self, x):
            return self.back(self.middle(torch.tanh(self.early(x) * read(at))))

    run.fit(
        run.freeze(Reading()), run.loader(rows()), 5,
        each_epoch=lambda e: write(at, 1 + e // 2 / 2),
    )  # fmt: skip


@pytest.mark.parametrize("what", ["mean", "scale"])
@hostile
def test_a_counter_of_the_front_s_own_that_decides_late(run, what):
    class Counting(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            h = self.early(x)
            if self.calls > 12:
                h = h - h.mean(0) if what == "mean" else h / 2
            return self.back(self.middle(torch.tanh(h)))

    run.fit(run.freeze(Counting()), run.loader(rows()), 6)


@hostile(served=True)
def test_a_counter_of_the_front_s_own_that_decides_nothing_of_it(run):
    class Counting(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.back(self.front(x)) * (1 + 0.001 * self.calls)

    run.fit(run.freeze(Counting()), run.loader(rows()), 4)


# ---- what trains, read without a gradient --------------------------------------------------------

READS = {
    "detach": lambda x, a: x.clamp(max=a.detach()),
    "item": lambda x, a: x.clamp(max=a.item()),
    "data": lambda x, a: torch.minimum(x, a.data),
    "numpy": lambda x, a: x.clamp(max=float(a.detach().numpy())),
    "sign": lambda x, a: x * torch.sign(a),
    "round": lambda x, a: x * torch.round(a),
    "bool": lambda x, a: x if a > 2.5 else 0 * x,
    "list": lambda x, a: x * (1 if a.tolist() > 2.5 else 0.5),
}


@pytest.mark.parametrize("kind", list(READS))
@hostile
def test_a_trained_number_that_is_read_before_the_boundary_without_a_gradient(run, kind):
    class Clamped(Net):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            h = self.middle(READS[kind](torch.tanh(self.early(x)), self.alpha))
            return self.back(h) * self.alpha

    model = Clamped()
    optimizer = torch.optim.SGD(
        [*model.late.parameters(), *model.head.parameters(), model.alpha], 0.8
    )
    run.freeze(model)
    run.fit(model, run.loader(rows()), 5, optimizer=optimizer)


# ---- data that change in mid-pass ----------------------------------------------------------------


class Listed(Dataset):
    def __init__(self):
        self.x, self.y = inputs(), labels().tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@hostile
def test_labels_in_a_list_that_change_between_epochs(run):
    data = Listed()
    model = run.freeze(Net())

    def change(epoch):
        if epoch == 2:
            data.y[:] = [(y + 1) % 3 for y in data.y]

    run.fit(model, run.loader(data), 5, each_epoch=change)


MIDWAY = {
    "list": lambda data: data.y.__setitem__(slice(None), [(y + 1) % 3 for y in data.y]),
    "one of a list": lambda data: [data.y.__setitem__(i, (data.y[i] + 1) % 3) for i in (1, 9, 17)],
    "another list": lambda data: setattr(data, "y", [(y + 1) % 3 for y in data.y]),
    "tensor": lambda data: data.x.add_(0.5),
}


@pytest.fixture
def _looked_at_with_each_batch(monkeypatch):
    monkeypatch.setattr("egeria_cache.samples.fingerprint.FREE_S", 60.0)


@pytest.mark.usefixtures("_looked_at_with_each_batch")
@pytest.mark.parametrize("kind", list(MIDWAY))
@pytest.mark.parametrize("passes", ["several", "one that is endless"])
@hostile
def test_data_that_change_in_the_middle_of_a_pass(run, kind, passes):
    data, model, step = Listed(), run.freeze(Net()), 0
    endless = RandomSampler(data, replacement=True, num_samples=160, generator=seeded(3))
    optimizer = sgd(model)
    for _ in range(1 if passes == "one that is endless" else 6):
        loader = run.loader(data, sampler=endless if passes == "one that is endless" else None)
        for batch in loader:
            step += 1
            if step == 10:
                MIDWAY[kind](data)
            run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


class CountingLoads(Dataset):
    """How often it was asked is part of what it gives."""

    def __init__(self):
        self.x, self.y, self.loads = inputs(), labels(), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.loads += 1
        return self.x[index] + 0.01 * self.loads, self.y[index]


@hostile
def test_a_data_set_that_counts_its_loads(run):
    run.fit(run.freeze(Net()), run.loader(CountingLoads()), 3)


class CountingLate(CountingLoads):
    """The same from some load on, in many ways to count."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.seen, self.times = kind, [], dict.fromkeys(range(24), 0)

    def __getitem__(self, index):
        self.loads += 1
        self.seen.append(index)
        self.times[index] += 1
        so_far = {"number": self.loads // 24, "list": len(self.seen) // 24}
        return self.x[index] * (so_far.get(self.kind, self.times[index]) < 4), self.y[index]


@pytest.mark.parametrize("kind", ["number", "list", "dictionary"])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@hostile(told="decides what a sample is")
def test_a_data_set_that_decides_by_a_count_of_its_loads(run, kind, wrap, workers):
    data = CountingLate(kind)
    data = Subset(data, range(24)) if wrap else data
    run.fit(run.freeze(Net()), run.loader(data, num_workers=workers), 6)


class CountingForNothing(CountingLoads):
    """Counts, remembers what it had last, and gives the same all the same."""

    def __init__(self):
        super().__init__()
        self.seen, self.times, self.last, self.of_last = [], {}, -1, None

    def __getitem__(self, index):
        self.loads += 1
        self.seen.append(index)
        self.times[index] = self.times.get(index, 0) + 1
        if index // 4 != self.last:
            self.last, self.of_last = index // 4, self.x[index // 4 * 4 :][:4]
        return self.of_last[index % 4], self.y[index]


@pytest.mark.parametrize("workers", [0, 1])
@hostile(served=True)
def test_a_data_set_that_counts_its_loads_and_does_nothing_with_it(run, workers):
    data = CountingForNothing()
    run.fit(run.freeze(Net()), run.loader(data, num_workers=workers), 4)


class Closing(Pairs):
    """Closes what it holds when it goes."""

    def __init__(self):
        super().__init__()
        self.open = [True]

    def __getitem__(self, index):
        assert self.open[0], "the file is closed"
        return super().__getitem__(index)

    def __del__(self):
        self.open[0] = False


@hostile(served=True)
def test_a_data_set_that_closes_its_file_when_it_goes(run):
    run.fit(run.freeze(Net()), run.loader(Closing()), 3)


# ---- idioms that raise when they are tried alone -------------------------------------------------


class Broken(Pairs):
    def __getitem__(self, index):
        return None if index % 5 == 2 else super().__getitem__(index)


def replaced(samples):
    good = [s for s in samples if s is not None]
    return default_collate([good[i % len(good)] if s is None else s for i, s in enumerate(samples)])


def dropped(samples):
    return default_collate([s for s in samples if s is not None])


@pytest.mark.parametrize("collate", [replaced, dropped])
@pytest.mark.parametrize("workers", [0, 2])
@hostile
def test_none_replaced_by_a_good_sample_of_the_batch(run, collate, workers):
    model = run.freeze(Net())
    run.fit(model, run.loader(Broken(), collate_fn=collate, num_workers=workers), 4)


def bags(samples):
    return (
        torch.cat([x.repeat(1 + int(y), 1) for x, y in samples]),
        torch.stack([y for _, y in samples]),
        [1 + int(y) for _, y in samples],
    )


@hostile
def test_bags_joined_along_the_rows(run):
    class Bags(Net):
        def forward(self, x, sizes):
            h = self.front(x)
            return self.back(torch.stack([part.mean(0) for part in h.split(sizes)]))

    model = run.freeze(Bags())
    run.fit(
        model,
        run.loader(rows(), collate_fn=bags),
        3,
        loss=lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1]),
    )


# ---- transforms of functions, tracing ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["grad", "jvp", "vmap", "trace"])
@hostile(served=True)
def test_torch_func_over_a_batch(run, kind):
    model = run.freeze(Net())
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in run.loader(rows()):
            run.step(F.cross_entropy(model(x), y), optimizer)
            if kind == "grad":
                run.see(torch.func.grad(lambda v: model(v).sum())(x))
            elif kind == "jvp":
                run.see(torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].detach())
            elif kind == "trace":
                run.see(torch.jit.trace(model, x)(x + 1))
            else:
                run.see(torch.func.vmap(lambda v: model(v[None])[0])(x))
    run.see(model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["trace", "export"])
@hostile(served=True)
def test_a_model_traced_while_it_is_attached(run, kind):
    model = run.freeze(Net())
    optimizer, loader = sgd(model), None
    loader = run.loader(rows())
    for epoch in range(4):
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y), optimizer)
        if epoch == 1:
            x = inputs()
            if kind == "trace":
                run.see(torch.jit.trace(model, x)(x))
            else:
                run.see(torch.export.export(model, (x,)).module()(x))
    run.see(model)


@hostile
def test_a_hook_within_the_front_whose_leaf_requires_grad(run):
    model = Net()
    model.early.register_forward_hook(lambda m, a, out: out.detach().requires_grad_())
    run.fit(run.freeze(model), run.loader(rows()), 3)


@hostile
def test_two_models_in_two_threads(run):
    one, other = run.freeze(Net()), ConvNet()
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.Generator().manual_seed(0)
            with torch.no_grad():
                other(torch.ones(2, 2, 8, 8))

    other.eval()
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        run.fit(one, run.loader(rows()), 3)
    finally:
        stop.set()
        thread.join()


@hostile(served=True)
def test_a_thread_that_evaluates_the_model_beside_the_training(run):
    model, stop, x = run.freeze(Net()), threading.Event(), inputs()

    def evaluate():
        while not stop.is_set():
            with torch.no_grad():
                model(x)

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        run.fit(model, run.loader(rows(), shuffle=True), 4)
    finally:
        stop.set()
        thread.join()


# ---- left uncached without need ------------------------------------------------------------------


def two_views(x):
    return torch.cat([x, x.flip(-1)])


JOINED = {
    "cat of two views": lambda m, x: sum(m(torch.cat([x, x.flip(-1)])).chunk(2)),
    "pad": lambda m, x: m(F.pad(x[:, :4], (1, 1))),
    "flipud": lambda m, x: m(torch.flipud(x)),
    "squeeze": lambda m, x: m(x[None].squeeze(0)),
    "turned twice": lambda m, x: m(x.t().t()),
    "flat and back": lambda m, x: m(x.view(-1).view(-1, 6)),
    "Variable": lambda m, x: m(torch.autograd.Variable(x)),
}


@pytest.mark.parametrize("kind", list(JOINED))
@hostile(served=True)
def test_joined_and_shaped_inputs_are_served(run, kind):
    model = run.freeze(Net())
    run.fit(
        model, run.loader(rows()), 4, loss=lambda m, b: F.cross_entropy(JOINED[kind](m, b[0]), b[1])
    )


@hostile(served=True)
def test_an_epoch_number_that_the_front_does_not_read(run):
    class Epochs(Net):
        epoch = 0

        def forward(self, x):
            return self.back(self.front(x)) * (1 + 0.1 * self.epoch)

    model = run.freeze(Epochs())
    run.fit(model, run.loader(rows()), 4, each_epoch=lambda e: setattr(model, "epoch", e))


@hostile(served=True)
def test_a_moving_target_network_beside_the_front(run):
    class Target(Net):
        def __init__(self):
            super().__init__()
            self.target = nn.Linear(8, 3)
            self.target.requires_grad_(False)

        def forward(self, x):
            h = self.front(x)
            return self.back(h) + 0.1 * self.target(h)

    model = run.freeze(Target())

    def move(step):
        with torch.no_grad():
            for a, b in zip(model.target.parameters(), model.head.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)

    run.fit(model, run.loader(rows()), 4, each_step=move)


@hostile
def test_a_boundary_moved_every_epoch(run):
    model = run.freeze(Net())
    loader, names = run.loader(rows()), ["early", "middle"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(4):
        run.move(model, names[epoch % 2])
        for batch in loader:
            run.step(cross_entropy(model, batch), optimizer)
    run.see(model)
