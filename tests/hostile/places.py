"""Places where a number can lie, and ways to write a tensor: what tries change or count in.

A place is `(make, read, write)`: what holds a number k, the number in it, and what writes another
one. Without a `write` another one is put in its place.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import dataclasses
import io
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import types
from collections import deque
from itertools import count

import numpy as np
import torch


@dataclasses.dataclass
class Config:
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float


class Single:
    """There is one of it."""

    only = None

    def __new__(cls):
        if cls.only is None:
            cls.only = super().__new__(cls)
        return cls.only


class Words(dict):
    """A table whose keys are attributes, as people write it: what is not there is a `KeyError`."""

    __getattr__ = dict.__getitem__


class Proxy(Words):
    """A table that passes for something else."""

    __class__ = property(lambda _: Single)


class Local(threading.local):
    scale = 1.0


class One:
    scale = 1.0

    def __call__(self):
        return self.scale


def scaled():
    return scaled.by


NUMBER = 1.0
TABLE = {"scale": 1.0}
OBJECT = Config()
CONTEXT = contextvars.ContextVar("scale", default=1.0)
IN_CONTEXT = contextvars.ContextVar("table")
MODULE = types.ModuleType("user_settings")
GET, SET = contextvars.ContextVar.get, contextvars.ContextVar.set


def write_global(at, k):
    global NUMBER
    NUMBER = k


def cell(k):
    """Return a function with a closure, which its own `write` changes."""

    def read():
        return k

    def write(new):
        nonlocal k
        k = new

    read.write = write
    return read


def nested_cell(k):
    inner = cell(k)

    def read():
        return inner()

    read.write = inner.write
    return read


def with_a_default(k):
    def read(k=k):
        return k

    return read


def first(at):
    return at[0]


def scale(at):
    return at.scale


def call(at):
    return at()


def set_first(at, k):
    at[0] = k


def set_scale(at, k):
    at.scale = k


def set_gradient(at, k):
    at.grad = tensor_of(k)


def put_in_environment(at, k):
    os.environ["HOSTILE_SCALE"] = str(k)


def of_class(make):
    """Have an attribute of a class in a place that starts with k."""

    def made(k):
        One.scale = k
        return make()

    return made


def shared(at, write):
    """What writes k first to something that all share."""

    def made(k):
        write(at, k)
        return at

    return made


def array_of(k):
    return np.full(1, k, np.float32)


def tensor_of(k):
    return torch.full((1,), k)


REPLACED = {
    "a float": (float, float, None),
    "a word": (str, float, None),
    "an array replaced": (array_of, lambda at: at[0].item(), None),
    "a tensor replaced": (tensor_of, lambda at: at, None),
    "deep lists": (lambda k: [[[[[[[[k]]]]]]]], lambda at: at[0][0][0][0][0][0][0][0], None),
    "a function replaced": (lambda k: lambda: k, call, None),
}
HELD = {
    "a list": (lambda k: [k], first, set_first),
    "a table": (lambda k: Words(scale=k), scale, lambda at, k: at.update(scale=k)),
    "a proxy": (lambda k: Proxy(scale=k), scale, lambda at, k: at.update(scale=k)),
    "the key of a table": (
        lambda k: {k: None}, lambda at: next(iter(at)),
        lambda at, k: at.update({k: at.popitem()[1]}),
    ),
    "deep in tables": (
        lambda k: {"a": [{"n": k}]}, lambda at: at["a"][0]["n"],
        lambda at, k: at["a"][0].update(n=k),
    ),
    "an array": (array_of, lambda at: at[0].item(), set_first),
    "a tensor": (tensor_of, lambda at: at, lambda at, k: at.fill_(k)),
    "a tensor past its version": (tensor_of, lambda at: at, lambda at, k: at.data.fill_(k)),
    "a tensor in an object": (
        lambda k: Config(tensor_of(k)), scale, lambda at, k: set_scale(at, tensor_of(k)),
    ),
    "an object": (Config, scale, set_scale),
    "an object in an object": (
        lambda k: Config(Config(k)), lambda at: at.scale.scale,
        lambda at, k: set_scale(at.scale, k),
    ),
    "slots": (Slotted, scale, set_scale),
    "a namespace": (lambda k: types.SimpleNamespace(scale=k), scale, set_scale),
    "a closure": (cell, call, lambda at, k: at.write(k)),
}  # fmt: skip
ELSEWHERE = {
    "a closure in a closure": (nested_cell, call, lambda at, k: at.write(k)),
    "a default": (with_a_default, call, lambda at, k: setattr(at, "__defaults__", (k,))),
    "an array of Python's": (lambda k: array.array("d", [k]), first, set_first),
    "ctypes": (ctypes.c_double, lambda at: at.value, lambda at, k: setattr(at, "value", k)),
    "bytes": (lambda k: bytearray([int(k)]), first, lambda at, k: set_first(at, int(k))),
    "a thread's own": (lambda k: shared(Local(), set_scale)(k), scale, set_scale),
    "a global": (shared(None, write_global), lambda at: NUMBER, write_global),
    "a global table": (
        shared(TABLE, lambda at, k: at.update(scale=k)), lambda at: TABLE["scale"],
        lambda at, k: TABLE.update(scale=k),
    ),
    "an object in a global": (shared(OBJECT, set_scale), lambda at: OBJECT.scale, set_scale),
    "the only object of a class": (
        lambda k: shared(Single(), set_scale)(k), lambda at: Single().scale, set_scale,
    ),
    "a module": (shared(MODULE, set_scale), lambda at: MODULE.scale, set_scale),
    "a function": (
        shared(scaled, lambda at, k: setattr(at, "by", k)), lambda at: scaled(),
        lambda at, k: setattr(scaled, "by", k),
    ),
    "a context": (lambda k: CONTEXT.set(k) and CONTEXT, GET, SET),
    "a context that has a default": (lambda k: contextvars.ContextVar("own", default=k), GET, SET),
    "a table in a context": (
        lambda k: IN_CONTEXT.set({"scale": k}) and IN_CONTEXT, lambda at: at.get()["scale"],
        lambda at, k: at.get().update(scale=k),
    ),
    "the environment": (
        shared(None, put_in_environment), lambda at: float(os.environ["HOSTILE_SCALE"]),
        put_in_environment,
    ),
    "a gradient": (
        lambda k: shared(torch.zeros(1), set_gradient)(k), lambda at: at.grad, set_gradient,
    ),
    "a lock": (
        lambda k: threading.Lock(), lambda at: 1.0 + at.locked(),
        lambda at, k: k > 1 and at.acquire(blocking=False),
    ),
    "a class": (of_class(lambda: One), scale, lambda at, k: set_scale(One, k)),
    "an object's class": (of_class(One), scale, lambda at, k: set_scale(One, k)),
    "an operator of a class": (of_class(One), call, lambda at, k: set_scale(One, k)),
    "a method of an object": (lambda k: shared(One(), set_scale)(k), One.__call__, set_scale),
    "the class of an object": (
        of_class(One), call,
        lambda at, k: setattr(at, "__class__", type("Other", (One,), {"scale": k})),
    ),
}  # fmt: skip
"""Where code of the front finds a number, besides in what it is given."""


def counting(place):
    """Return what makes a counter of a place, and what counts in it and returns the count."""
    make, read, write = place

    def tick(at):
        write(at, float(read(at)) + 1)
        return int(read(at))

    return (lambda: make(0.0)), tick


def in_a_database(at):
    at.execute("create table if not exists t (x)")
    at.execute("insert into t values (1)")
    return at.execute("select count(*) from t").fetchone()[0]


def in_a_file(at):
    with open(at, "a") as file:
        file.write("x")
        return file.tell()


COUNTERS = {
    **{kind: counting(place) for kind, place in (HELD | ELSEWHERE).items()},
    "an iterator": (lambda: count(1), next),
    "a deque": (deque, lambda at: at.append(0) or len(at)),
    "a list that grows": (list, lambda at: at.append(0) or len(at)),
    "bytes that grow": (bytearray, lambda at: at.append(0) or len(at)),
    "a byte": (lambda: bytearray(1), lambda at: set_first(at, at[0] + 1) or at[0]),
    "an array of the standard library": (
        lambda: array.array("l", [0]), lambda at: set_first(at, at[0] + 1) or at[0],
    ),
    "a set": (set, lambda at: at.add(len(at)) or len(at)),
    "a text": (io.StringIO, lambda at: at.write("x") and at.tell()),
    "a database": (lambda: sqlite3.connect(":memory:"), in_a_database),
    "a file": (lambda: tempfile.mkstemp()[1], in_a_file),
    "shared memory": counting(
        (
            lambda k: multiprocessing.Value("d", k), lambda at: at.value,
            lambda at, k: setattr(at, "value", k),
        )
    ),
}  # fmt: skip
"""`(make, tick)`: what counts, and what returns how often it was called."""


def by_storage(t, f):
    t.untyped_storage().copy_((t * f).detach().clone().untyped_storage())


WRITES = {
    "a method": lambda t, f: t.mul_(f),
    "its data": lambda t, f: t.data.mul_(f),
    "new data": lambda t, f: setattr(t, "data", t.data * f),
    "numpy": lambda t, f: t.detach().numpy().__imul__(f),
    "dlpack": lambda t, f: torch.from_dlpack(t.detach()).mul_(f),
    "detached": lambda t, f: t.detach().mul_(f),
    "a view": lambda t, f: t.view(-1)[::2].mul_(f),
    "set": lambda t, f: t.set_((t * f).detach().clone()),
    "storage": by_storage,
}
"""Ways to multiply a tensor by a number, in place; most in all of its elements."""
