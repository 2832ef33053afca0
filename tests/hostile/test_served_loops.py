"""What can be served is served, and what is not is right: loops, each with its own habit."""

import collections
import contextlib
import copy
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset, TensorDataset

from tests.helpers.steps import take_step
from tests.hostile.harness import cross_entropy, hostile, judge, sgd
from tests.hostile.loops import ce, numbered, trained
from tests.hostile.nets import ConvNet, Net, Pairs, images, inputs, made, net, rows

# ---- loaders and evaluations ------------------------------------------------------------------


@hostile(served=True)
@pytest.mark.parametrize("data_too", [False, True])
def test_a_loader_made_anew_every_epoch_is_served(run, data_too):
    model, data = run.freeze(Net()), rows()
    for epoch in range(8):
        data = Subset(rows(), [*range(24)]) if data_too else data
        run.fit(model, run.loader(data, shuffle=data_too and epoch > 1), 1)


@hostile(served=True)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("when", ["each_epoch", "each_step"])
def test_evaluation_in_between_is_served(run, context, when):
    model = run.freeze(Net())
    loader, other = run.loader(rows()), run.loader(rows(seed=7), 24, ours={"name": "val"})

    def evaluate(number):
        model.eval()
        with context():
            for batch in other if number % 2 else ():
                run.record(cross_entropy(model, batch))
        model.train()

    run.fit(model, loader, 5, **{when: evaluate})


@hostile(silent=True)
def test_augmentation_in_an_evaluation_is_no_habit_of_the_loop(run):
    model = run.freeze(Net())
    loader, other = run.loader(rows()), run.loader(rows(seed=7), 24, ours={"name": "val"})

    def evaluate(_):
        with torch.no_grad():
            for x, _ in other:
                run.record(model(x) + model(x.flip(-1)) + model(x.roll(1, -1)))

    run.fit(model, loader, 4, each_step=evaluate)


def test_an_evaluation_of_a_copy_alone_is_no_call_that_is_missing(monkeypatch):
    """Nor while the loop's own batches are computed plainly, for a proof would not pay."""
    monkeypatch.delenv("EGERIA_POSTPONE")

    def script(run):
        def evaluate(model, epoch):
            follower = copy.deepcopy(model)
            with torch.no_grad():
                for x, _ in run.loader(rows(seed=7), ours={"name": "val"}):
                    run.see(follower(x))

        trained(run, each_epoch=evaluate)

    judge(script, silent=True)


@hostile(silent=True)
def test_an_evaluation_before_the_training_is_no_batch_that_is_missing(run):
    evaluate = torch.no_grad()(lambda m, epoch: [run.see(m(x)) for x in inputs().split(4)])
    trained(run, each_epoch=evaluate)


@pytest.mark.parametrize("shared", [0, 1])
@hostile(silent=True)
def test_three_leaves_of_a_batch_are_three_calls_of_one(run, shared):
    """As for a triplet's loss; and with another leaf in each of them, as of users and items."""
    data = TensorDataset(*(rows(seed=seed).tensors[0] for seed in (1, 2, 3, 4)))
    model = net(forward=lambda m, x, y=0.0: m.back(m.front(x + y)))
    loss = lambda m, b: F.triplet_margin_loss(*(m(x, *b[3:][:shared]) for x in b[:3]))  # noqa: E731
    trained(run, loss, model=model, data=data, epochs=4)


@hostile(silent=True)
@pytest.mark.parametrize("boundary", ["auto", "middle"])
@pytest.mark.parametrize("failing", [(0,), (0, 1), (2,)])
def test_calls_that_raise_and_are_caught_are_none(run, boundary, failing):
    where = "middle" if run.is_plain else boundary
    model = run.freeze(Net(), where, ("early", "middle"))
    loss = numbered(lambda m, x, y, n: ce(m, x[:, :5] if n in failing else x, y))
    run.fit(model, run.loader(rows()), 4, loss=loss, catching=(RuntimeError,))


@hostile(served=True)
@pytest.mark.parametrize("parts", ["stem", "body", "stem body head"])
def test_compiled_blocks_whose_norms_train_are_served(run, parts):
    torch.manual_seed(1)
    model = ConvNet()
    for part in parts.split():
        model.get_submodule(part).compile(backend="eager")
    run.fit(run.freeze(model, "body"), run.loader(images()), 3)


@hostile
@pytest.mark.parametrize("kind", ["folds", "seeds"])
def test_several_trainings_in_one_directory(run, kind):
    data = Pairs()
    for number in range(3):
        torch.manual_seed(3 if kind == "folds" else number)
        keep = [i for i in range(24) if kind == "seeds" or i % 3 != number]
        trained(run, data=Subset(data, keep), epochs=2)
        run.close()


