"""Between mechanisms: memory shared across the cut, state that no copy reaches, company."""

import os
import random
import threading
from bz2 import BZ2Compressor
from contextlib import closing, nullcontext
from tempfile import NamedTemporaryFile, mkdtemp, mkstemp, mktemp
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.hostile.harness import Run, hostile, judge, sgd
from tests.hostile.loops import ce, trained
from tests.hostile.nets import Net, layered, made, net, rows
from tests.hostile.places import COUNTERS

# ---- memory that is shared across the cut --------------------------------------------------------


class Shared(Net):
    """The boundary returns what it is given, or a view; the head begins to write late."""

    def __init__(self, middle, late, reads):
        super().__init__()
        self.middle, self.late_from, self.calls, self.reads = middle, late, 0, reads

    def forward(self, x):
        h = torch.tanh(self.early(x))
        z = self.middle(h)
        z = z[0] if isinstance(z, tuple) else z
        self.calls += self.training
        if self.calls > self.late_from:
            h.mul_(0.5)
        return self.head(torch.tanh(z.flatten(1)) + (h if self.reads else 0))


def module(forward):
    """Return a module of a class of its own."""
    return type("Own", (nn.Module,), {"forward": forward})()


BOUNDARIES = {
    "identity": lambda: module(lambda self, x: x),
    "nn.Identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.0),
    "flatten": nn.Flatten,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "views": lambda: module(lambda self, x: (x[:, :], x[:, :4])),
}


@hostile(over=BOUNDARIES)
@pytest.mark.parametrize(("late", "reads"), [(0, True), (7, True), (7, False)])
def test_a_boundary_that_returns_its_input_and_a_head_that_writes(run, make, late, reads):
    trained(run, model=Shared(make(), late, reads), epochs=4)


def by_a_flag(m, x):
    h = torch.tanh(m.early(x))
    keep = (z := m.middle(h)).view(-1, 2, 4)
    if m.late_now:
        keep[:, 0] += 1
    return m.head(torch.tanh(z)) + m.head(torch.tanh(h))


def kept(m, value):
    m.kept += [value] * m.late_now
    return sum(m.kept)


def counted(m, x):
    """What a hit needs late, it gets: nothing is counted, drawn or averaged twice."""
    out = m.norm(m.back(m.middle(h := m.early(x))))
    m.kept.append(random.random())
    if m.late_now:
        out = out + h.add_(1.0)[:, :3] + float(f"{h.mean():.4f}") + len(repr(h)) + h.numpy().max()
    return out * (1 + m.kept[-1] + len(m.kept) / 9)


