"""What can be served is served: ordinary loops, each with its own habit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, Subset

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import (
    NUM_SAMPLES,
    Net,
    labels,
    rows,
)

# ---- what the loop does to its inputs ---------------------------------------------------------


# ---- loops ------------------------------------------------------------------------------------


@hostile(served=True)
def test_a_loader_made_anew_every_epoch_is_served(run):
    model = run.freeze(Net())
    data = rows()
    for _ in range(20):
        run.fit(model, run.loader(data), 1)


@hostile(served=True)
def test_a_loader_and_a_data_set_made_anew_every_epoch_are_served(run):
    model = run.freeze(Net())
    for epoch in range(4):
        run.fit(model, run.loader(Subset(rows(), [*range(24)]), shuffle=epoch > 1), 1)


@hostile(served=True)
def test_two_loaders_of_one_model_are_both_served(run):
    model = run.freeze(Net())
    loaders = [run.loader(rows()), run.loader(rows(seed=7), ours={"name": "other"})]
    for _ in range(3):
        for loader in loaders:
            run.fit(model, loader, 1)


@hostile(served=True)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between_is_served(run, context):
    model = run.freeze(Net())
    loader, other = run.loader(rows()), run.loader(rows(seed=7), 24, ours={"name": "val"})

    def evaluate(epoch):
        model.eval()
        with context():
            for x, y in other:
                run.record(F.cross_entropy(model(x), y))

    run.fit(model, loader, 5, each_epoch=evaluate)


@hostile(served=True)
def test_evaluation_in_the_middle_of_an_epoch_is_served(run):
    model = run.freeze(Net())
    other = run.loader(rows(seed=7), ours={"name": "val"})

    def evaluate(step):
        if step % 2 == 1:
            model.eval()
            with torch.no_grad():
                for x, y in other:
                    run.record(F.cross_entropy(model(x), y))
            model.train()

    run.fit(model, run.loader(rows()), 4, each_step=evaluate)


@hostile(served=True)
def test_two_calls_a_step_are_served(run):
    """R-drop: the same batch twice, dropout behind the boundary makes the difference."""

    class Dropping(Net):
        def back(self, h):
            return super().back(F.dropout(h, 0.3, self.training))

    def loss(model, batch):
        x, y = batch
        a, b = model(x), model(x)
        return F.cross_entropy(a, y) + F.cross_entropy(b, y) + F.mse_loss(a, b)

    trained(run, loss, model=Dropping())


@hostile(served=True)
def test_a_batch_used_for_several_steps_is_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model, 0.05)
    for _ in range(4):
        for batch in loader:
            for _ in range(3):
                run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile(served=True)
def test_sharpness_aware_steps_are_served(run):
    model = run.freeze(Net())
    active = [p for p in model.parameters() if p.requires_grad]
    loader = run.loader(rows())
    for _ in range(4):
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.record(loss)
            gradients = torch.autograd.grad(loss, active)
            with torch.no_grad():
                norm = torch.stack([g.norm() for g in gradients]).norm()
                for p, g in zip(active, gradients, strict=True):
                    p.add_(g, alpha=0.05 / float(norm))
            second = torch.autograd.grad(cross_entropy(model, batch), active)
            with torch.no_grad():
                for p, g, h in zip(active, gradients, second, strict=True):
                    p.sub_(g, alpha=0.05 / float(norm)).sub_(h, alpha=0.1)
    run.see(model)


@hostile(served=True)
def test_double_backward_is_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model, 0.05)
    for _ in range(4):
        for batch in loader:
            loss = cross_entropy(model, batch)
            gradients = torch.autograd.grad(loss, [*model.head.parameters()], create_graph=True)
            run.step(loss + sum(g.square().sum() for g in gradients), optimizer)
    run.see(model)


@hostile(served=True)
def test_autocast_and_a_scaler_are_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(4):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            run.record(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run.see(model)


@hostile(served=True)
def test_a_teacher_by_deepcopy_is_right_beside_it(run):
    model = run.freeze(Net())
    teacher = copy.deepcopy(model).requires_grad_(False).eval()

    def loss(model, batch):
        x, y = batch
        with torch.no_grad():
            target = teacher(x)
        return F.cross_entropy(model(x), y) + F.mse_loss(model(x), target)

    run.fit(model, run.loader(rows()), 4, loss=loss)


@hostile(served=True)
def test_a_mean_teacher_follows_the_student(run):
    model = run.freeze(Net())
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model, batch):
        x, y = batch
        with torch.no_grad():
            target = teacher(x)
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return F.cross_entropy(model(x), y) + F.mse_loss(model(x), target)

    run.fit(model, run.loader(rows()), 4, loss=loss)


@hostile(served=True)
@pytest.mark.parametrize("region", ["behind", "ends at the boundary", "layers of the head"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_served(run, region, reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            if region == "ends at the boundary":
                h = checkpoint(self.front, x, use_reentrant=reentrant)
                return self.back(h)
            h = self.front(x)
            if region == "behind":
                return checkpoint(self.back, h, use_reentrant=reentrant)
            h = checkpoint(self.late, torch.tanh(h), use_reentrant=reentrant)
            return self.head(torch.tanh(h))

    model = Checkpointed()
    if reentrant and region != "ends at the boundary":
        # The reentrant kind needs an input that asks for a gradient.
        class Asking(Checkpointed):
            def __init__(self):
                super().__init__()
                self.one = nn.Parameter(torch.ones(()))

            def front(self, x):
                return super().front(x) * self.one

        model = Asking()
        model.one.requires_grad_(True)
    with_warnings(run, model)


def with_warnings(run, model):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(run, model=model)


@hostile(served=True)
def test_a_last_partial_batch_is_served(run):
    trained(run, data=rows(21), shuffle=True)


@hostile(served=True)
def test_a_model_inside_of_the_users_module_is_served(run):
    """As Lightning's modules hold theirs: the cache is given the inner one."""

    class Module(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return cross_entropy(self.model, batch)

    model = run.freeze(Net())
    outer = Module(model)
    run.fit(outer, run.loader(rows()), 4, loss=lambda outer, batch: outer.training_step(batch))


@hostile(served=True)
def test_the_model_may_take_its_loss_along(run):
    class Lossy(Net):
        def forward(self, x, y=None):
            out = super().forward(x)
            return (out, None if y is None else F.cross_entropy(out, y))

    trained(run, lambda m, b: m(b[0], y=b[1])[1], model=Lossy())


@hostile(served=True)
def test_hidden_states_of_the_front_that_the_model_returns_are_served(run):
    class Returning(Net):
        def forward(self, x):
            early = torch.tanh(self.early(x))
            h = self.middle(early)
            return {"logits": self.back(h), "hidden": [early, h]}

    def loss(model, batch):
        out = model(batch[0])
        return F.cross_entropy(out["logits"], batch[1]) + sum(h.mean() for h in out["hidden"])

    trained(run, loss, model=Returning())


@hostile(served=True)
@pytest.mark.parametrize("order", [["early", "middle", "late"], ["middle", "early", "middle"]])
def test_a_boundary_that_moves_is_served_where_it_comes_to_rest(run, order):
    model = run.freeze(Net(), "early")
    loader = run.loader(rows())
    for boundary in order:
        run.move(model, boundary)
        run.fit(model, loader, 3)


@hostile(served=True)
def test_learning_rates_and_losses_may_change_at_will(run):
    model = run.freeze(Net())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    losses = [
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        lambda m, b: F.multi_margin_loss(m(b[0]), b[1]),
    ]

    def each_step(step):
        if step:
            schedule.step()

    steps = iter(range(100))
    run.fit(
        model, run.loader(rows()), 4, optimizer=optimizer, each_step=each_step,
        loss=lambda m, b: losses[next(steps) % 2](m, b),
    )  # fmt: skip


@hostile(served=True)
def test_active_layers_may_be_frozen_and_thawed_at_will(run):
    model = run.freeze(Net())

    def each_epoch(epoch):
        model.late.requires_grad_(epoch % 2 == 0)

    run.fit(model, run.loader(rows()), 5, each_epoch=each_epoch)


@hostile(served=True)
def test_a_head_replaced_by_a_wider_one_is_served_on(run):
    """Class-incremental training."""
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    model.head = nn.Linear(8, 5)
    run.fit(model, loader, 2)


@hostile(served=True)
def test_a_head_with_an_adapter_that_joins_is_served_on(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    model.late = nn.Sequential(model.late, nn.Tanh(), nn.Linear(8, 8))
    run.fit(model, loader, 2)


@hostile(served=True)
def test_weights_and_optimizer_loaded_from_a_checkpoint_are_served_on(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = run.fit(model, loader, 2)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    run.fit(model, loader, 1, optimizer=optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    run.fit(model, loader, 4, optimizer=optimizer)


class Noisy(Dataset):
    """A data set that draws from a generator of its own per sample: the same every time."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), labels()[index]


@hostile(served=True)
def test_a_data_set_with_generators_of_its_own_is_served(run):
    trained(run, data=Noisy())