@hostile
def test_two_models_with_one_loader(run):
    model, other = run.freeze(Net()), Net()
    loader, optimizer, second = run.loader(rows()), sgd(model), sgd(other)
    for epoch in range(4):
        for x, y in loader:
            run.step(ce(model, x, y), optimizer)
            loss = ce(other, x if epoch else x * 2, y)
            run.see(take_step(loss, second))
    run.see(other)


@hostile(silent=True)
def test_a_training_in_a_thread_is_served(run):
    """The cache is made in another one."""
    model, loader, errors = run.freeze(dropping()), run.loader(rows(), shuffle=True), []

    def work():
        try:
            run.fit(model, loader, 4)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors


# ---- steps ------------------------------------------------------------------------------------


def dropping():
    return net(back=lambda m, h: Net.back(m, F.dropout(h, 0.3, m.training)))


def twice(m, x, y, n):
    """R-drop: the same batch twice, dropout behind the boundary makes the difference."""
    a, b = m(x), m(x)
    return F.cross_entropy(a, y) + F.cross_entropy(b, y) + F.mse_loss(a, b)


def loss_of_two_kinds(m, x, y, n):
    return (F.cross_entropy if n % 2 else F.multi_margin_loss)(m(x), y)


@hostile(over={"twice": twice, "of two kinds": loss_of_two_kinds}, served=True)
def test_losses_of_any_kind_are_served(run, loss):
    trained(run, numbered(loss), model=dropping())


@hostile(served=True)
@pytest.mark.parametrize("steps", [3, 0.5], ids=["several for a batch", "one for two batches"])
def test_batches_and_steps_of_other_numbers_are_served(run, steps):
    model, seen = run.freeze(Net()), []
    model.register_forward_hook(lambda *_: seen.append(len(seen)))  # it is none of the front's
    loader, optimizer = run.loader(rows(), 4), sgd(model, 0.05)
    for _ in range(4):
        for number, batch in enumerate(loader):
            for _ in range(max(1, int(steps))):
                loss = cross_entropy(model, batch)
                run.record(loss)
                loss.backward()
                if steps >= 1 or number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    run.see(model)


@hostile(served=True)
def test_double_backward_is_served(run):
    def loss(model, batch):
        value = cross_entropy(model, batch)
        gradients = torch.autograd.grad(value, [*model.head.parameters()], create_graph=True)
        return value + sum(g.square().sum() for g in gradients)

    trained(run, loss, optimizer=lambda model: sgd(model, 0.05), epochs=4)


@hostile(served=True)
def test_autocast_and_a_scaler_are_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(4):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            run.record(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    run.see(model)


@hostile(served=True)
@pytest.mark.parametrize("follows", [False, True])
def test_a_teacher_by_deepcopy_is_right_beside_it(run, follows):
    model = run.freeze(Net())
    teacher = copy.deepcopy(model).requires_grad_(False).train(follows)

    def loss(model, batch):
        with torch.no_grad():
            target = teacher(batch[0])
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1 * follows)
        return cross_entropy(model, batch) + F.mse_loss(model(batch[0]), target)

    run.fit(model, run.loader(rows()), 4, loss=loss)


