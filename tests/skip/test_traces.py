"""The first call of a model is tried out: its state afterwards is that after one plain call."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import queue
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.skip_harness import Harness, freeze

X = torch.randn(12, 4, 6, generator=torch.Generator().manual_seed(1))
GLOBAL: list = []
TALLY = {"calls": 0}
COUNT = 0
BOX = types.SimpleNamespace(seen=[], total=0.0, bank=torch.zeros(3))
ARRAY = np.zeros(4)


def helper(x):
    BOX.seen.append(float(x.detach().sum()))
    BOX.total += 1.5
    BOX.bank.add_(1)
    return x


class Base(nn.Module):
    """early -> middle (the boundary) -> head."""

    num_calls = 0

    def __init__(self):
        super().__init__()
        self.early = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def before(self, x):
        return x

    def after(self, h):
        return h

    def forward(self, x):
        return self.head(self.after(self.middle(torch.tanh(self.early(self.before(x))))).mean(1))

    def traces(self):
        return {k: v for k, v in vars(self).items() if k not in ("_modules", "_parameters")}


class NormalisesInPlace(Base):
    def before(self, x):
        return x.sub_(x.mean((1, 2), keepdim=True)).div_(2.0)


class PrivateGenerators(Base):
    def __init__(self):
        super().__init__()
        self.torch = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(4)
        self.old = np.random.RandomState(5)
        self.python = random.Random(6)
        self.draw = self.python.random

    def after(self, h):
        noise = torch.randn(h.shape, generator=self.torch) * self.numpy.random()
        return h + noise * self.old.rand() * self.python.random() * self.draw()

    def traces(self):
        return [self.torch.get_state(), self.numpy.bit_generator.state, self.old.get_state(),
                self.python.getstate()]  # fmt: skip


class Queues(Base):
    def __init__(self):
        super().__init__()
        self.ring = collections.deque(maxlen=3)
        self.waiting = queue.Queue()
        self.log = []
        self.nested = {"a": [{"b": set()}], "n": collections.Counter()}
        self.by_kind = collections.defaultdict(list)
        self.numbers = itertools.count(3)

    def after(self, h):
        self.ring.append(h.detach().mean())
        self.waiting.put(len(h))
        self.log.append(h.detach().clone())
        self.nested["a"][0]["b"].add(next(self.numbers))
        self.nested["n"]["calls"] += 1
        self.by_kind[h.dtype].append(1)
        return h

    def traces(self):
        return [list(self.ring), self.waiting.qsize(), self.log, self.nested, dict(self.by_kind),
                repr(self.numbers)]  # fmt: skip


class Banks(Base):
    """A memory of features: a plain tensor, a view of it, a buffer, and an array."""

    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(8, 6)
        self.last = self.bank[-1]
        self.array = np.zeros((8, 6), np.float32)
        self.window = self.array[2:4]
        self.register_buffer("queue", torch.zeros(6))
        self.pointer = 0

    def after(self, h):
        row = h.detach().mean((0, 1))
        self.bank[self.pointer] = row
        self.last += 1
        self.window += row.numpy()
        self.queue.mul_(0.9).add_(row)
        self.pointer = (self.pointer + 1) % 8
        return h + self.last.mean() + float(self.array.sum())


class Counters(Base):
    def after(self, h):
        self.num_calls += 1
        type(self).total = getattr(type(self), "total", 0) + 1
        Counters.history.append(self.num_calls)
        return h / self.num_calls

    history: list = []  # noqa: RUF012
    total = 0

    def traces(self):
        return [self.num_calls, Counters.total, list(Counters.history)]


class Globals(Base):
    def after(self, h):
        global COUNT
        COUNT += 1
        TALLY["calls"] += 1
        GLOBAL.append(h.detach().clone())
        ARRAY[0] += 2
        return helper(h)

    def traces(self):
        return [COUNT, dict(TALLY), list(GLOBAL), ARRAY.copy(), copy.deepcopy(vars(BOX))]


class Tracker:
    """Slots, a reference back to the model, and a constructor that acts."""

    __slots__ = ("model", "seen")
    num_made = 0

    def __init__(self, model):
        type(self).num_made += 1
        self.model, self.seen = model, []


class Slots(Base):
    def __init__(self):
        super().__init__()
        self.tracker = Tracker(self)

    def after(self, h):
        self.tracker.seen.append(h.shape)
        self.tracker.model.flag = len(self.tracker.seen)
        return h

    def traces(self):
        return [list(self.tracker.seen), self.flag, Tracker.num_made]


class Hooked(Base):
    """Hooks of every kind that append to the user's lists."""

    def __init__(self):
        super().__init__()
        self.feats = feats = []
        self.count = collections.Counter()
        self.head.register_forward_hook(lambda m, args, out: feats.append(out.detach().clone()))
        self.head.register_forward_pre_hook(functools.partial(_note, self.count))
        self.head.register_forward_hook(self.remember)
        self.seen = []

    def remember(self, module, args, out):
        self.seen.append(module is self.head)

    def traces(self):
        return [list(self.feats), dict(self.count), list(self.seen)]


