"""Loops that do further things: schedules, turns, evaluations, copies, `auto`, filling."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import (
    ConvNet,
    Net,
    Normed,
    Pairs,
    Residual,
    Scale,
    Tokens,
    images,
    inputs,
    rows,
    saved,
    sentences,
)

# ---- loops ------------------------------------------------------------------------------------


@hostile
def test_lbfgs_with_a_closure(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = torch.optim.LBFGS(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=4
    )
    for _ in range(3):
        for batch in loader:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                run.record(loss)
                loss.backward()
                return loss

            optimizer.step(closure)
    run.see(model)


@hostile(served=True)
def test_adversarial_features_in_turns(run):
    """A critic on the head's output, trained in turns with the head."""
    model, critic = run.freeze(Net()), nn.Linear(3, 1)
    loader, one, two = run.loader(rows()), sgd(model), sgd(critic)
    for _ in range(4):
        for number, (x, y) in enumerate(loader):
            out = model(x)
            if number % 2:
                run.step(critic(out.detach()).square().mean(), two)
            else:
                run.step(F.cross_entropy(out, y) + critic(out).mean(), one)
    run.see(model)


@hostile
def test_an_exception_in_the_head_that_is_caught(run):
    class Failing(Net):
        calls = 0

        def back(self, h):
            self.calls += 1
            if self.calls % 4 == 2:
                raise ArithmeticError("again")
            return super().back(h)

    model = run.freeze(Failing())
    loader, optimizer = run.loader(rows()), sgd(model)
    for _ in range(4):
        for batch in loader:
            with contextlib.suppress(ArithmeticError):
                run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile
def test_an_exception_in_the_front_that_is_caught(run):
    class Failing(Net):
        def front(self, x):
            if x.shape[0] == 5:
                raise ArithmeticError("five")
            return super().front(x)

    model = run.freeze(Failing())
    loader, optimizer = run.loader(rows(21)), sgd(model)
    for _ in range(4):
        for batch in loader:
            with contextlib.suppress(ArithmeticError):
                run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile
def test_a_loop_that_halves_its_batch_when_memory_runs_out(run):
    class Small(Net):
        def back(self, h):
            if len(h) > 4:
                raise MemoryError
            return super().back(h)

    def loss(model, batch):
        x, y = batch
        try:
            return F.cross_entropy(model(x), y)
        except MemoryError:
            return (F.cross_entropy(model(x[:4]), y[:4]) + F.cross_entropy(model(x[4:]), y[4:])) / 2

    trained(run, loss, model=Small(), epochs=4)


@hostile
def test_early_breaks_and_evaluation_in_between(run):
    model = run.freeze(Normed())
    loader, val, optimizer = run.loader(rows()), run.loader(rows(16, 5)), None
    optimizer = sgd(model)
    for epoch in range(5):
        model.train()
        for number, batch in enumerate(loader):
            if number == epoch % 3:
                break
            run.step(cross_entropy(model, batch), optimizer)
        model.eval()
        with torch.inference_mode():
            run.record(sum(cross_entropy(model, batch) for batch in val))
    run.see(model)


@hostile
def test_training_in_eval_mode(run):
    model = run.freeze(ConvNet(), "body")
    loader, optimizer = run.loader(images()), sgd(model, 0.05)
    for epoch in range(4):
        model.train(epoch % 2 == 0)
        for batch in loader:
            run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile
def test_scaler_and_clipping(run):
    model = run.freeze(Net())
    loader, optimizer = run.loader(rows()), sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            run.record(loss)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    run.see(model)


