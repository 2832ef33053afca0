"""The dry run runs the model several times more than the user did: it must leave no trace."""

import collections
import contextlib
import copy
import ctypes
import functools
import io
import itertools
import logging
import queue
import random
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import cross_entropy, hostile, judge
from tests.hostile.loops import trained
from tests.hostile.nets import ConvNet, Net, images, layered, net


def looked_at(run, model, look, **kwargs):
    """Train, and look at something after every step."""

    def loss(model, batch):
        value = cross_entropy(model, batch)
        run.see(look(model))
        return value

    run.see(look(trained(run, loss, model=model, **kwargs)))


def headed(act, **state):
    """Return a net whose head does something besides."""
    return net(back=lambda m, h: Net.back(m, act(m, h)), **state)


def with_average(forward=None):
    """A second head that follows the first one; nobody trains it."""
    model = net(back=following) if forward is None else net(forward=forward)
    model.second = copy.deepcopy(model.head).requires_grad_(False)
    return model


def follow(model):
    for average, parameter in zip(model.second.parameters(), model.head.parameters(), strict=True):
        average.data = average.data * 0.9 + parameter.data * 0.1
    with torch.no_grad():
        model.second.weight.mul_(0.99).add_(model.head.weight, alpha=0.01)


def following(model, h):
    follow(model)
    return Net.back(model, h) + 0.1 * model.second(h).detach()


def following_first(model, x):
    follow(model)
    return model.back(model.front(x))


def penalising(model, h):
    if model.training:
        (0.05 * model.head.weight.square().sum()).backward()
    return h


def shrinking(layer, h):
    layer.weight.data.mul_(0.999)
    return h


class Probing(Net):
    """Trains a layer beside the head within its forward."""

    def __init__(self):
        super().__init__()
        self.beside = nn.Linear(8, 8)
        self.kept = [torch.optim.Adam(self.beside.parameters(), lr=0.1)]

    def back(self, h):
        self.kept[0].zero_grad()
        self.beside(h.detach()).square().mean().backward()
        self.kept[0].step()
        return super().back(h)


def averaging_in_a_closure():
    averages = torch.zeros(8)

    def act(model, h):
        averages.lerp_(h.detach().mean(0), 0.1)
        return h - averages.clone()

    return headed(act)


HEADS = {
    "a tensor in a closure": averaging_in_a_closure, "an average of weights": with_average,
    "gradients": lambda: headed(penalising),
}  # fmt: skip


@hostile(over=HEADS, cases=4, served=True)
def test_what_a_head_remembers_moves_once_a_step(run, make):
    trained(run, model=make())


TALLY = {"calls": 0, "at": 0.0, "seen": []}


def turning(model, x):
    TALLY["calls"] += 1
    return Net.front(model, x.flip(1) if TALLY["calls"] % 5 == 4 else x)


def tallying(layer, h):
    TALLY["calls"] += 1
    return h


def timing(model, x):
    return TALLY.update(at=time.time()) or Net.front(model, x)


def noting(layer, h):
    TALLY["seen"].append(len(h))
    return h


MOVING = {
    "an average before the front": (lambda: with_average(following_first), "the parameter 'second"),
    "what the front reads": (
        lambda: headed(lambda m, h: shrinking(m.early, h)), "writes to the parameter 'early.weight'"
    ),
    "what the front writes": (lambda: layered(shrinking), "writes to the parameter 'early.weight'"),
    "what the front writes for a sample alone": (
        lambda: layered(lambda layer, h: shrinking(layer, h) if len(h) == 1 else h),
        "writes to the parameter 'early.weight'",
    ),
    "an optimizer": (Probing, "steps an optimizer (Adam)"),
    "a count that decides later": (lambda: net(front=turning), "with every call, and decides"),
    "a number that it leaves": (
        lambda: layered(lambda m, h: setattr(m, "last", float(h.mean())) or h), "'early.last' is"
    ),
    "a count outside": (lambda: layered(tallying), "'calls' moves with every call"),
    "the time": (lambda: net(front=timing), "'at' moves with every call"),
    "a list that the head fills, too": (
        lambda: headed(noting, early=layered(noting).early), "a list outside of the model moves"
    ),
}  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", MOVING)
def test_weights_that_a_front_moves_are_refused_by_name(kind):
    make, why = MOVING[kind]

    def script(run):
        TALLY.update(calls=0, seen=[])
        left = getattr(trained(run, model=make()).early, "last", 0.0)
        run.see((left, len(TALLY["seen"])))

    judge(script, told=why)


def idle(model, x):
    torch.rand(3)
    np.random.rand(2)
    random.random()
    return Net.front(model, x)


