"""What the prefix is, changes: its parameters and buffers, by every way of writing them."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from tests.hostile.harness import hostile, sgd
from tests.hostile.loops import changed
from tests.hostile.nets import ConvNet, Net, Normed, images, rows


def load(model, **changes):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for key, change in changes.items():
        state[key.replace("__", ".")] += change
    model.load_state_dict(state)


@torch.no_grad()
def in_place(model):
    model.early.weight.mul_(-1)


@torch.no_grad()
def through_numpy(model):
    model.early.weight.detach().numpy()[:] *= -1


def through_dlpack(model):
    torch.from_dlpack(model.early.weight.detach()).mul_(-1)


def new_data(model):
    model.early.weight.data = -model.early.weight.data


def swapped_parameter(model):
    model.early.weight = nn.Parameter(-model.early.weight.data, requires_grad=False)


def written_as_a_vector(model):
    parameters = [model.early.weight, model.early.bias]
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(-vector, parameters)


@torch.no_grad()
def a_view_of_it(model):
    model.early.weight.view(-1)[3:9].fill_(2)


def initialised_again(model):
    nn.init.normal_(model.early.weight, generator=torch.Generator().manual_seed(5))


def loaded_by_assignment(model):
    state = {key: -value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for name in ("early", "middle"):
        model.get_submodule(name).requires_grad_(False)


@torch.no_grad()
def swapped_in_place(model):
    torch.utils.swap_tensors(
        model.early.weight, nn.Parameter(-model.early.weight, requires_grad=False)
    )


@torch.no_grad()
def untyped_storage(model):
    storage = model.early.weight.untyped_storage()
    torch.frombuffer(bytearray(bytes(storage)), dtype=torch.float32)
    other = (-model.early.weight).clone().untyped_storage()
    storage.copy_(other)


@torch.no_grad()
def foreach(model):
    torch._foreach_mul_([model.early.weight, model.early.bias], -1.0)


@hostile
@pytest.mark.parametrize(
    "write",
    [in_place, through_numpy, through_dlpack, new_data, swapped_parameter, written_as_a_vector,
     a_view_of_it, initialised_again, loaded_by_assignment, swapped_in_place, untyped_storage,
     foreach, lambda m: load(m, early__weight=1.0), lambda m: m.early.weight.data.mul_(-1)],
    ids=lambda write: write.__name__,
)  # fmt: skip
def test_a_written_weight_is_used(run, write):
    changed(run, write, Net(), rows())


@hostile
def test_a_weight_written_in_the_middle_of_an_epoch_is_used(run):
    model = run.freeze(Net())

    def each_step(step):
        if step == 7:
            run.turn()
            new_data(model)

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile(limit="A change of a single element through `p.data` may miss the 16 sampled ones")
def test_one_element_written_past_its_version_is_found_by_the_audit(run):
    def write(model):
        model.early.weight.data.view(-1)[7] += 30.0

    model = Net(width=64)
    changed(run, write, model, rows(), epochs=3)


@hostile
@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.early[1].running_mean.add_(1.0),
        lambda m: m.early[1].reset_running_stats(),
        lambda m: setattr(m.early[1], "running_var", torch.full((8,), 0.1)),
        lambda m: m.early[1].running_var.numpy().__imul__(0.1),
    ],
    ids=["in place", "reset", "replaced", "through NumPy"],
)
def test_statistics_of_a_frozen_norm_that_are_written_are_used(run, write):
    changed(run, write, Normed(), rows())


@hostile
@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_written_is_used(run, persistent):
    class Masked(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(6), persistent=persistent)

        def front(self, x):
            return super().front(x * self.mask)

    changed(run, lambda m: m.mask[:4].zero_(), Masked(), rows())


@hostile
def test_a_buffer_that_joins_is_used(run):
    class Masked(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", None)

        def front(self, x):
            return super().front(x if self.mask is None else x * self.mask)

    changed(run, lambda m: setattr(m, "mask", torch.zeros(6)), Masked(), rows())


# ---- averages, swaps, checkpoints -------------------------------------------------------------


@hostile(served=True)
def test_loading_equal_values_every_epoch_is_served(run):
    model = run.freeze(Net())
    run.fit(model, run.loader(rows()), 6, each_epoch=lambda epoch: load(model))


@hostile(served=True)
def test_swapping_averages_in_and_out_every_epoch_is_served(run):
    """EMA for the evaluation: the frozen weights' averages are the weights."""
    model = run.freeze(Net())
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    loader = run.loader(rows())

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


@hostile
def test_averages_over_a_thawed_past_differ_and_are_used(run):
    """The EMA began before the freeze: swapped in, the front is another."""
    model = Net()
    ema = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    run.freeze(model)
    loader = run.loader(rows())

    def evaluate(epoch):
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for key, value in model.state_dict().items():
                value.copy_(ema[key])
            model.eval()
            for x, _ in loader:
                run.record(model(x).square().mean())
            model.load_state_dict(kept)

    run.fit(model, loader, 4, each_epoch=evaluate)


@hostile
def test_the_best_checkpoint_loaded_back_is_used(run):
    model = Net()
    best = {key: value * 0.5 for key, value in model.state_dict().items()}
    changed(run, lambda m: m.load_state_dict(best), model, rows())


@hostile
def test_update_bn_moves_what_it_moves(run):
    """SWA's update of the statistics, over a held front: BatchNorm behind it moves."""

    class Behind(Net):
        def __init__(self):
            super().__init__()
            self.late = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    model = run.freeze(Behind())
    loader = run.loader(rows())

    def each_epoch(epoch):
        torch.optim.swa_utils.update_bn(loader, model)

    run.fit(model, loader, 3, each_epoch=each_epoch)


