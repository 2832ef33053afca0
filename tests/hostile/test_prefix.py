"""What the prefix is, changes: what is trained, its children."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import AT_RUN_TIME, hostile
from tests.hostile.loops import changed, trained
from tests.hostile.nets import Net, Normed, Residual, Tokens, layered, net, rows, sentences

# ---- requires_grad ----------------------------------------------------------------------------


def thaw(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(True)

    return change


def bitfit(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


THAWED = {
    "early": thaw("early"),
    "middle": thaw("middle"),
    "both": thaw("early", "middle"),
    "a bias": thaw("early.bias"),
    "the boundary's bias": thaw("middle.bias"),
    "the boundary's weight": thaw("middle.weight"),
    "every bias alone": bitfit,
    "nothing, but more is frozen": lambda m: m.late.requires_grad_(False),
}


@hostile(over=THAWED)
def test_a_part_of_the_front_that_is_thawed_by_hand_trains(run, change):
    changed(run, change)


@hostile
@pytest.mark.parametrize("part", ["early.1", "early.2", "early.0.bias"])
def test_norms_and_biases_that_are_thawed_train(run, part):
    def thawed(model):
        thaw(part)(model)
        run.let_go()

    changed(run, thawed, Normed())


SCHEDULES = {
    "from the middle of an epoch": {7: ("early", True)},
    "for one step": {7: ("middle", True), 8: ("middle", False)},
    "layer by layer": {6: ("middle", True), 9: ("early", True)},
}


@hostile(over=SCHEDULES)
def test_a_part_trains_from_that_very_step_on(run, schedule):
    def each_step(model, step):
        if step in schedule:
            run.turn()
            name, wanted = schedule[step]
            model.get_submodule(name).requires_grad_(wanted).zero_grad(set_to_none=True)

    trained(run, each_step=each_step, epochs=4)


@hostile
@pytest.mark.parametrize("period", [2, 9])
def test_a_front_that_is_thawed_again_and_again_trains(run, period):
    def each_step(model, step):
        model.early.requires_grad_(step % period >= period * 2 // 3).zero_grad()

    trained(run, each_step=each_step, epochs=6)


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

    def each_epoch(model, epoch):
        if epoch == 2:
            run.turn()
            model.middle.requires_grad_(True)
        if epoch == 3:
            run.move(model, "early")

    trained(run, each_epoch=each_epoch, epochs=6)


@hostile
def test_frozen_weights_that_decay_with_zero_gradients_move(run):
    """`zero_grad(set_to_none=False)` leaves zeros behind, and weight decay moves such a weight."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    x, y = rows()[:8]
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)
    run.freeze(model)
    for x, y in [*run.loader(rows())] * 3:
        loss = F.cross_entropy(model(x), y)
        run.record(loss)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    run.see(model)


@hostile
def test_a_gradient_taken_by_hand_for_the_front(run):
    """`torch.autograd.grad` for a frozen weight that is thawed for the call alone."""

    def loss(model, batch):
        if run.trace.calls >= 6:
            model.early.weight.requires_grad_(True)
            value = F.cross_entropy(model(batch[0]), batch[1])
            run.see(torch.autograd.grad(value, model.early.weight)[0])
            model.early.weight.requires_grad_(False)
        return F.cross_entropy(model(batch[0]), batch[1])

    trained(run, loss, epochs=4)


# ---- children ---------------------------------------------------------------------------------


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


def frozen(*sizes):
    return nn.Linear(*sizes).requires_grad_(False)


def reorder(model):
    model.middle[0], model.middle[1] = model.middle[1], model.middle[0]


CONTAINERS = {
    "append": lambda m: m.early.append(Residual()),
    "insert": lambda m: m.early.insert(1, Residual()),
    "trained layer": lambda m: m.middle.append(Residual()),
    "frozen layer": lambda m: m.middle.append(frozen(8, 8)),
    "pop a layer": lambda m: m.middle.pop(0),
    "reorder": reorder,
    "another frozen layer": lambda m: m.middle.__setitem__(1, frozen(8, 8)),
    "another trained layer": lambda m: m.middle.__setitem__(1, nn.Linear(8, 8)),
    "activation": lambda m: m.early.__setitem__(1, nn.ReLU()),
    "pop an activation": lambda m: m.early.pop(1),
    "rebuilt": lambda m: setattr(m, "early", nn.Sequential(*m.early, nn.ReLU())),
    "boundary becomes identity": lambda m: setattr(m, "last", nn.Identity()),
}


