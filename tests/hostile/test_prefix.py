"""What the prefix is, changes: what is trained, its children, its forwards, its hooks."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from tests.hostile.harness import changed, hostile, sgd
from tests.hostile.nets import Net, Normed, Residual, rows

# ---- requires_grad ----------------------------------------------------------------------------


def thaw(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            if any(name.startswith(one) for one in names):
                parameter.requires_grad_(True)

    return change


@hostile
@pytest.mark.parametrize(
    "names",
    [
        ["early"],
        ["middle"],
        ["early", "middle"],
        ["early.bias"],
        ["middle.bias"],
        ["middle.weight"],
    ],
    ids=" and ".join,
)
def test_a_part_of_the_front_that_is_thawed_by_hand_trains(run, names):
    changed(run, thaw(*names), Net(), rows())


@hostile
@pytest.mark.parametrize("part", ["early.1", "early.2", "early.0.bias"])
def test_norms_and_biases_that_are_thawed_train(run, part):
    changed(run, thaw(part), Normed(), rows())


@hostile
def test_bitfit_thaws_every_bias(run):
    def biases(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))

    changed(run, biases, Net(), rows())


@hostile
def test_a_part_thawed_in_the_middle_of_an_epoch_trains_from_that_step(run):
    model = run.freeze(Net())

    def each_step(step):
        if step == 7:
            run.turn()
            model.early.requires_grad_(True)

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile
def test_a_part_thawed_for_one_step_has_moved(run):
    model = run.freeze(Net())

    def each_step(step):
        if step in (7, 8):
            run.turn()
            model.middle.requires_grad_(step == 7)
            model.middle.zero_grad(set_to_none=True)

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile
def test_gradual_unfreezing_goes_back_layer_by_layer(run):
    model = run.freeze(Net())

    def each_epoch(epoch):
        for part in {2: [model.middle], 3: [model.early]}.get(epoch, []):
            run.turn()
            part.requires_grad_(True)

    run.fit(model, run.loader(rows()), 5, each_epoch=each_epoch)


@hostile
def test_thawed_weights_may_join_the_optimizer_with_a_rate_of_their_own(run):
    model = run.freeze(Net())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
            model.middle.requires_grad_(True)
            optimizer.add_param_group({"params": model.middle.parameters(), "lr": 0.005})

    run.fit(model, run.loader(rows()), 4, optimizer=optimizer, each_epoch=each_epoch)


@hostile
def test_backbone_finetuning_as_lightning_does_it(run):
    """Freezes with `track_running_stats` off, thaws with it on, from the middle of training."""
    model = Normed()
    model.early[1].track_running_stats = False
    run.freeze(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
            model.early[0].requires_grad_(True)
            model.middle.requires_grad_(True)
            groups = [*model.early[0].parameters(), *model.middle.parameters()]
            optimizer.add_param_group({"params": groups, "lr": 0.01})
            run.let_go()

    run.fit(model, run.loader(rows()), 4, optimizer=optimizer, each_epoch=each_epoch)


@hostile
def test_a_boundary_below_a_thawed_part_is_told_of_it(run):
    """The user unfreezes and says so, in this order."""
    model = run.freeze(Net())

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
            model.middle.requires_grad_(True)
        if epoch == 3:
            run.move(model, "early")

    run.fit(model, run.loader(rows()), 6, each_epoch=each_epoch)


@hostile
def test_a_fresh_optimizer_for_a_thawed_model_trains_all_of_it(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    run.turn()
    model.requires_grad_(True)
    run.fit(model, loader, 2)


@hostile
def test_freezing_more_than_was_said_is_served_on(run):
    changed(run, lambda model: model.late.requires_grad_(False), Net(), rows())


@hostile
def test_frozen_weights_that_decay_with_zero_gradients_move(run):
    """`zero_grad(set_to_none=False)` leaves zeros behind, and weight decay moves such a weight."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    x, y = rows()[:8]
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)
    run.freeze(model)
    loader = run.loader(rows())
    for _ in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            run.record(loss)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
    run.see(model)


# ---- children ---------------------------------------------------------------------------------


def wrap(name):
    def change(model):
        setattr(model, name, Residual(model.get_submodule(name)))

    return change


def append_to_early(model):
    model.early = nn.Sequential(model.early, Residual())


def lora(name):
    """What PEFT does to a linear layer, by hand, with a B that is not zero any more."""

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.a = nn.Linear(base.in_features, 2, bias=False)
            self.b = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    def change(model):
        setattr(model, name, Lora(model.get_submodule(name)))

    return change


@hostile
@pytest.mark.parametrize(
    "change",
    [wrap("early"), wrap("middle"), lora("early"), lora("middle"), append_to_early],
    ids=["wrap early", "wrap middle", "lora early", "lora middle", "append to early"],
)
def test_an_adapter_that_joins_the_front_trains(run, change):
    changed(run, change, Net(), rows())


class Stacked(Net):
    """A front with containers, to which anything may be added."""

    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.middle = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 8)
        self.late, self.head = self._modules.pop("late"), self._modules.pop("head")

    def front(self, x):
        h = self.early(x)
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return self.last(h)


def reorder(model):
    model.middle[0], model.middle[1] = model.middle[1], model.middle[0]


@hostile
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.early.append(Residual()),
        lambda model: model.early.insert(1, Residual()),
        lambda model: model.middle.append(Residual()),
        lambda model: model.middle.append(nn.Linear(8, 8).requires_grad_(False)),
        lambda model: model.middle.pop(0),
        reorder,
        lambda model: model.early.__setitem__(1, nn.ReLU()),
        lambda model: model.early.pop(1),
        lambda model: setattr(model, "early", nn.Sequential(*model.early, nn.ReLU())),
        lambda model: setattr(model, "last", nn.Identity()),
    ],
    ids=[
        "append", "insert", "trained layer", "frozen layer", "pop a layer", "reorder", "activation",
        "pop an activation", "rebuilt", "boundary becomes identity",
    ],
)  # fmt: skip
def test_a_container_of_the_front_may_change(run, change):
    changed(run, change, Stacked(), rows(), boundary="last")


@hostile
def test_a_child_may_be_replaced_by_its_equal_copy(run):
    def swap(model):
        model.early = copy.deepcopy(model.early)

    changed(run, swap, Net(), rows())


@hostile
def test_a_child_may_be_replaced_by_another(run):
    def swap(model):
        model.early = nn.Linear(6, 8).requires_grad_(False)

    changed(run, swap, Net(), rows())


@hostile
def test_a_branch_taken_where_a_child_exists_is_taken(run):
    class Optional(Net):
        def __init__(self):
            super().__init__()
            self.extra = None

        def front(self, x):
            h = super().front(x)
            return h if self.extra is None else h + self.extra(x)

    changed(run, lambda m: setattr(m, "extra", nn.Linear(6, 8)), Optional(), rows())


@hostile
def test_a_prompt_that_joins_the_front_trains(run):
    class Prompted(Net):
        def __init__(self):
            super().__init__()
            self.prompt = None

        def front(self, x):
            return super().front(x if self.prompt is None else x + self.prompt)

    def change(model):
        model.prompt = nn.Parameter(torch.ones(6))

    changed(run, change, Prompted(), rows())


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