@hostile
def test_optimizers_swapped_with_all_parameters(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    run.fit(model, loader, 2, optimizer=torch.optim.AdamW(model.parameters(), 0.01))


@hostile
def test_a_checkpoint_with_the_frozen_front_perturbed(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    kept = saved(model.state_dict())
    run.fit(model, loader, 2)
    state = torch.load(kept)
    state["early.weight"] += 0.5
    model.load_state_dict(state)
    run.turn()
    run.fit(model, loader, 2)


@hostile
def test_a_model_copied_in_mid_run_trains_on_as_the_model(run):
    model = run.freeze(Normed())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    other = copy.deepcopy(model)
    other.train()
    optimizer = sgd(other)
    for batch in loader:
        run.see(cross_entropy(other, batch))
        loss = cross_entropy(other, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run.fit(model, loader, 2)


@hostile
def test_k_folds_with_a_model_and_a_cache_each(run):
    data = Pairs()
    for fold in range(3):
        torch.manual_seed(3)
        model = run.freeze(Net())
        keep = [i for i in range(24) if i % 3 != fold]
        run.fit(model, run.loader(torch.utils.data.Subset(data, keep)), 2)
        run.close()


@hostile
def test_several_seeds_in_one_directory(run):
    for seed in range(3):
        torch.manual_seed(seed)
        model = run.freeze(Net())
        run.fit(model, run.loader(rows()), 2)


@hostile
def test_heads_tried_one_after_the_other_on_one_trunk(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True)
    for seed in range(3):
        torch.manual_seed(seed)
        model.head.reset_parameters()
        model.late = nn.Linear(8, 8)
        run.fit(model, loader, 2)


@hostile
def test_a_front_trained_for_one_epoch_in_three(run):
    model = run.freeze(Net())
    optimizer = sgd(model)

    def each_epoch(epoch):
        model.early.requires_grad_(epoch % 3 == 1)
        model.early.zero_grad()

    run.fit(model, run.loader(rows()), 7, each_epoch=each_epoch, optimizer=optimizer)


@hostile
def test_a_front_trained_in_every_second_step(run):
    model = run.freeze(Net())

    def each_step(step):
        model.early.requires_grad_(step % 2 == 1)

    run.fit(model, run.loader(rows()), 5, each_step=each_step)


@hostile
def test_a_gradient_taken_by_hand_for_the_front(run):
    """`torch.autograd.grad` for a frozen weight that is thawed for the call alone."""
    model = run.freeze(Net())
    loader, optimizer = run.loader(rows()), sgd(model)
    for epoch in range(4):
        for x, y in loader:
            if epoch == 2:
                model.early.weight.requires_grad_(True)
                loss = F.cross_entropy(model(x), y)
                run.see(torch.autograd.grad(loss, model.early.weight)[0])
                model.early.weight.requires_grad_(False)
            run.step(F.cross_entropy(model(x), y), optimizer)
    run.see(model)


@hostile
def test_a_front_moved_by_hand_every_epoch(run):
    model = run.freeze(Net())

    def each_epoch(epoch):
        with torch.no_grad():
            for p in model.early.parameters():
                p.lerp_(torch.ones_like(p), 0.01)

    run.fit(model, run.loader(rows()), 4, each_epoch=each_epoch)


@hostile
def test_noise_put_on_the_weights_and_taken_off_in_each_step(run):
    model = run.freeze(Net())
    loader, optimizer = run.loader(rows()), sgd(model)
    for _ in range(4):
        for x, y in loader:
            noise = 0.1 * torch.randn_like(model.early.weight)
            model.early.weight.data.add_(noise)
            run.step(F.cross_entropy(model(x), y), optimizer)
            model.early.weight.data.sub_(noise)
    run.see(model)


@hostile
def test_a_checkpointed_head(run):
    class Checked(Net):
        def back(self, h):
            return checkpoint(super().back, h, use_reentrant=False)

    trained(run, model=Checked(), epochs=4)


@hostile
def test_a_checkpointed_front(run):
    class Checked(Net):
        def front(self, x):
            return checkpoint(super().front, x, use_reentrant=False)

    trained(run, model=Checked(), epochs=4)


@hostile
def test_a_teacher_that_shares_the_front(run):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.front = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
            self.student, self.teacher = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

        def forward(self, x):
            h = self.front(x)
            return self.student(h), self.teacher(h)

    def loss(model, batch):
        student, teacher = model(batch[0])
        return F.mse_loss(student, teacher) + F.cross_entropy(student, batch[1])

    model = run.freeze(Both(), "front")
    loader, steps = run.loader(rows()), iter(range(1000))

    def each_step(step):
        next(steps)
        with torch.no_grad():
            for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                t.lerp_(s, 0.1)

    run.fit(model, loader, 4, loss=loss, each_step=each_step)


@hostile
def test_two_models_with_one_loader(run):
    model, other = run.freeze(Net()), Net()
    loader, optimizer, second = run.loader(rows()), sgd(model), sgd(other)
    for epoch in range(4):
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y), optimizer)
            loss = F.cross_entropy(other(x if epoch else x * 2), y)
            run.see(loss)
            second.zero_grad()
            loss.backward()
            second.step()
    run.see(other)


@hostile
def test_the_front_called_alone_for_a_probe(run):
    model = run.freeze(Net())
    loader, optimizer = run.loader(rows()), sgd(model)
    for _ in range(3):
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y), optimizer)
            with torch.no_grad():
                run.see(model.front(x))
                run.see(model.early(x).mean())
    run.see(model)