@hostile(over=CONTAINERS)
def test_a_container_of_the_front_may_change(run, change):
    changed(run, change, Stacked(), boundary="last")


def listed():
    return net(
        front=lambda m, x: m.middle(torch.tanh(m.early(x) + sum(m.biases))),
        biases=nn.ParameterList([torch.zeros(8), torch.ones(8)]).requires_grad_(False),
    )


def keyed():
    return net(
        front=lambda m, x: m.middle(torch.tanh(m.early(x) + sum(m.biases.values()))),
        biases=nn.ParameterDict({"a": torch.ones(8)}).requires_grad_(False),
    )


def chosen():
    return net(
        front=lambda m, x: m.middle(torch.tanh(m.parts[m.chosen](x))), chosen="a",
        parts=nn.ModuleDict({"a": frozen(6, 8), "b": frozen(6, 8)}),
    )  # fmt: skip


def branching():
    return net(
        front=lambda m, x: Net.front(m, x) if m.extra is None else Net.front(m, x) + m.extra(x),
        extra=None,
    )


def prompted():
    return net(
        front=lambda m, x: Net.front(m, x if m.prompt is None else x + m.prompt), prompt=None
    )


def hiding():
    """Has a module in a list: no child."""
    return net(
        front=lambda m, x: m.middle(m.extras[0](torch.tanh(m.early(x)))), extras=[frozen(8, 8)]
    )


def biased(value):
    return nn.Parameter(torch.full((8,), value), requires_grad=False)


CHILDREN = {
    "an adapter around early": (Net, lambda m: setattr(m, "early", Residual(m.early))),
    "an adapter around middle": (Net, lambda m: setattr(m, "middle", Residual(m.middle))),
    "an adapter behind early": (
        Net, lambda m: setattr(m, "early", nn.Sequential(m.early, Residual())),
    ),
    "an equal copy": (Net, lambda m: setattr(m, "early", copy.deepcopy(m.early))),
    "another": (Net, lambda m: setattr(m, "early", frozen(6, 8))),
    "a branch": (branching, lambda m: setattr(m, "extra", nn.Linear(6, 8))),
    "a prompt": (prompted, lambda m: setattr(m, "prompt", nn.Parameter(torch.ones(6)))),
    "of a list of parameters": (listed, lambda m: m.biases.__setitem__(1, biased(-2.0))),
    "of a dict of parameters": (keyed, lambda m: m.biases.update({"b": biased(-2.0)})),
    "of a dict of modules": (chosen, lambda m: setattr(m, "chosen", "b")),
    "of a plain list": (hiding, lambda m: m.extras.__setitem__(0, nn.Identity())),
    "joined by compilation": (Net, lambda m: m.early.compile(backend="eager")),
}  # fmt: skip


@hostile(over=CHILDREN, cases=4)
def test_a_child_of_the_front_may_change(run, make, change):
    changed(run, change, make())


@hostile
def test_an_adapter_in_a_transformer_block_trains(run):
    def change(model):
        model.block.dropout2 = nn.Sequential(model.block.dropout2, Residual())

    changed(run, change, Tokens(), sentences(), boundary="block")


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.extra = inner, nn.Linear(3, 3)

    def forward(self, x):
        return self.extra(self.inner(x))


@hostile
def test_an_adapter_wraps_the_whole_model_in_mid_run(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    run.turn()
    run.fit(Wrapped(model), loader, 2)


@hostile(limit=AT_RUN_TIME)
def test_a_trained_module_hidden_in_the_front_trains(run):
    hidden = nn.Linear(8, 8)
    model = layered(lambda layer, h: layer.extras[0](h))
    model.early.extras = [hidden]
    trained(
        run, model=model,
        optimizer=lambda m: torch.optim.SGD([*m.late.parameters(), *hidden.parameters()], 0.2),
    )  # fmt: skip
    run.see(hidden)


@hostile
def test_a_front_put_into_another_model_goes_on(run):
    """The frozen trunk is taken over by a second model that replaces the first."""
    first = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(first, loader, 2)
    second = Net()
    second.early, second.middle = first.early, first.middle
    run.turn()
    run.fit(second, loader, 2)
