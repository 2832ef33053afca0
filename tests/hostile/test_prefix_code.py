"""What the prefix is, changes: its forwards, its classes, its hooks, and code that it calls."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from tests.hostile.harness import hostile
from tests.hostile.loops import changed, trained
from tests.hostile.nets import Net, layered, net

# ---- forwards and classes ---------------------------------------------------------------------


def doubled(name, wrap):
    """Put something in the place of a module's forward: `wrap` makes it of the plain one."""

    def change(model):
        module = model.get_submodule(name)
        module.forward = wrap(module, module.forward)

    return change


def relu_front(model, x):
    return model.middle(torch.relu(model.early(x)))


def with_forward_of_its_own():
    model = Net()
    plain = model.early.forward
    model.early.forward = lambda x: plain(x) * 3
    return model


def of_a_class_of_its_own():
    return net(front=lambda m, x: m.middle(torch.tanh(m.early(x))))


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def call_operator():
    model = layered(lambda layer, h: h)
    type(model.early).__call__ = lambda self, x: nn.Linear.__call__(self, x)
    return model


def at_the_class(of, name, value):
    """What sets an attribute of the class of the first layer, or of the model."""
    return lambda m: setattr(type(m.early if of == "early" else m), name, value)


def helped(kind):
    def forward(self, x):
        return self.adjust(nn.Linear.forward(self, x))

    adjust = staticmethod(lambda x: x) if kind == "static" else lambda self, x: x
    return net(early=type("Helped", (nn.Linear,), {"forward": forward, "adjust": adjust})(6, 8))


class Base(nn.Linear):
    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def derived():
    Base.factor = 1.0
    return net(early=type("Derived", (Base,), {})(6, 8))


FORWARDS = {
    "another class": (Net, lambda m: setattr(m.early, "__class__", Negative)),
    "function": (Net, doubled("early", lambda m, plain: lambda x: 2 * plain(x))),
    "method": (
        Net, doubled("early", lambda m, plain: types.MethodType(lambda m, x: 2 * plain(x), m)),
    ),
    "partial": (
        Net,
        doubled("early", lambda m, plain: functools.partial(lambda x, by: by * plain(x), by=2)),
    ),
    "of the boundary": (Net, doubled("middle", lambda m, plain: lambda x: 2 * plain(x))),
    "taken back": (with_forward_of_its_own, lambda m: m.early.__dict__.pop("forward")),
    "at the class": (
        of_a_class_of_its_own, at_the_class("model", "front", relu_front),
    ),
    "of a layer at its class": (
        lambda: layered(lambda layer, h: h),
        at_the_class("early", "forward", lambda self, x: -F.linear(x, self.weight)),
    ),
    "of the model's instance": (
        Net, lambda m: setattr(m, "front", functools.partial(relu_front, m)),
    ),
    "of the model, wrapped": (Net, doubled("", lambda m, plain: lambda x: plain(x) * 2)),
    "of the model, replaced": (
        Net, doubled("", lambda m, plain: lambda x: m.back(relu_front(m, x))),
    ),
    "code swapped in place": (  # as live reloading (IPython's autoreload) does it
        of_a_class_of_its_own, lambda m: setattr(type(m).front, "__code__", relu_front.__code__),
    ),
    "a call operator": (
        call_operator,
        at_the_class("early", "__call__", lambda self, x: -nn.Linear.__call__(self, x)),
    ),
    "a helper at the class": (
        lambda: helped("bound"), at_the_class("early", "adjust", lambda self, x: -2 * x),
    ),
    "a static helper": (
        lambda: helped("static"),
        at_the_class("early", "adjust", staticmethod(lambda x: -2 * x)),
    ),
    "a property": (
        lambda: layered(lambda layer, h: h * layer.by, by=property(lambda self: 1.0)),
        at_the_class("early", "by", property(lambda self: 3.0)),
    ),
    "an attribute of a base class": (derived, lambda m: setattr(Base, "factor", 2.0)),
    "gradients on again": (
        lambda: net(front=torch.no_grad()(Net.front)),
        lambda m: (setattr(type(m), "front", Net.front), m.early.requires_grad_(True)),
    ),
}  # fmt: skip


@hostile
@pytest.mark.cases(6)
@pytest.mark.parametrize("which", FORWARDS)
def test_code_that_is_patched_runs(run, which):
    make, change = FORWARDS[which]
    changed(run, change, make())


# ---- code that it calls -----------------------------------------------------------------------


def global_scale():
    return 1.0


@hostile
def test_a_global_function_replaced_is_called(run, monkeypatch):
    with monkeypatch.context() as patched:
        changed(
            run, lambda m: patched.setitem(globals(), "global_scale", lambda: 2.0),
            layered(lambda layer, h: h * global_scale()),
        )  # fmt: skip