@functools.cache
def positions(n):
    return torch.arange(n)[:, None] * 0.0 + 1.0


def speaking(model, x):
    print("called")
    print("called", file=sys.stderr)
    warnings.warn("called", stacklevel=1)
    logging.getLogger("mine").warning("called")
    return model.back(model.front(x))


@hostile(served=True)
def test_what_a_forward_says_is_said_once_a_step(run):
    out, err, records = io.StringIO(), io.StringIO(), []
    logger, handler = logging.getLogger("mine"), logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        trained(run, model=net(forward=speaking), epochs=4)
    logger.removeHandler(handler)
    said = [out.getvalue(), err.getvalue(), *(record.getMessage() for record in records)]
    run.see("".join(said).count("called"))
    run.see(sum(str(one.message) == "called" for one in warned))


FRONTS = {
    "draws to no effect": lambda: net(front=idle),
    "asks a function that remembers": lambda: net(
        front=lambda m, x: Net.front(m, x * positions(len(x)))
    ),
    "writes to its input": lambda: net(front=lambda m, x: Net.front(m, x.sub_(1.0).mul_(0.5))),
}  # fmt: skip


@hostile(over=FRONTS, cases=3, served=True)
def test_what_a_front_does_besides_it_does_once_a_step(run, make):
    def loss(model, batch):
        value = cross_entropy(model, batch)
        run.see(batch[0].sum())
        run.see(torch.rand(()))
        run.see(str(getattr(model, "kept", "")))
        return value * (1 + sum(getattr(model, "kept", ())) / 30)

    trained(run, loss, model=make(), epochs=4)


def into_a_list(model, x, y, out):
    h = model.front(x)
    logits = model.back(h)
    out += [h.detach().sum(), logits.detach().sum()]
    return logits


def into_a_dict(model, x, y, out):
    out["calls"] = out.get("calls", 0) + 1
    out["feature"] = model.front(x)
    return model.back(out["feature"])


@hostile(over={"a list": (into_a_list, list), "a dict": (into_a_dict, dict)})
def test_what_is_given_to_the_model_is_filled_once(run, forward, kind):
    def loss(model, batch):
        filled = kind()
        value = F.cross_entropy(model(*batch, filled), batch[1])
        run.see(len(filled))
        for found in filled.values() if kind is dict else filled:
            run.see(found)
        return value

    trained(run, loss, model=net(forward=forward))


LEFT = {
    "modes": lambda m: ([module.training for module in m.modules()], torch.is_grad_enabled()),
    "gradients": lambda m: [name for name, p in m.named_parameters() if p.grad is not None],
    "attributes": lambda m: (sorted(m.head.__dict__), sorted(m.classify.__dict__)),
}


@hostile(over=LEFT, served=True)
def test_nothing_is_left_behind(run, look):
    looked_at(run, ConvNet(), look, boundary="body", data=images())


# ---- state of every kind, behind the boundary and before it --------------------------------------


class Seeded(random.Random):
    def __init__(self, path, seed):
        self.seed(seed)


def generators(m):
    own = Seeded("path", 6)
    m.torch, m.numpy = torch.Generator().manual_seed(3), np.random.default_rng(4)
    m.old, m.python, m.draw = np.random.RandomState(5), own, own.random

    def act(m, h):
        noise = torch.randn(h.shape, generator=m.torch) * m.numpy.random()
        return h + noise * m.old.rand() * m.python.random() * m.draw()

    return act, lambda m: [
        m.torch.get_state(), str(m.numpy.bit_generator.state), str(m.old.get_state()),
        str(m.python.getstate()),
    ]  # fmt: skip


def queues(m):
    m.ring, m.waiting, m.log = collections.deque(maxlen=3), queue.Queue(), [ctypes.c_char_p(b"C")]
    m.nested = {"a": [{"b": set()}], "n": collections.Counter()}
    m.by_kind, m.numbers = collections.defaultdict(list), itertools.count(3)

    def act(m, h):
        m.ring.append(h.detach().mean())
        m.waiting.put(len(h))
        m.log.append(h.detach().clone())
        m.nested["a"][0]["b"].add(next(m.numbers))
        m.nested["n"]["calls"] += 1
        m.by_kind[h.dtype].append(1)
        return h

    return act, lambda m: [
        *m.ring, m.waiting.qsize(), torch.cat(m.log[1:]), str(m.nested), str(dict(m.by_kind)),
        repr(m.numbers),
    ]  # fmt: skip


