"""What the prefix is, changes: what is trained, its children, its forwards, its hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import hostile
from tests.hostile.loops import changed
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
    def thawed(model):
        thaw(part)(model)
        run.let_go()

    changed(run, thawed, Normed(), rows())


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