class Scaled(torch.autograd.Function):
    """Reads in backward alone what it is given."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(scale)
        return value * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].mean(), None


def doubled(m, x):
    h = torch.func.functional_call(m.early, {"weight": 2 * m.early.weight}, x)
    return m.back(m.middle(h)) + (h[:, :3] if m.late_now else 0)


FORWARDS = {
    "weights of one call": doubled,
    "counted": counted,
    "a view": by_a_flag,
    "the input, in backward": lambda m, x: Scaled.apply(m.back(m.front(x)), x),
    "kept": lambda m, x: m.back(m.middle(h := m.early(x))) + x.mul_(2)[:, :3] + kept(m, h.mean()),
    "the input, late": lambda m, x: m.back(m.front(x)) * (x[:, :1] if m.late_now else 1),
}


@hostile(over=FORWARDS)
def test_a_head_that_writes_to_the_front_s_output_late(run, write):
    model = net(forward=write, late_now=False, kept=[], norm=nn.BatchNorm1d(3))
    trained(run, model=model, epochs=4, each_epoch=lambda m, e: setattr(m, "late_now", e == 2))


BOXES = {
    "an object": (lambda h: SimpleNamespace(h=h), lambda box: box.h),
    "a function": (lambda h: lambda: h, lambda box: box()),
    "an attribute": (lambda h: setattr(h, "own", -h) or h, lambda box: getattr(box, "own", box)),
}


@hostile(over=BOXES, cases=6)
@pytest.mark.parametrize(("inside", "keeps"), [(True, False), (False, False), (True, True)])
def test_an_object_of_the_front_is_read_late(run, make, get, inside, keeps):
    """PyTorch knows no parts of it; it is made in a layer, or between two."""

    def forward(m, x):
        out = m.norm(m.back(m.middle(box := m.early(x) if inside else make(m.early(x)))))
        m.kept += [box] * (m.late_now and keeps)
        return out + get(box).mean() if m.late_now and not keeps else out

    early = layered(lambda m, h: make(h) if inside else h).early
    middle = type("", (nn.Linear,), {"forward": lambda m, x: nn.Linear.forward(m, get(x))})(8, 8)
    own = {"early": early, "middle": middle, "norm": nn.BatchNorm1d(3), "kept": []}
    model = net(forward=forward, late_now=False, **own)
    trained(run, model=model, epochs=4, each_epoch=lambda m, e: setattr(m, "late_now", e == 2))
    run.see(sum(float(get(box).sum()) for box in model.kept))


def writing(model, x, also=0.0):
    """Write to what it was given, late."""
    h = model.front(x)
    if model.writes:
        x[:, 1:].mul_(0.5)
    return model.back(h) + also


def with_a_view(samples):
    x, y = default_collate(samples)
    return x, x[:, 1:4], y


WRITERS = {
    "seen by the loop": (default_collate, lambda m, b: m(b[0]) + b[0][:, 1:4]),
    "seen in a view": (default_collate, lambda m, b: m(b[0], b[0][:, 1:4])),
    "seen in another leaf": (with_a_view, lambda m, b: m(b[0], b[1])),
}


@hostile(over=WRITERS)
def test_a_model_that_writes_to_its_input_late(run, collate, call):
    trained(
        run, lambda m, b: F.cross_entropy(call(m, b), b[-1]), epochs=5, collate_fn=collate,
        model=net(forward=writing, writes=False),
        each_epoch=lambda m, e: setattr(m, "writes", e > 2),
    )  # fmt: skip


@hostile(served=True)
def test_leaves_of_one_memory_are_written_by_the_loop(run):
    def loss(m, b):
        out = m(b[0])
        b[0].mul_(1.5)
        return F.cross_entropy(out + b[1], b[2])

    trained(run, loss, collate_fn=with_a_view, epochs=4)


# ---- company -------------------------------------------------------------------------------------


def by_difficulty(samples):
    return default_collate(sorted(samples, key=lambda s: float(s[0].sum())))


def relabelled(samples):
    x, y = default_collate(samples)
    return x, torch.unique(y, return_inverse=True)[1]


def centred_if(limit):
    def collate(samples):
        x, y = default_collate(samples)
        return (x - x.mean(0) if float(x.max()) > limit else x), y

    return collate


LOOKING = {"sorted": by_difficulty, "relabelled": relabelled, "centred": centred_if(2.2)}


@hostile(over=LOOKING, cases=1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_collate_function_that_looks_at_company(run, collate, shuffle):
    trained(run, data=rows(96), collate_fn=collate, shuffle=shuffle, epochs=4)


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
        trained(run, lambda m, b: ce(m, b[0], b[1]), data=rows(96), collate_fn=collate)

    trace = Run("always", tmp_path / "cache").run(script)
    told = [word for _, word in trace.words if "from its company" in word]
    assert trace.last_hits
    assert len(told) == (leaf is not None)
    assert all(repr(leaf) in word and "behind the loader" in word for word in told)


def relabelled_if_large(samples):
    x, y = default_collate(samples)
    return x, (y + 1) % 3 if float(x.max()) > 3.0 else y


@hostile(over={"centred": centred_if(3.0), "relabelled": relabelled_if_large})
@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_looks_at_company_in_a_late_batch_alone(run, collate, workers):
    data = rows(96)
    data.tensors[0].clamp_(-2, 2)[20, 1] = 3.5
    trained(run, data=data, collate_fn=collate, num_workers=workers, epochs=5)


def dimmed_if_large_and_first(samples):
    x, y = default_collate(samples)
    x[0] *= 0.1 if float(x[0].max()) > 3.0 else 1.0
    return x, y


class Turned:
    """Begins each pass at another sample."""

    def __init__(self, *starts):
        self.starts = iter(starts)

    def __len__(self):
        return 96

    def __iter__(self):
        start = next(self.starts)
        return iter([*range(start, 96), *range(start)])


@pytest.mark.parametrize("workers", [0, 2])
@hostile(told="is not what it is alone")
def test_a_collate_function_that_changes_a_sample_where_it_stands_first(run, workers):
    """As it does alone: only in another company is it what it would be in later passes."""
    data = rows(96)
    data.tensors[0].clamp_(-2, 2)[24, 1] = 3.5
    trained(
        run, data=data, collate_fn=dimmed_if_large_and_first, sampler=Turned(0, 22, 5, 6, 2),
        num_workers=workers, epochs=5, each_epoch=lambda _, e: run.turn() if e == 1 else None,
    )  # fmt: skip


@hostile(served=True)
def test_samples_are_compared_under_a_collate_function_that_uses_its_memory_again(run):
    memory = torch.zeros(8, 6)

    def collate(samples):
        x, y = default_collate(samples)
        return memory[: len(x)].copy_(x), y

    trained(run, collate_fn=collate, epochs=4)


# ---- state that no copy reaches ------------------------------------------------------------------

COPIED = ("ctypes", "an array of Python's", "a thread's own", "a semaphore")
NOT_COPIED = ("shared memory", "a text", "a database", "a function", "a context", "a file")
IN_C = {
    "a semaphore": (lambda: threading.Semaphore(0), lambda at: at.release() or at._value),
    "a compressor": (lambda: (BZ2Compressor(), 0), lambda at: len(at[0].compress(bytes(99)))),
    "an iterator of an array": (lambda: np.arange(99.0).flat, next),
    "a generator": (lambda: (n for n in range(99)), next),
    "a folder": (mkdtemp, lambda at: mkdtemp(dir=at) and len(os.listdir(at))),
    "saving": (mkdtemp, lambda at: torch.save({}, mktemp(dir=at)) or len(os.listdir(at))),
    "a number": (lambda: mkstemp()[0], lambda at: os.write(at, b"x") and os.fstat(at).st_size),
    "a library's file": (NamedTemporaryFile, lambda at: at.write(b"x") and at.tell()),
}


@pytest.mark.parametrize("kind", [*COPIED, *NOT_COPIED, *[*IN_C][1:]])
@pytest.mark.parametrize("place", ["attribute", "global"])
@pytest.mark.parametrize("boundary", ["middle", "auto"])
def test_a_head_that_counts_in_an_object_made_in_c(kind, place, boundary):
    """What a dry run cannot copy it does not use: the first loss is the plain one's."""

    def script(run):
        make, tick = (COUNTERS | IN_C)[kind]
        counter = make()
        outside = counter if place == "global" else None

        def forward(self, x):
            h = self.front(x)
            own = self.counter if outside is None else outside
            return self.back(h) * (1 + 0.05 * tick(own))

        model = net(forward=forward, counter=counter if outside is None else None)
        where = "middle" if run.is_plain else boundary
        with closing(counter) if hasattr(counter, "close") else nullcontext():
            run.fit(run.freeze(model, where, ("early", "middle")), run.loader(rows()), 3)
            run.see(float(tick(counter)))

    judge(script, served=kind in COPIED and place == "attribute")