def banks(m):
    """A memory of features: a plain tensor, a view of it, a buffer, and an array."""
    m.bank, m.array, m.pointer = torch.zeros(8, 6), np.zeros((8, 6), np.float32), 0
    m.last, m.window = m.bank[-1], m.array[2:4]
    m.register_buffer("queue", torch.zeros(6))

    def act(m, h):
        row = h.detach()[:, :6].mean(0)
        m.bank[m.pointer] = row
        m.last += 1
        m.window += row.numpy()
        m.queue.mul_(0.9).add_(row)
        m.pointer = (m.pointer + 1) % 8
        return h + 0.01 * (m.last.mean() + float(m.array.sum()))

    return act, lambda m: [m.bank, m.last, m.array, m.window, m.queue, m.pointer]


def of_the_class(m):
    m.calls, type(m).total, type(m).history = 0, 0, []

    def act(m, h):
        m.calls += 1
        type(m).total += 1
        type(m).history.append(m.calls)
        return h / m.calls

    return act, lambda m: [m.calls, type(m).total, str(type(m).history)]


def helped(x):
    BOX.seen.append(x.detach().sum())
    BOX.total += 1.5
    BOX.bank.add_(1)
    return x


def in_globals(m):
    ARRAY[:] = 0
    TALLY["calls"] = 0
    BOX.__dict__.update(seen=[], total=0.0, bank=torch.zeros(3))

    def act(m, h):
        TALLY["calls"] += 1
        ARRAY[0] += 2
        return helped(h)

    return act, lambda m: [TALLY["calls"], ARRAY, *BOX.seen, BOX.total, BOX.bank]


ARRAY, BOX = np.zeros(4), types.SimpleNamespace()


def noted(count, module, args):
    count[type(module).__name__] += 1


def hooks(m):
    m.feats, m.count, m.seen = (feats := []), collections.Counter(), []
    m.head.register_forward_hook(lambda m, args, out: feats.append(out.detach().clone()))
    m.head.register_forward_pre_hook(functools.partial(noted, m.count))
    type(m).remember = lambda self, module, args, out: self.seen.append(module is self.head)
    m.head.register_forward_hook(m.remember)
    return lambda m, h: h, lambda m: [*m.feats, str(m.count), str(m.seen)]


def defaults_and_cells(m):
    calls, box = [0], types.ModuleType("box")
    box.n = 0

    def counted(h, memo={}):  # noqa: B006
        calls[0] += 1
        box.n += 1
        memo["n"] = memo.get("n", 0) + 1
        return h

    return lambda m, h: counted(h), lambda m: [*calls, box.n, *counted.__defaults__[0].values()]


def drawing(m):
    """Draws from every global generator."""
    act = lambda m, h: h * (random.random() + float(np.random.rand())) + torch.rand(1)  # noqa: E731
    return act, lambda m: [torch.get_rng_state(), str(random.getstate())]


def with_state(make, name):
    """Return a model whose head, or front, has a state, and what looks at it."""
    model = net()
    (act, look), plain = make(model), getattr(Net, name)
    setattr(type(model), name, lambda m, x: plain(m, act(m, x)))
    return model, look


def seen(run, make, name):
    model, look = with_state(make, name)

    def loss(model, batch):
        value = cross_entropy(model, batch)
        for one in look(model):
            run.see(one)
        return value

    trained(run, loss, model=model, epochs=4)


STATES = (generators, queues, banks, of_the_class, in_globals, hooks, defaults_and_cells, drawing)
STATES = {make.__name__: make for make in STATES}


@hostile(over=STATES, cases=4, served=True)
def test_state_that_a_head_moves_is_that_after_plain_calls(run, make):
    seen(run, make, "back")


@hostile(over=STATES, cases=4)
def test_state_that_a_front_moves_is_that_after_plain_calls(run, make):
    seen(run, make, "front")


BOXES = {
    "a namespace": types.SimpleNamespace,
    "a text": type("Text", (str,), {}),
    "records": lambda: np.zeros((), [("gain", float), ("calls", int)]).view(np.recarray),
    "an array": lambda: np.zeros(2).view(type("Array", (np.ndarray,), {})),
}


@hostile(over=BOXES)
def test_an_object_that_the_front_reads_and_the_head_moves_is_that_after_plain_calls(run, make):
    def back(model, h):
        model.box.calls += 1
        return Net.back(model, h)

    front = lambda model, x: Net.front(model, x) * float(model.box.gain)  # noqa: E731
    model = net(front=front, back=back, box=make())
    model.box.gain, model.box.calls = 1.0, 0
    looked_at(run, model, lambda model: int(model.box.calls))


@hostile
def test_global_hooks_fire_once_for_each_call(run):
    seen, register = [], nn.modules.module.register_module_forward_hook
    handle = register(lambda m, args, out: seen.append(type(m).__name__))
    try:
        looked_at(run, Net(), lambda model: str(seen))
    finally:
        handle.remove()
