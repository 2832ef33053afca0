"""What plain PyTorch does without an error is done without one here."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import NUM_SAMPLES, Net, Pairs, labels, rows

# ---- gradients by the input -------------------------------------------------------------------


@hostile
def test_fgsm_asks_for_the_gradient_by_the_input(run):
    def loss(model, batch):
        x, y = batch
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), y)

    trained(run, loss)


@hostile
def test_fgsm_in_one_epoch_of_several(run):
    steps = iter(range(1000))

    def loss(model, batch):
        x, y = batch
        if next(steps) // 3 != 2:
            return F.cross_entropy(model(x), y)
        x.requires_grad_()
        value = F.cross_entropy(model(x), y)
        value.backward()
        run.see(x.grad)
        return F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), y)

    trained(run, loss, epochs=4)


@hostile
def test_a_gradient_penalty_by_the_input(run):
    def loss(model, batch):
        x, y = batch
        x = x.clone().requires_grad_(True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + gradient.square().mean()

    trained(run, loss)


@hostile
def test_an_attribute_requires_grad_that_is_set(run):
    def loss(model, batch):
        x, y = batch
        x.requires_grad = True
        value = F.cross_entropy(model(x), y)
        run.see(torch.autograd.grad(value, x, retain_graph=True)[0])
        return value

    trained(run, loss)


@hostile
def test_a_learned_perturbation_of_the_input_trains(run):
    delta = torch.zeros(6, requires_grad=True)
    model = run.freeze(Net())
    optimizer = torch.optim.SGD([delta, *model.late.parameters()], lr=0.1)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0] + delta), batch[1])

    run.fit(model, run.loader(rows()), 3, loss=loss, optimizer=optimizer)
    run.see(delta)


# ---- features that the loop reads -------------------------------------------------------------


@hostile
@pytest.mark.parametrize("name", ["early", "middle"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_feature_taken_by_a_hook_can_be_read(run, name, kind):
    model = Net()
    taken = {}
    module = model.get_submodule(name)
    if kind == "forward":
        module.register_forward_hook(lambda m, a, out: taken.update(feature=out))
    else:
        module.register_forward_pre_hook(lambda m, a: taken.update(feature=a[0]))

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        run.see(taken["feature"].norm())
        return value + taken["feature"].square().mean()

    trained(run, loss, model=model)


@hostile
def test_a_feature_hook_that_joins_later_can_be_read(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    taken = []
    model.early.register_forward_hook(lambda m, a, out: taken.append(out))

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value + taken[-1].square().mean()

    run.fit(model, loader, 2, loss=loss)


@hostile
def test_a_feature_kept_as_an_attribute_can_be_read(run):
    class Keeping(Net):
        def front(self, x):
            self.feature = self.early(x)
            return self.middle(torch.tanh(self.feature))

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value + model.feature.square().mean()

    trained(run, loss, model=Keeping())


@hostile
def test_a_submodule_called_by_the_loop_gives_its_output(run):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) + model.early(x).square().mean()

    trained(run, loss)


@hostile
def test_the_front_and_the_back_called_one_after_the_other(run):
    def loss(model, batch):
        with torch.no_grad():
            h = model.front(batch[0])
        return F.cross_entropy(model.back(h), batch[1])

    trained(run, loss)


# ---- a boundary that has to be given up -------------------------------------------------------


class Packed(nn.Module):
    """Reads sentences of several lengths through a packed sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(h.mean(1))


@hostile
@pytest.mark.parametrize("boundary", ["embed", "gru"])
def test_packed_sequences_pass(run, boundary):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(11, (NUM_SAMPLES, 5), generator=generator)
    lengths = torch.randint(2, 6, (NUM_SAMPLES,), generator=generator)
    model = run.freeze(Packed(), boundary)
    run.fit(
        model, run.loader(TensorDataset(tokens, lengths, labels()), shuffle=True), 3,
        loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
    )  # fmt: skip


@hostile
def test_a_last_batch_as_large_as_a_constant_passes(run):
    """Four positions, and a last batch of four samples."""

    class Positions(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 6), requires_grad=False)

        def front(self, x):
            return super().front(x[:, None] + self.table).mean(1)

    trained(run, model=Positions(), data=rows(20), epochs=4)


@hostile
def test_a_front_that_takes_another_way_in_the_last_batch_passes(run):
    class Small(Net):
        def front(self, x):
            if len(x) < 8:
                return torch.stack([super(Small, self).front(row[None])[0] for row in x])
            return super().front(x)

    trained(run, model=Small(), data=rows(20), epochs=4)


@hostile
def test_a_front_that_skips_its_layers_at_random_passes(run):
    """Layer drop by the loop's own choice: `model.depth` is drawn every step."""

    class Deep(Net):
        depth = 2

        def front(self, x):
            h = torch.tanh(self.early(x))
            for _ in range(self.depth):
                h = self.middle(h)
            return h

    model = run.freeze(Deep())
    generator = torch.Generator().manual_seed(3)

    def each_step(step):
        model.depth = int(torch.randint(1, 4, (), generator=generator))

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile
def test_an_error_of_the_model_is_the_models_own(run):
    """The head raises in one step, and the loop goes on."""

    class Raising(Net):
        fails = False

        def back(self, h):
            if self.fails:
                raise FloatingPointError("too hot")
            return super().back(h)

    model = run.freeze(Raising())
    loader = run.loader(rows())
    optimizer = sgd(model)
    for epoch in range(4):
        for number, batch in enumerate(loader):
            model.fails = (epoch, number) in [(0, 0), (1, 1), (2, 2)]
            try:
                loss = cross_entropy(model, batch)
            except FloatingPointError:
                model.fails = False
                loss = cross_entropy(model, batch)
            run.step(loss, optimizer)
    run.see(model)


@hostile
def test_an_error_of_the_data_set_is_the_data_sets_own(run):
    class Raising(Pairs):
        fails = False

        def __getitem__(self, index):
            if self.fails and index == 12:
                raise OSError("not there for the moment")
            return super().__getitem__(index)

    data = Raising()
    model = run.freeze(Net())
    loader = run.loader(data)
    optimizer = sgd(model)
    for epoch in range(4):
        data.fails = epoch == 0
        with contextlib.suppress(OSError):
            for batch in loader:
                run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile(served=True)
def test_an_error_of_the_loop_and_a_new_epoch(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True)
    optimizer = sgd(model)
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError):
            for number, batch in enumerate(loader):
                run.step(cross_entropy(model, batch), optimizer)
                if number == 1:
                    raise ZeroDivisionError
    run.see(model)


@hostile
def test_closing_the_cache_in_the_middle_of_an_epoch(run):
    model = run.freeze(Net())
    loader = run.loader(rows())

    def each_step(step):
        if step == 7 and run.cache is not None:
            run.cache.close()

    run.fit(model, loader, 3, each_step=each_step)