# ---- what trains, read without a gradient --------------------------------------------------------

READS = {
    "detach": lambda x, a: x.clamp(max=a.detach()),
    "item": lambda x, a: x.clamp(max=a.item()),
    "data": lambda x, a: torch.minimum(x, a.data),
    "numpy": lambda x, a: x.clamp(max=float(a.detach().numpy())),
    "sign": lambda x, a: x * torch.sign(a),
    "round": lambda x, a: x * torch.round(a),
    "bool": lambda x, a: x if a > 2.5 else 0 * x,
    "what is made of it": lambda x, a: x * round(a.sigmoid().item() * 9),
    "writes": lambda x, a: x * (1 if a._version < 9 else 0.5),
    "list": lambda x, a: x * (1 if a.tolist() > 2.5 else 0.5),
}


@hostile(over=READS)
def test_a_trained_number_that_is_read_before_the_boundary_without_a_gradient(run, read):
    def forward(model, x):
        h = model.middle(read(torch.tanh(model.early(x)), model.alpha))
        return model.back(h) * model.alpha

    trained(
        run, model=net(forward=forward, alpha=nn.Parameter(torch.tensor(3.0))), epochs=5,
        optimizer=lambda m: torch.optim.SGD(
            [*m.late.parameters(), *m.head.parameters(), m.alpha], 0.8
        ),
    )  # fmt: skip


