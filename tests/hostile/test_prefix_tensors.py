"""What the prefix is, changes: its parameters and buffers, by every way of writing them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import changed, trained
from tests.hostile.nets import Net, Normed, inputs, net, rows
from tests.hostile.places import WRITES


def load(model, **changes):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for key, change in changes.items():
        state[key.replace("__", ".")] += change
    model.load_state_dict(state)


def swapped_parameter(model):
    model.early.weight = nn.Parameter(-model.early.weight.data, requires_grad=False)


def loaded_by_assignment(model, front_trains=False):
    """`assign=True` keeps `requires_grad` of what it finds."""
    state = {key: -value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for name in ("early", "middle"):
        model.get_submodule(name).requires_grad_(front_trains)


def swapped_in_place(model):
    other = nn.Parameter(-model.early.weight.detach(), requires_grad=False)
    torch.utils.swap_tensors(model.early.weight, other)


WEIGHTS = {
    **{
        f"by {how}": lambda m, write=write: write(m.early.weight, -3.0)
        for how, write in WRITES.items()
    },
    "by its data, and something noted beside it": lambda m: (
        vars(m).update(note=1), m.early.weight.data.mul_(-3.0),
    ),
    "by its data, and another one loaded as it is": lambda m: (
        m.middle.load_state_dict(m.middle.state_dict()), m.early.weight.data.mul_(-3.0),
    ),
    "another parameter": swapped_parameter,
    "loaded": lambda m: load(m, early__weight=1.0),
    "loaded by assignment": loaded_by_assignment,
    "loaded by assignment, and trained": lambda m: loaded_by_assignment(m, True),
    "swapped in place": swapped_in_place,
    "no bias": lambda m: setattr(m.early, "bias", None),
    "tied to the head's": lambda m: setattr(m.middle, "weight", m.late.weight),
}  # fmt: skip


@hostile(over=WEIGHTS, cases=5)
def test_a_written_weight_is_used(run, write):
    changed(run, torch.no_grad()(write))


@hostile(limit="A change of a single element through `p.data` may miss the 16 sampled ones")
def test_one_element_written_past_its_version_is_found_by_the_audit(run):
    def write(model):
        model.early.weight.data.view(-1)[7] += 30.0

    changed(run, write, Net(width=64))


def masked(mask=None, **kwargs):
    model = net(front=lambda m, x: Net.front(m, x if m.mask is None else x * m.mask))
    model.register_buffer("mask", mask, **kwargs)
    return model


BUFFERS = {
    "in place": (Normed, lambda m: m.early[1].running_mean.add_(1.0)),
    "replaced": (Normed, lambda m: setattr(m.early[1], "running_var", torch.full((8,), 0.1))),
    "the model's, not persistent": (
        lambda: masked(torch.ones(6), persistent=False), lambda m: m.mask[:4].zero_(),
    ),
    "one that joins": (masked, lambda m: setattr(m, "mask", torch.zeros(6))),
    "one that is registered": (
        lambda: net(front=lambda m, x: Net.front(m, x + getattr(m, "shift", 0))),
        lambda m: m.register_buffer("shift", torch.full((6,), 2.0)),
    ),
}  # fmt: skip


@hostile(over=BUFFERS, cases=4)
def test_a_buffer_that_is_written_is_used(run, make, change):
    changed(run, change, make())


# ---- averages, swaps, checkpoints -------------------------------------------------------------


def summarised(model):
    """As torchinfo does it, on numbers of its own."""
    handle = model.early.register_forward_hook(lambda *_: None)
    model(inputs()[:2].to(model.early.weight.device))
    handle.remove()


SAME = {"loaded": load, "shared with processes": Net.share_memory, "a summary": summarised}


@hostile(silent=True, over=SAME)
def test_equal_values_in_every_epoch_are_served(run, again):
    trained(run, each_epoch=lambda model, epoch: epoch and again(model), epochs=6)


@hostile(served=True)
def test_swapping_averages_in_and_out_every_epoch_is_served(run):
    """EMA for the evaluation: the frozen weights' averages are the weights."""
    model, loader = run.freeze(Net()), run.loader(rows())
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def evaluate(epoch):
        ema.update_parameters(model)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(ema.module.state_dict())
        model.eval()
        with torch.no_grad():
            for x, _ in loader:
                run.record(model(x).square().mean())
        model.load_state_dict(kept)

    run.fit(model, loader, 5, each_epoch=evaluate)