def _note(count, module, args):
    count[type(module).__name__] += 1


class Mutable(Base):
    """Default arguments and the cells of a decorator are state as well."""

    def after(self, h, memo={}):  # noqa: B006
        memo["n"] = memo.get("n", 0) + 1
        return _counted(h)

    def traces(self):
        return [dict(Mutable.after.__defaults__[0]), _counted.calls()]


def _decorated(function):
    calls = [0]

    def wrapper(*args):
        calls[0] += 1
        return function(*args)

    wrapper.calls = lambda: calls[0]
    wrapper.reset = lambda: calls.__setitem__(0, 0)
    return wrapper


@_decorated
def _counted(h):
    return h


class Memo(Base):
    """Settles after the first call."""

    mask = None

    def after(self, h):
        if self.mask is None:
            self.mask = torch.ones(h.shape[1:])
        return h * self.mask


class RandomInGlue(Base):
    """Draws from every global generator, after the boundary."""

    def after(self, h):
        return h * random.random() * float(np.random.rand()) + torch.rand(1)

    def traces(self):
        return [torch.get_rng_state(), random.getstate(), np.random.get_state()]


def reset():
    global COUNT
    COUNT = 0
    GLOBAL.clear()
    TALLY.update(calls=0)
    ARRAY[:] = 0
    BOX.__dict__.update(seen=[], total=0.0, bank=torch.zeros(3))
    Counters.total, Counters.history = 0, []
    Tracker.num_made = 0
    Mutable.after.__defaults__[0].clear()
    _counted.reset()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def after_one_call(cls, boundary):
    """Return (output, the batch's content, what the model and its surroundings remember)."""
    reset()
    model = cls()
    freeze(model, "early", "middle")
    data = X.clone()
    harness = Harness(model, {"x": data})
    if boundary is not None:
        harness.engine.set_boundary(boundary)
    x = harness.batch(range(8))["x"]
    torch.manual_seed(1)
    out = model(x)
    return out, torch.Tensor(x.detach().clone()), model.traces(), harness


def assert_equal(a, b, where="state"):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b), (where, a, b)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    elif isinstance(a, int | float | str | set | bool | None):
        assert a == b, (where, a, b)


CASES = [NormalisesInPlace, PrivateGenerators, Queues, Banks, Counters, Globals, Slots, Hooked,
         Mutable, Memo, RandomInGlue]  # fmt: skip


@pytest.mark.parametrize("side", ["before the boundary", "after it"])
@pytest.mark.parametrize("cls", CASES)
def test_the_state_after_a_proved_call_is_that_after_a_plain_one(cls, side):
    if side == "before the boundary":
        cls = type(cls.__name__, (cls,), {"before": cls.after, "after": cls.before})
    out, x, traces, harness = after_one_call(cls, "middle")
    plain_out, plain_x, plain_traces, _ = after_one_call(cls, None)
    assert harness.engine._plans._num_dry_runs == 1
    assert torch.equal(out, plain_out)
    assert torch.equal(x, plain_x)
    assert_equal(traces, plain_traces)


@pytest.mark.parametrize("cls", [Queues, Banks, Slots, Memo, RandomInGlue])
def test_what_happens_after_the_boundary_does_not_keep_it_from_being_cut(cls):
    *_, harness = after_one_call(cls, "middle")
    assert harness.host.refusals == []
    assert harness.engine.cut is not None


def test_global_hooks_fire_once_for_the_user():
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(type(m)))
    try:
        after_one_call(Base, "middle")
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.Linear, nn.Linear, Base]


def test_a_generator_of_pythons_own_is_not_used_up():
    class Drawing(Base):
        def __init__(self):
            super().__init__()
            self.scales = (float(n) for n in range(100))

        def after(self, h):
            return h + next(self.scales)

    *_, harness = after_one_call(Drawing, "middle")
    assert next(harness.model.scales) == 1.0
    assert "cannot be copied" in str(harness.host.refusals[0])


def test_a_model_that_refers_to_itself_by_a_global_is_put_back():
    model = Looping()
    freeze(model, "early", "middle")
    harness = Harness(model, {"x": X})
    harness.engine.set_boundary("middle")
    LOOP["model"] = model
    model(harness.batch(range(8))["x"])
    LOOP.clear()
    assert model.steps == 1


LOOP: dict = {}


class Looping(Base):
    steps = 0

    def after(self, h):
        LOOP["model"].steps += 1
        return h