REGISTERED = []


class Registering(type):
    def __init__(cls, *args):
        REGISTERED.append(cls)


class Registered(Net, metaclass=Registering):
    def __init_subclass__(cls):
        REGISTERED.append(cls)


@hostile(served=True)
def test_no_class_of_ours_is_registered_among_the_users(run):
    trained(run, model=Registered())
    run.see(len(REGISTERED))


# ---- what stands behind the boundary, and is read before it --------------------------------------

KNOWN = {}
BEHIND = {
    "by a global": (lambda m: KNOWN["model"].scale, lambda m: setattr(m, "scale", 2.0)),
    "a number": (lambda m: m.head.scale, lambda m: setattr(m.head, "scale", 2.0)),
    "a table": (lambda m: m.late.table["scale"], lambda m: m.late.table.update(scale=2.0)),
    "a mode": (lambda m: 1 + m.late.training, lambda m: m.late.eval()),
    "a layer in a list": (lambda m: m.kept[0].weight, lambda m: m.kept[0].weight.mul_(2)),
    "a rate": (
        lambda m: 1 + m.kept[1].param_groups[0]["lr"],
        lambda m: m.kept[1].param_groups[0].update(lr=0.1),
    ),
    "a name": (lambda m: 1 + hasattr(m, "b"), lambda m: setattr(m, "b", m.__dict__.pop("a"))),
}


@hostile(over=BEHIND)
def test_what_is_read_of_modules_behind_the_boundary(run, read, change):
    KNOWN["model"] = model = net(front=lambda m, x: Net.front(m, x * read(m)), a=None, scale=1.0)
    model.head.scale, model.late.table = 1.0, {"scale": 1.0}
    model.kept = [nn.Linear(1, 1).requires_grad_(False)]

    def own(model):
        model.kept.append(sgd(model))
        return model.kept[1]

    trained(run, model=model, epochs=5, optimizer=own, each_step=lambda m, i: i == 7 and change(m))


# ---- idioms that raise when they are tried alone -------------------------------------------------


def replaced(samples):
    good = [s for s in samples if s is not None]
    return default_collate([good[i % len(good)] if s is None else s for i, s in enumerate(samples)])


def dropped(samples):
    return default_collate([s for s in samples if s is not None])


@hostile(over={"replaced": replaced, "dropped": dropped})
@pytest.mark.parametrize("workers", [0, 2])
def test_none_replaced_by_a_good_sample_of_the_batch(run, collate, workers):
    data = made(lambda data, i: None if i % 5 == 2 else (data.x[i], data.y[i]))
    trained(run, data=data, collate_fn=collate, num_workers=workers, epochs=4)


# ---- left uncached without need ------------------------------------------------------------------


def gradient_of(model, x):
    return torch.autograd.grad(((own := x.detach().requires_grad_()) ** 2).sum(), own)[0][:1]


JOINED = {
    "cat of two views": lambda m, x: sum(m(torch.cat([x, x.flip(-1)])).chunk(2)),
    "cat and arithmetic": lambda m, x: sum(m((torch.cat([x, 2 * x, -x]) - 1) / 2).chunk(3)),
    "views of a sample": lambda m, x: m(torch.stack([x, x.flip(-1)], 1).view(-1, 6))[::2],
    "pad": lambda m, x: m(F.pad(x[:, :4], (1, 1))),
    "flipud": lambda m, x: m(torch.flipud(x)),
    "a mask": lambda m, x: m(x[x[:, 0] > -9]),
    "squeeze": lambda m, x: m(x[None].squeeze(0)),
    "each twice": lambda m, x: m(x.repeat_interleave(2, 0))[::2],
    "no gradient": lambda m, x: m(x.requires_grad_(False)),
    "pooled": lambda m, x: m(F.interpolate(F.avg_pool1d(x[:, None], 2), size=6)[:, 0]),
    "gradient by itself": lambda m, x: m(x + 0 * gradient_of(m, x)),
    "Variable": lambda m, x: m(torch.autograd.Variable(x)),
}


@hostile(over=JOINED, served=True)
def test_joined_and_shaped_inputs_are_served(run, call):
    trained(run, lambda m, b: F.cross_entropy(call(m, b[0]), b[1]), epochs=4)
