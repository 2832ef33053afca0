"""What the prefix is, changes: its forwards, its classes, its hooks, and code that it calls."""

import functools
import types

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


@hostile(over=FORWARDS, cases=6)
def test_code_that_is_patched_runs(run, make, change):
    changed(run, change, make())


# ---- code that it calls -----------------------------------------------------------------------


def global_function():
    return torch.tanh


@hostile
def test_a_global_function_replaced_is_called(run, monkeypatch):
    model = net(front=lambda m, x: m.middle(global_function()(m.early(x))))
    with monkeypatch.context() as patched:
        changed(run, lambda m: patched.setitem(globals(), "global_function", lambda: F.relu), model)


TABLED = {
    "by a table": (lambda m: "act", lambda m, table: table.update(act=torch.relu)),
    "by its name": (lambda m: m.act, lambda m, table: setattr(m, "act", "relu")),
}


@hostile(over=TABLED)
def test_a_function_that_the_front_finds_in_a_table_is_called(run, name_of, change):
    table = {"act": torch.tanh, "relu": torch.relu}
    model = net(front=lambda m, x: m.middle(table[name_of(m)](m.early(x))), act="act")
    changed(run, lambda m: change(m, table), model)


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


JOINING = {
    **{kind: (hook, "early") for kind, hook in HOOKS.items()},
    "at the boundary": (HOOKS["forward"], "middle"),
    "pre, at the boundary": (HOOKS["pre"], "middle"),
    "pre, of the model": (HOOKS["pre"], ""),
}


@hostile(over=JOINING)
def test_a_hook_that_joins_the_front_is_called(run, hook, name):
    changed(run, lambda model: hook(model.get_submodule(name)))


@hostile(over={kind: HOOKS[kind] for kind in ("forward", "pre")})
def test_a_hook_that_leaves_the_front_is_gone(run, hook):
    model = Net()
    handle = hook(model.early)
    changed(run, lambda model: handle.remove(), model)


@hostile
def test_a_hook_whose_mind_changes_is_obeyed(run):
    scale = [1.0]
    model = Net()
    model.early.register_forward_hook(lambda m, a, out: out * scale[0])
    changed(run, lambda model: scale.__setitem__(0, 3.0), model)


def double(module, args, out=None):
    if not isinstance(module, nn.Linear) or module.in_features != 6:
        return None
    return out * 2 if out is not None else (args[0] * 2,)


REGISTERS = {
    "forward": torch_module.register_module_forward_hook,
    "pre": torch_module.register_module_forward_pre_hook,
}


@hostile(over=REGISTERS)
def test_a_global_hook_that_joins_is_called(run, register):
    handles = []
    try:
        changed(run, lambda model: handles.append(register(double)))
    finally:
        for handle in handles:
            handle.remove()


BESIDE = {
    "forward hook behind": lambda m: m.late.register_forward_hook(lambda m, a, out: out * 2),
    "backward hook behind": lambda m: m.head.register_full_backward_hook(lambda m, gi, go: None),
    "state dict hook": lambda m: m.early.register_state_dict_pre_hook(lambda *a: None),
    "gradient hook": lambda m: m.late.weight.register_hook(lambda grad: grad * 0.5),
}


@hostile(over=BESIDE, served=True)
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