@hostile(served=True)
@pytest.mark.parametrize("region", ["behind", "ends at the boundary", "layers of the head"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_served(run, region, reentrant):
    # The reentrant kind needs an input that asks for a gradient.
    asks = reentrant and region != "ends at the boundary"

    def forward(model, x):
        if region == "ends at the boundary":
            return model.back(checkpoint(model.front, x, use_reentrant=reentrant))
        h = model.front(x)
        h = h * model.one if asks else h
        if region == "behind":
            return checkpoint(model.back, h, use_reentrant=reentrant)
        h = checkpoint(model.late, torch.tanh(h), use_reentrant=reentrant)
        return model.head(torch.tanh(h))

    model = net(forward=forward, **({"one": nn.Parameter(torch.ones(()))} if asks else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(run, model=model)


# ---- models -----------------------------------------------------------------------------------


def lossy(model, x, y=None):
    out = Net.forward(model, x)
    return out, None if y is None else F.cross_entropy(out, y)


def returning(model, x):
    early = torch.tanh(model.early(x))
    h = model.middle(early)
    return {"logits": model.back(h), "hidden": [early, h]}


def hidden_loss(m, b):
    out = m(b[0])
    return F.cross_entropy(out["logits"], b[1]) + sum(h.mean() for h in out["hidden"])


RETURNED = {
    "the loss": (lossy, lambda m, b: m(b[0], y=b[1])[1]),
    "hidden states": (returning, hidden_loss),
    "written to": (lambda m, x: m.back((h := m.front(x)).add_(m.late(h * 1))), cross_entropy),
    "itself": (
        lambda m, x: {"features": m.middle(m.early(x)), "of": m},
        lambda m, b: F.cross_entropy((given := m(b[0]))["of"].back(given["features"]), b[1]),
    ),
}  # fmt: skip


class Largest(nn.Linear):
    def forward(self, found, shape):
        return super().forward(found.values.view(shape))


@hostile(served=True)
def test_tuples_of_pytorchs_own_are_given_to_skipped_modules(run):
    give = lambda m, x: m.back(m.middle((h := m.early(x))[:, None].max(1), h.shape))  # noqa: E731
    trained(run, model=net(forward=give, middle=Largest(8, 8)))


@hostile(over=RETURNED, served=True)
def test_what_the_model_returns_besides_is_served(run, forward, loss):
    trained(run, loss, model=net(forward=forward))


@hostile(served=True)
@pytest.mark.parametrize("order", [["early", "middle", "late"], ["middle", "early", "middle"]])
def test_a_boundary_that_moves_is_served_where_it_comes_to_rest(run, order):
    model = run.freeze(Net(), "early")
    loader = run.loader(rows())
    for boundary in order:
        run.move(model, boundary)
        run.fit(model, loader, 3)


@hostile
def test_a_boundary_moved_every_epoch(run):
    model = run.freeze(Net())
    move = lambda epoch: run.move(model, ["early", "middle"][epoch % 2])  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.fit(model, run.loader(rows()), 4, each_epoch=move, optimizer=optimizer)


def frozen_and_thawed(model, epoch):
    model.late.requires_grad_(epoch % 2 == 0)


def adapter_that_joins(model, epoch):
    if epoch == 2:
        model.late = nn.Sequential(model.late, nn.Tanh(), nn.Linear(8, 8))


def loaded_from_a_checkpoint(model, epoch):
    if epoch == 1:
        model.kept = copy.deepcopy(model.state_dict())
    if epoch == 2:
        model.load_state_dict(model.kept)


def weights_of_one_vector(model, epoch):
    """Frozen and trained weights lie side by side in the same memory."""
    if epoch in (0, 2):
        weights = list(model.parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(weights).detach(), weights)


CHANGES = {
    "weights of one vector": weights_of_one_vector,
    "frozen and thawed": frozen_and_thawed,
    "an adapter that joins": adapter_that_joins,
    "loaded from a checkpoint": loaded_from_a_checkpoint,
}


@hostile(over=CHANGES, served=True)
def test_the_active_part_may_change_at_will(run, change):
    """Its layers are frozen, classes are added, weights and optimizers loaded."""
    model = run.freeze(Net())
    loader = run.loader(rows())
    for epoch in range(5):
        change(model, epoch)
        run.fit(model, loader, 1)


@hostile(served=True)
def test_a_moving_target_network_beside_the_front(run):
    def forward(model, x):
        h = model.front(x)
        return model.back(h) + 0.1 * model.target(h)

    def move(model, step):
        with torch.no_grad():
            for a, b in zip(model.target.parameters(), model.head.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)

    model = net(forward=forward, target=nn.Linear(8, 3).requires_grad_(False))
    trained(run, model=model, each_step=move, epochs=4)


# ---- what changes, and decides nothing, or comes again -----------------------------------------


def given(run, numbers):
    loss = numbered(lambda m, x, y, n: sum(ce(lambda x, k=k: m(x, k), x, y) for k in numbers(n)))
    trained(run, loss, model=net(forward=lambda m, x, k: m.back(m.front(x * (1 + k)))), epochs=8)


class Meter:
    total = 0.0

    def add(self, value):
        self.total = self.total + value
        return value


def a_log_of_layers(run, of):
    log, meters, model = [], collections.defaultdict(Meter), Net()
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, x, y, name=name: log.append(
                (name, of(meters[name], y.detach().mean().item()))
            )
        )
    trained(run, model=model)
    run.see([len(log), *(round(meter.total, 4) for meter in meters.values())])


def a_rate_of_numpys(run):
    model = net(forward=lambda m, x, rate: m.back(m.front(x)) * rate)
    trained(run, numbered(lambda m, x, y, n: ce(lambda x: m(x, np.exp(-n / 9)), x, y)), model=model)


def negated(run):
    weight = nn.Parameter(torch.full((2,), 1 + 1j).conj().imag, requires_grad=False)
    trained(run, model=net(front=lambda m, x: Net.front(m, x) * m.w.sum(), w=weight))


def an_epoch_that_decides_nothing(run):
    data = made(lambda d, i: (d.x[i] * (1 + (d.epoch > 9)), d.y[i]), epoch=0)
    trained(run, data=data, each_epoch=lambda m, epoch: data.set_epoch(epoch))


def many_shapes(run):
    data = made(lambda d, i: (d.x[i, :1].repeat(1 + i // 4, 6), d.y[i].repeat(1 + i // 4)))
    loss = lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())  # noqa: E731
    trained(run, loss, data=data, batch_size=4)


AGAIN = {
    "one of three in turns": lambda run: given(run, lambda n: [n // 3 % 3]),
    "four for each batch": lambda run: given(run, lambda n: range(4)),
    "an epoch that decides nothing": an_epoch_that_decides_nothing,
    "a negated weight": negated,
    "a log of all layers": lambda run: a_log_of_layers(run, lambda meter, value: value),
    "meters that the first call makes": lambda run: a_log_of_layers(run, Meter.add),
    "a rate of NumPy's for the head": a_rate_of_numpys,
    "many shapes": many_shapes,
}


LOG = []


@hostile(over={"words": ["good", "bad"], "numbers": [0.0, 1.0], "tensors": torch.arange(2)})
def test_a_log_that_the_front_reads_is_no_count(run, entries):
    LOG[:] = entries[:1]
    model = net(front=lambda m, x: Net.front(m, x * (1 + bool(LOG[-1] != entries[0]))))
    model.late.register_forward_hook(lambda m, x, y: LOG.append(entries[len(LOG) % 7 // 6]))
    trained(run, model=model, epochs=8)


@hostile(told="of another cache")
def test_a_loader_of_another_cache_is_told(run):
    run.freeze(Net())
    loader, run.cache, other = run.loader(rows()), None, run.cache
    run.fit(run.freeze(Net()), loader)
    None if other is None else other.close()


@hostile(over=AGAIN, silent=True)
def test_what_comes_again_is_served_without_a_word(run, script):
    script(run)


class Mode:
    """Has nothing by which two of its kind could be told apart."""


@hostile
def test_objects_without_a_state_are_told_by_what_they_are(run):
    modes = [Mode(), Mode()]
    forward = lambda m, x, mode: m.back(m.front(x * (1.0 + (m.second is mode))))  # noqa: E731
    model = net(forward=forward, second=modes[1])
    loss = numbered(lambda m, x, y, n: ce(lambda x: m(x, modes[n // 3 % 2]), x, y))
    trained(run, loss, model=model, epochs=6)


# ---- errors that are caught -------------------------------------------------------------------


class Failing(Net):
    """Fails now and then, in one place."""

    where, calls = "back", 0

    def fail_in(self, where, now):
        if where == self.where and now:
            raise ArithmeticError("again")

    def front(self, x):
        self.fail_in("front", len(x) == 5)
        return super().front(x)

    def back(self, h):
        self.calls += 1
        self.fail_in("back", self.calls % 4 == 2)
        self.fail_in("memory", len(h) > 4)
        return super().back(h)


def halved(model, x, y, n):
    try:
        return ce(model, x, y)
    except ArithmeticError:
        return (ce(model, x[:4], y[:4]) + ce(model, x[4:], y[4:])) / 2


@hostile
@pytest.mark.parametrize("where", ["front", "back", "memory"])
def test_an_error_of_the_model_is_the_models_own(run, where):
    """The loop goes on with the next batch, or with halves of this one."""
    model = run.freeze(net(Failing, where=where))
    loss = numbered(halved if where == "memory" else lambda m, x, y, n: ce(m, x, y))
    run.fit(model, run.loader(rows(21)), 4, loss=loss, catching=(ArithmeticError,))


@hostile
def test_an_error_of_the_data_set_is_the_data_sets_own(run):
    def get(data, index):
        if data.fails and index == 12:
            raise OSError("not there for the moment")
        return data.x[index], data.y[index]

    data, model = made(get, fails=True), run.freeze(Net())
    loader, optimizer = run.loader(data), sgd(model)
    for _ in range(4):
        with contextlib.suppress(OSError):
            run.fit(model, loader, 1, optimizer=optimizer)
        data.fails = False


@hostile(served=True)
def test_an_error_of_the_loop_and_a_new_epoch(run):
    def each_step(step):
        if step == 2:
            raise ZeroDivisionError

    model = run.freeze(Net())
    loader, optimizer = run.loader(rows(), shuffle=True), sgd(model)
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError):
            run.fit(model, loader, 1, optimizer=optimizer, each_step=each_step)


@hostile
def test_closing_the_cache_in_the_middle_of_an_epoch(run):
    def each_step(model, step):
        if step == 7 and run.cache is not None:
            run.cache.close()

    trained(run, each_step=each_step)