@hostile(silent=True)
def test_an_average_is_evaluated_over_loaders_of_its_own_without_a_word(run):
    model = run.freeze(Net())
    averaged, optimizer, loader = swa_utils.AveragedModel(model), sgd(model), run.loader(rows())
    for _ in range(3):
        with torch.no_grad():
            for x, _ in run.loader(rows(48, seed=5)):
                run.see(averaged(x).sum())
        for batch in loader:
            run.step(cross_entropy(model, batch), optimizer)
            averaged.update_parameters(model)


@hostile
def test_noise_put_on_the_weights_and_taken_off_in_each_step(run):
    def loss(model, batch):
        noise = 0.1 * torch.randn_like(model.early.weight)
        model.early.weight.data.add_(noise)
        value = cross_entropy(model, batch)
        model.early.weight.data.sub_(noise)
        return value

    trained(run, loss, epochs=4)


# ---- reparametrised fronts --------------------------------------------------------------------


def weight_norm(model):
    parametrizations.weight_norm(model.early)
    with torch.no_grad():
        model.early.parametrizations.weight.original0.mul_(2)


def pruned(model):
    prune.l1_unstructured(model.early, "weight", amount=0.5)


def frozen(change):
    """Return what changes the first layer and freezes what that brought."""
    return lambda model: (change(model), model.early.requires_grad_(False))


def flat(model):
    """As fused optimizers have it: what is frozen and what trains lies in one memory."""
    parameters = [*model.parameters()]
    memory = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, memory.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)


NORMS = {
    "flat": flat, "weight norm": weight_norm, "frozen weight norm": frozen(weight_norm),
    "pruned": pruned,
    "parametrized": lambda m: parametrize.register_parametrization(m.early, "weight", nn.Tanh()),
}  # fmt: skip


@hostile(over=NORMS)
def test_a_front_that_is_reparametrised_in_mid_run_is_used(run, change):
    changed(run, change)


@hostile(over={"pruned": frozen(pruned), "weight norm": frozen(weight_norm)}, served=True)
def test_a_front_that_is_reparametrised_and_frozen_is_served_again(run, change):
    changed(run, change, epochs=4)


@hostile(over={kind: NORMS[kind] for kind in NORMS if kind != "weight norm"}, served=True)
def test_a_front_that_was_reparametrised_before_is_served(run, before):
    model = Net()
    before(model)
    trained(run, model=model)


@hostile
def test_weights_tied_across_the_boundary_move_with_training(run):
    """The head's weight is the front's too: it trains, so the front is never still."""
    model = Net()
    model.late.weight = model.middle.weight
    run.freeze(model)
    run.turn()
    model.late.weight.requires_grad_(True)
    run.fit(model, run.loader(rows()), 3)


# ---- dtype, layout, place ---------------------------------------------------------------------


@hostile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parts", [("early",), ("early", "middle"), ("",)], ids=" and ".join)
def test_a_part_in_another_precision_and_back_is_right(run, dtype, parts):
    def front(model, x):
        h = torch.tanh(model.early(x.to(model.early.weight.dtype)))
        return model.middle(h.to(model.middle.weight.dtype)).to(model.head.weight.dtype)

    model = run.freeze(net(front=front))

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
        if epoch in (2, 4):
            for part in parts:
                model.get_submodule(part).to(dtype if epoch == 2 else torch.float32)

    loss = lambda m, b: cross_entropy(m, b).float()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.fit(model, run.loader(rows()), 6, loss=loss, each_epoch=each_epoch, optimizer=optimizer)


@hostile(served=True)
def test_shared_memory_changes_nothing(run):
    changed(run, lambda m: m.share_memory(), epochs=7)


@hostile
def test_a_weight_written_in_the_middle_of_an_epoch_is_used(run):
    def each_step(model, step):
        if step == 7:
            run.turn()
            model.early.weight.data = -model.early.weight.data

    trained(run, each_step=each_step, epochs=4)