@hostile
def test_inputs_and_outputs_are_logged_each_step(run):
    model = run.freeze(Net())
    loader, optimizer = run.loader(rows()), sgd(model)
    for _ in range(3):
        for x, y in loader:
            out = model(x)
            run.see(x.clone())
            run.see(float(x.abs().max()))
            run.see(out)
            run.see((out.argmax(1) == y).float().mean())
            run.step(F.cross_entropy(out, y), optimizer)


@hostile
def test_double_from_the_middle_and_back(run):
    model = run.freeze(Net())

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.to(model.head.weight.dtype)), y).float()

    def each_epoch(epoch):
        if epoch in (2, 4):
            model.to(torch.float64 if epoch == 2 else torch.float32)
            for state in optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"] = state["momentum_buffer"].to(model.head.weight.dtype)

    optimizer = sgd(model)
    run.fit(model, run.loader(rows()), 6, loss=loss, each_epoch=each_epoch, optimizer=optimizer)


@hostile
def test_randomness_of_the_loop_between_the_batches(run):
    model = run.freeze(Net())

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + torch.rand(()))

    run.fit(model, run.loader(rows(), shuffle=True), 4, loss=loss)


@hostile
def test_seeds_set_anew_every_epoch(run):
    model = run.freeze(Tokens(), "block")
    run.fit(
        model, run.loader(sentences(), shuffle=True), 4,
        each_epoch=lambda epoch: torch.manual_seed(epoch % 2),
    )  # fmt: skip


# ---- boundary="auto" --------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


