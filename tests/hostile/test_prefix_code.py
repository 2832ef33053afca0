"""What the prefix is, changes: its forwards and its hooks."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from tests.hostile.harness import hostile, sgd
from tests.hostile.loops import changed
from tests.hostile.nets import Net, rows

# ---- requires_grad ----------------------------------------------------------------------------


# ---- forwards ---------------------------------------------------------------------------------


@hostile
@pytest.mark.parametrize(
    ("name", "how"),
    [("early", "function"), ("early", "method"), ("early", "partial"), ("middle", "function")],
)
def test_a_forward_that_is_patched_runs(run, name, how):
    def change(model):
        module = model.get_submodule(name)
        plain = module.forward

        def doubled(x):
            return 2 * plain(x)

        module.forward = {
            "function": doubled,
            "method": types.MethodType(lambda self, x: 2 * plain(x), module),
            "partial": functools.partial(lambda x, scale: scale * plain(x), scale=2),
        }[how]

    changed(run, change, Net(), rows())


@hostile
def test_a_forward_patched_before_and_taken_back_later_is_gone(run):
    model = Net()
    plain = model.early.forward
    model.early.forward = lambda x: plain(x) * 3
    changed(run, lambda m: m.early.__dict__.pop("forward"), model, rows())


@hostile
def test_a_forward_patched_at_the_class_runs(run):
    class Early(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model = Net()
    model.early = Early(6, 8)
    changed(
        run, lambda m: setattr(Early, "forward", lambda self, x: -F.linear(x, self.weight)), model,
        rows(),
    )  # fmt: skip


@hostile
def test_the_models_own_forward_patched_at_the_class_runs(run):
    class Own(Net):
        pass

    def change(model):
        Own.front = lambda self, x: self.middle(torch.relu(self.early(x)))

    changed(run, change, Own(), rows())


@hostile
def test_a_method_of_the_model_patched_at_the_instance_runs(run):
    def change(model):
        model.front = lambda x: model.middle(torch.relu(model.early(x)))

    changed(run, change, Net(), rows())


@hostile
def test_the_models_forward_wrapped_by_the_user_later_runs(run):
    def change(model):
        inner = model.forward
        model.forward = lambda x: inner(x) * 2

    changed(run, change, Net(), rows())


@hostile
def test_the_models_forward_replaced_by_the_user_later_runs(run):
    def change(model):
        model.forward = lambda x: model.back(model.middle(torch.relu(model.early(x))))

    changed(run, change, Net(), rows())


@hostile
def test_the_class_of_a_module_may_change(run):
    class Negative(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    changed(run, lambda model: setattr(model.early, "__class__", Negative), Net(), rows())


@hostile
def test_a_call_operator_patched_at_the_class_runs(run):
    class Early(nn.Linear):
        def __call__(self, x):
            return super().__call__(x)

    model = Net()
    model.early = Early(6, 8)

    def change(model):
        Early.__call__ = lambda self, x: -nn.Linear.__call__(self, x)

    changed(run, change, model, rows())


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
    [*((kind, "early") for kind in HOOKS), ("forward", "middle"), ("pre", "middle")],
)
def test_a_hook_that_joins_the_front_is_called(run, kind, name):
    changed(run, lambda model: HOOKS[kind](model.get_submodule(name)), Net(), rows())


@hostile
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_hook_that_leaves_the_front_is_gone(run, kind):
    model = Net()
    handle = HOOKS[kind](model.early)
    changed(run, lambda model: handle.remove(), model, rows())


@hostile
def test_a_hook_of_the_whole_model_that_joins_is_called(run):
    changed(run, lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)), Net(), rows())


@hostile
def test_a_hook_whose_mind_changes_is_obeyed(run):
    scale = [1.0]
    model = Net()
    model.early.register_forward_hook(lambda m, a, out: out * scale[0])
    changed(run, lambda model: scale.__setitem__(0, 3.0), model, rows())


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
        changed(run, change, Net(), rows())
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
    changed(run, register, Net(), rows())


@hostile
def test_a_backward_hook_on_the_front_does_no_harm(run):
    changed(
        run, lambda m: m.early.register_full_backward_hook(lambda m, gi, go: None), Net(), rows()
    )


@hostile
def test_steering_vectors_come_and_go(run):
    """Adds a vector to a feature in every second epoch."""
    model = run.freeze(Net())
    handles = []

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
            handles.append(model.early.register_forward_hook(lambda m, a, out: out + 1))
        if epoch == 3:
            handles.pop().remove()

    run.fit(model, run.loader(rows()), 5, each_epoch=each_epoch, optimizer=sgd(model))