def with_a_default():
    def read(factor=1.0):
        return factor

    return layered(lambda layer, h: h * read()), lambda m: setattr(read, "__defaults__", (2.0,))


def closure_in_a_closure():
    factor = 1.0

    def inner():
        return factor

    def change(model):
        nonlocal factor
        factor = 2.0

    return layered(lambda layer, h: h * inner()), change


def function_in_a_table():
    table = {"act": torch.tanh}
    model = net(front=lambda m, x: m.middle(table["act"](m.early(x))))
    return model, lambda m: table.update(act=torch.relu)


def name_in_a_table():
    table = {"tanh": torch.tanh, "relu": torch.relu}
    model = net(front=lambda m, x: m.middle(table[m.act](m.early(x))), act="tanh")
    return model, lambda m: setattr(m, "act", "relu")


class Machine:
    factor = 1.0

    def __call__(self):
        return self.factor


def method_of_an_object():
    machine = Machine()
    model = layered(lambda layer, h: h * layer.read())
    model.early.read = machine.__call__
    return model, lambda m: setattr(machine, "factor", 2.0)


CALLED = {
    "its defaults": with_a_default,
    "a closure in its closure": closure_in_a_closure,
    "by a table": function_in_a_table,
    "by its name": name_in_a_table,
    "a method of an object": method_of_an_object,
}


@hostile
@pytest.mark.parametrize("how", CALLED)
def test_what_a_function_that_the_front_calls_hangs_on_is_obeyed(run, how):
    model, change = CALLED[how]()
    changed(run, change, model)


# ---- hooks ------------------------------------------------------------------------------------

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, a, out: out * 2),
    "pre": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "with kwargs": lambda m: m.register_forward_hook(
        lambda m, a, k, out: out * 2, with_kwargs=True
    ),
    "pre with kwargs": lambda m: m.register_forward_pre_hook(
        lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True
    ),
    "prepended": lambda m: m.register_forward_hook(lambda m, a, out: out * 2, prepend=True),
    "always called": lambda m: m.register_forward_hook(lambda m, a, out: out * 2, always_call=True),
}


@hostile
@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "early") for kind in HOOKS), ("forward", "middle"), ("pre", "middle"), ("pre", "")],
)
def test_a_hook_that_joins_the_front_is_called(run, kind, name):
    changed(run, lambda model: HOOKS[kind](model.get_submodule(name)))


@hostile
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_hook_that_leaves_the_front_is_gone(run, kind):
    model = Net()
    handle = HOOKS[kind](model.early)
    changed(run, lambda model: handle.remove(), model)


@hostile
def test_a_hook_whose_mind_changes_is_obeyed(run):
    scale = [1.0]
    model = Net()
    model.early.register_forward_hook(lambda m, a, out: out * scale[0])
    changed(run, lambda model: scale.__setitem__(0, 3.0), model)


@hostile
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_global_hook_that_joins_is_called(run, kind):
    handles = []

    def double(module, args, out=None):
        if not isinstance(module, nn.Linear) or module.in_features != 6:
            return None
        return out * 2 if out is not None else (args[0] * 2,)

    def change(model):
        register = torch_module.register_module_forward_hook
        if kind == "pre":
            register = torch_module.register_module_forward_pre_hook
        handles.append(register(double))

    try:
        changed(run, change)
    finally:
        for handle in handles:
            handle.remove()


@hostile(served=True)
@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.late.register_forward_hook(lambda m, a, out: out * 2),
        lambda m: m.head.register_full_backward_hook(lambda m, gi, go: None),
        lambda m: m.early.register_state_dict_pre_hook(lambda *a: None),
        lambda m: m.late.weight.register_hook(lambda grad: grad * 0.5),
    ],
    ids=["forward hook behind", "backward hook behind", "state dict hook", "gradient hook"],
)
def test_a_hook_that_does_not_concern_the_front_is_served_on(run, register):
    changed(run, register)


@hostile
def test_a_backward_hook_on_the_front_does_no_harm(run):
    changed(run, lambda m: m.early.register_full_backward_hook(lambda m, gi, go: None))


@hostile
def test_steering_vectors_come_and_go(run):
    """Adds a vector to a feature in every second epoch."""
    handles = []

    def each_epoch(model, epoch):
        if epoch == 2:
            run.turn()
            handles.append(model.early.register_forward_hook(lambda m, a, out: out + 1))
        if epoch == 3:
            handles.pop().remove()

    trained(run, each_epoch=each_epoch, epochs=5)