@hostile
def test_a_lookahead_optimizer_that_writes_all_weights_is_right(run):
    """Slow weights are written back every second step, frozen ones as well."""
    model = run.freeze(Net())
    slow = [p.detach().clone() for p in model.parameters()]

    def each_step(step):
        if step % 2 == 0 and step:
            with torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(p, 0.5)
                    p.copy_(kept)

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile(served=True)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_and_sharpness_in_the_active_part_are_served(run, clip):
    model = run.freeze(Net())
    optimizer = sgd(model)
    loader = run.loader(rows())
    for _ in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            run.record(loss)
            optimizer.zero_grad()
            loss.backward()
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
    run.see(model)


# ---- reparametrised fronts --------------------------------------------------------------------


def weight_norm(model):
    parametrizations.weight_norm(model.early)
    with torch.no_grad():
        model.early.parametrizations.weight.original0.mul_(2)


def old_weight_norm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.early)
    with torch.no_grad():
        model.early.weight_g.mul_(2)
    model.early.requires_grad_(False)


def frozen_weight_norm(model):
    weight_norm(model)
    model.early.requires_grad_(False)


def frozen_spectral_norm(model):
    parametrizations.spectral_norm(model.early)
    model.early.requires_grad_(False)


def pruned(model):
    prune.l1_unstructured(model.early, "weight", amount=0.5)


def pruned_for_good(model):
    prune.l1_unstructured(model.early, "weight", amount=0.5)
    prune.remove(model.early, "weight")
    model.early.requires_grad_(False)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized(model):
    parametrize.register_parametrization(model.early, "weight", Doubled())


@hostile
@pytest.mark.parametrize(
    "change",
    [weight_norm, frozen_weight_norm, frozen_spectral_norm, old_weight_norm, pruned,
     pruned_for_good, parametrized],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_front_that_is_reparametrised_in_mid_run_is_used(run, change):
    changed(run, change, Net(), rows())


@hostile
@pytest.mark.parametrize("leave", [True, False])
def test_a_parametrization_that_is_taken_off_is_gone(run, leave):
    model = Net()
    parametrized(model)

    def change(model):
        parametrize.remove_parametrizations(model.early, "weight", leave_parametrized=leave)
        model.early.requires_grad_(False)

    changed(run, change, model, rows())


@hostile(served=True)
@pytest.mark.parametrize(
    "before",
    [frozen_weight_norm, old_weight_norm, parametrized, pruned_for_good, frozen_spectral_norm],
    ids=lambda change: change.__name__,
)
def test_a_front_that_was_reparametrised_before_is_served(run, before):
    model = Net()
    before(model)
    run.fit(run.freeze(model), run.loader(rows()))


@hostile(served=True)
def test_an_old_spectral_norm_before_the_freeze_is_served(run):
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(model.early)
    run.fit(run.freeze(model), run.loader(rows()))


@hostile(served=True)
def test_a_pruned_front_is_served(run):
    model = Net()
    pruned(model)
    run.fit(run.freeze(model), run.loader(rows()))


@hostile
def test_a_front_pruned_a_little_more_every_epoch_is_right(run):
    model = run.freeze(Net())
    run.fit(model, run.loader(rows()), 4, each_epoch=lambda epoch: pruned(model))


# ---- dtype, layout, place ---------------------------------------------------------------------


@hostile
def test_a_model_that_becomes_double_is_right(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    run.turn()
    model.double()
    run.fit(model, loader, 2, loss=lambda m, b: F.cross_entropy(m(b[0].double()), b[1]))


@hostile
def test_a_front_alone_in_half_precision_is_right(run):
    class Mixed(Net):
        def forward(self, x):
            return self.back(self.front(x.to(self.early.weight.dtype)).float())

    model = run.freeze(Mixed())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    run.turn()
    model.early.bfloat16()
    model.middle.bfloat16()
    run.fit(model, loader, 2)


@hostile(served=True)
def test_channels_last_from_the_middle_of_training_is_right(run):
    model = run.freeze(ConvNet(), "body")
    loader = run.loader(images())
    run.fit(model, loader, 2)
    run.turn()
    model.to(memory_format=torch.channels_last)
    run.fit(
        model, loader, 6,
        loss=lambda m, b: F.cross_entropy(m(b[0].to(memory_format=torch.channels_last)), b[1]),
    )  # fmt: skip


@hostile(served=True)
def test_shared_memory_changes_nothing(run):
    changed(run, lambda m: m.share_memory(), Net(), rows(), epochs=7)


@hostile
def test_weights_tied_across_the_boundary_move_with_training(run):
    """The head's weight is the front's too: it trains, so the front is never still."""

    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.late.weight = self.middle.weight

    model = Tied()
    run.freeze(model)
    run.turn()
    model.late.weight.requires_grad_(True)
    run.fit(model, run.loader(rows()), 3)


@hostile
def test_a_front_written_by_arrays_that_share_its_memory_is_right(run):
    array = np.full((8, 6), 0.1, np.float32)
    model = Net()
    model.early.weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    changed(run, lambda m: np.negative(array, out=array), model, rows())


@hostile(served=True)
@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RMSprop", "LBFGS"])
def test_any_optimizer_behind_the_boundary_is_served(run, name):
    model = run.freeze(Net())
    active = [p for p in model.parameters() if p.requires_grad]
    make = getattr(torch.optim, name)
    optimizer = make(active, lr=0.01) if name != "LBFGS" else make(active, lr=0.1, max_iter=3)
    loader = run.loader(rows())
    for _ in range(3):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                run.record(loss)
                return loss

            optimizer.step(closure)
    run.see(model)