class Quiet(Blocks):
    """Nothing in the front that a mode changes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))


def front(model, number):
    """Freeze the stem and so many blocks; thaw the others."""
    model.stem.requires_grad_(number == 0)
    for i, block in enumerate(model.blocks):
        block.requires_grad_(i >= number)
    if number == 0:
        model.stem.requires_grad_(True)


def automatic(run, change=lambda model, epoch: None, model=None, epochs=6, start=2, **options):
    model = model or Quiet()
    names = ("stem", *(f"blocks.{i}" for i in range(start)))
    model = run.freeze(model, "auto", names, **options)

    def each_epoch(epoch):
        change(model, epoch)
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [p for p in model.parameters() if id(p) not in known]
        if new:
            optimizer.add_param_group({"params": new})

    optimizer = sgd(model, 0.05)
    run.fit(model, run.loader(rows()), epochs, each_epoch=each_epoch, optimizer=optimizer)


@hostile(served=True)
def test_auto_as_it_stands(run):
    automatic(run)


@hostile(served=True)
def test_auto_with_norms_and_dropout(run):
    automatic(run, model=Blocks())


SCHEDULES = {
    "forward": (1, 1, 2, 2, 3, 3, 4, 4),
    "back": (4, 4, 3, 3, 2, 2, 1, 1),
    "to and fro": (1, 4, 1, 4, 2, 2, 2, 2),
    "thawed and frozen": (2, 2, 0, 0, 2, 2, 2, 2),
    "nothing at first": (0, 0, 3, 3, 3, 3, 3, 3),
}


@hostile(served=True)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_auto_follows_a_schedule(run, kind):
    schedule = SCHEDULES[kind]
    automatic(run, lambda m, e: front(m, schedule[e]), epochs=8)


@hostile
def test_auto_with_a_step_thawed_in_mid_epoch(run):
    model = run.freeze(Quiet(), "auto", ("stem", "blocks.0", "blocks.1"))

    def each_step(step):
        front(model, {4: 1, 7: 3, 8: 2, 9: 3}.get(step, 2) if step < 12 else 3)

    run.fit(model, run.loader(rows()), 7, each_step=each_step, optimizer=sgd(model, 0.05))


def adapter(model, epoch):
    if epoch == 2:
        model.blocks[0] = Residual(model.blocks[0])


def adapter_at_once(model, epoch):
    if epoch == 0:
        model.blocks[1] = Residual(model.blocks[1])


def replaced(model, epoch):
    if epoch == 2:
        model.blocks[1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)


def replaced_by_trained(model, epoch):
    if epoch == 2:
        model.blocks[0] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def deleted(model, epoch):
    if epoch == 2:
        del model.blocks[0]


def inserted(model, epoch):
    if epoch == 2:
        model.blocks.insert(0, nn.Linear(8, 8))


def prompted(model, epoch):
    if epoch == 2:
        model.stem.register_parameter("prompt", nn.Parameter(torch.zeros(8)))
        model.stem.register_forward_hook(lambda m, a, out: out + m.prompt)


def new_weight(model, epoch):
    if epoch == 2:
        model.blocks[0][0].weight = nn.Parameter(model.blocks[0][0].weight.detach().clone())


def new_bias_frozen(model, epoch):
    if epoch == 2:
        model.blocks[0][0].bias = nn.Parameter(torch.ones(8), requires_grad=False)


def frozen_by_replacement(model, epoch):
    """A further block is frozen by putting frozen parameters in the place of its own."""
    if epoch == 2:
        for layer in model.blocks[2]:
            for name, p in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(p.detach().clone(), requires_grad=False))


def bitfit(model, epoch):
    if epoch == 2:
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))


def written(model, epoch):
    if epoch == 2:
        with torch.no_grad():
            model.blocks[0][0].weight.mul_(-1)


def shared(model, epoch):
    if epoch == 2:
        model.blocks[0][0].weight = model.blocks[3][0].weight


CHANGES = [
    adapter, adapter_at_once, replaced, replaced_by_trained, deleted, inserted, prompted,
    new_weight, new_bias_frozen, frozen_by_replacement, bitfit, written, shared,
]  # fmt: skip


@hostile
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_auto_when_the_model_becomes_another(run, change):
    automatic(run, change)


@hostile
def test_auto_with_a_lora_on_everything(run):
    """Nothing is frozen in front but the stem."""

    def change(model, epoch):
        if epoch == 0:
            for i in range(4):
                model.blocks[i] = Residual(model.blocks[i].requires_grad_(False))

    automatic(run, change, start=0)


@hostile
def test_auto_with_only_the_head_trained_and_then_everything(run):
    automatic(run, lambda m, e: m.requires_grad_(True) if e == 4 else None, start=4)


@hostile
def test_auto_with_evaluation_under_no_grad_first(run):
    model = run.freeze(Quiet(), "auto", ("stem", "blocks.0"))
    loader = run.loader(rows())
    with torch.no_grad():
        for x, _ in loader:
            run.record(model(x).sum())
    run.fit(model, loader, 4, optimizer=sgd(model, 0.05))


@hostile
def test_auto_with_inputs_that_are_not_the_loaders_first(run):
    model = run.freeze(Quiet(), "auto", ("stem", "blocks.0"))
    run.see(model(inputs()[:4]))
    run.fit(model, run.loader(rows()), 4, optimizer=sgd(model, 0.05))


@hostile
def test_auto_then_a_deep_copy_that_trains_all(run):
    model = run.freeze(Quiet(), "auto", ("stem", "blocks.0"))
    loader = run.loader(rows())
    run.fit(model, loader, 2, optimizer=sgd(model, 0.05))
    other = copy.deepcopy(model).requires_grad_(True)
    optimizer = sgd(other, 0.05)
    for batch in loader:
        loss = cross_entropy(other, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run.see(other)
    run.fit(model, loader, 2, optimizer=sgd(model, 0.05))


# ---- filling ----------------------------------------------------------------------------------


def filled(run, model, boundary, loader, forward=None):
    if run.cache is not None and run.way != "never":
        run.cache.fill(loader, forward, progress=False)
    return model, boundary


def filled_and_trained(run, model=None, boundary="middle", data=None, change=None, **kwargs):
    frozen = ("stem", "blocks.0", "blocks.1") if boundary == "auto" else None
    model = run.freeze(model or Net(), boundary, frozen)
    data = rows() if data is None else data
    loader = run.loader(data, **kwargs)
    filled(run, model, boundary, loader)
    if change is not None:
        run.turn()
        change(model, data)
    run.fit(model, loader, 4, optimizer=sgd(model, 0.05))


@hostile(served=True)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"shuffle": True}, {"batch_size": 5}, {"batch_size": 7, "drop_last": True}],
    ids=["plain", "shuffled", "uneven", "drop_last"],
)
def test_filled_then_trained(run, kwargs):
    filled_and_trained(run, **kwargs)


@hostile(served=True)
def test_filled_then_trained_with_norms_and_dropout(run):
    filled_and_trained(run, ConvNet(), "body", images(), shuffle=True)


@hostile(served=True)
def test_filled_then_trained_with_tokens(run):
    filled_and_trained(run, Tokens(), "block", sentences())


@hostile(served=True)
def test_filled_under_auto(run):
    filled_and_trained(run, Blocks(), "auto")


@hostile
@pytest.mark.parametrize("what", ["weight", "thawed", "data", "transform", "forward", "hook"])
def test_filled_then_something_changes(run, what):
    def change(model, data):
        if what == "weight":
            with torch.no_grad():
                model.early.weight.mul_(-1)
        elif what == "thawed":
            model.early.requires_grad_(True)
        elif what == "data":
            data.x.mul_(-1)
        elif what == "transform":
            data.transform = Scale(2.0)
        elif what == "forward":
            plain = model.early.forward
            model.early.forward = lambda x: -plain(x)
        else:
            model.early.register_forward_hook(lambda m, a, out: -out)

    filled_and_trained(run, data=Pairs(), change=change)


@hostile
def test_filled_in_mid_run(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True)
    optimizer = run.fit(model, loader, 1)
    filled(run, model, "middle", loader)
    run.fit(model, loader, 2, optimizer=optimizer)


@hostile
def test_filled_leaves_a_counting_head_alone(run):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.calls, self.norm = 0, nn.BatchNorm1d(8)

        def back(self, h):
            self.calls += 1
            self.seen += len(h)
            return super().back(self.norm(h)) * (1 + 0.01 * self.calls)

    filled_and_trained(run, Counting())


@hostile
def test_filled_by_a_loop_with_other_inputs(run):
    """What was filled is another preparation than what training uses."""
    model = run.freeze(Net())
    loader = run.loader(rows())
    filled(run, model, "middle", loader, lambda batch: model(batch[0] * 2))
    run.fit(model, loader, 3)


@hostile
def test_filled_while_evaluating(run):
    model = run.freeze(ConvNet(), "body")
    model.eval()
    loader, val = run.loader(images()), run.loader(images(16))
    filled(run, model, "body", loader)
    run.see(model.training)
    model.eval()
    with torch.no_grad():
        for batch in val:
            run.record(cross_entropy(model, batch))
    run.fit(model, loader, 3, optimizer=sgd(model, 0.05))


@hostile
def test_filled_with_random_augmentation(run):
    class Noisy(Pairs):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x, y, torch.tensor(i)

    model = run.freeze(Net())
    loader = run.loader(Noisy(), shuffle=True)
    filled(run, model, "middle", loader)
    run.fit(model, loader, 3, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * b[2].sum())
