"""What a loop does to its batches reaches the model; what can be followed is served."""

import numpy as np
import pytest
import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.hostile.harness import hostile, judge, sgd
from tests.hostile.loops import ce, numbered, trained
from tests.hostile.nets import ConvNet, Net, images, inputs, labels, made, net, rows
from tests.hostile.places import WRITES

# ---- values written in place ------------------------------------------------------------------


def by_relu(x, f):
    F.relu(x, inplace=True)
    x.add_(f)


def by_row(x, f):
    for row in x:
        row.mul_(f)


WRITTEN = WRITES | {
    "an index": lambda x, f: x[:, :3].fill_(f),
    "rows": by_row,
    "a chunk": lambda x, f: x.chunk(2)[0].mul_(f),
    "relu": by_relu,
    "swapped": lambda x, f: torch.utils.swap_tensors(x, torch.full_like(x, 0.1 * f)),
    "transposed": lambda x, f: x.transpose_(0, 1),  # six samples of six numbers
}


@hostile(over=WRITTEN, cases=6)
def test_a_batch_written_in_place_is_what_the_model_sees(run, write):
    def loss(model, x, y, step):
        if step == 4:
            run.turn()
        if step >= 4:
            write(x, 2.0)
        return ce(model, x, y)

    trained(run, numbered(loss), batch_size=6)


@hostile(over={how: WRITES[how] for how in ("a method", "numpy", "its data")})
def test_a_batch_written_in_every_epoch_is_what_the_model_sees(run, write):
    def loss(model, x, y, step):
        if step == 3:
            run.turn()  # so far the values were multiplied by one
        write(x, 1.0 + 0.3 * (step // 3))
        return ce(model, x, y)

    trained(run, numbered(loss))


# ---- loops that are right, and served where they can be ---------------------------------------


def alias_between_two_calls(m, x, y, n):
    view = x.view(-1)
    first = ce(m, x, y)
    if n >= 3:
        view.mul_(2)
    return first + ce(m, x, y)


def labels_written_through_numpy(m, x, y, n):
    target = y.numpy()
    if n >= 3:
        target += 1
        target %= 3
    return ce(m, x, y)


def labels_written_late(m, x, y, n):
    out = m(x)
    y.mul_(n % 2)
    return F.cross_entropy(out, y)


def written_behind_the_call(m, x, y, n):
    value = ce(m, x, y)
    x.zero_()
    return value


def shaped(change):
    """The batch's shape is changed in place, which the model is called with in the end."""

    def loss(m, x, y, n):
        change(x)
        return ce(m, x.reshape(-1, 6) if x.shape[0] == len(y) else x.t().contiguous(), y)

    return loss


def labels_shaped(m, x, y, n):
    y.unsqueeze_(1)
    return ce(m, x, y.squeeze(1)) * y.dim()


def fgsm(m, x, y, n):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(ce(m, x, y), x)
    return ce(m, (x + 0.1 * gradient.sign()).detach(), y)


def gradient_penalty(m, x, y, n):
    x = x.clone().requires_grad_(True)
    out = m(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + gradient.square().mean()


def permuted(x, y):
    order = torch.randperm(len(x))
    return x[order], y[order]


BUFFER = torch.empty(8, 6)
PERMUTATIONS = [torch.arange(6), torch.arange(6).flip(0), torch.arange(6).roll(2)]

LOOPS = {
    "an alias written between two calls": alias_between_two_calls,
    "labels written through numpy": labels_written_through_numpy,
    "labels written behind the call": labels_written_late,
    "inputs written behind the call": written_behind_the_call,
    "unsqueezed": shaped(lambda x: x.unsqueeze_(1)),
    "resized": shaped(lambda x: x.resize_(len(x), 6)),
    "labels unsqueezed": labels_shaped,
    "mixup": lambda m, x, y, n: ce(m, 0.7 * x + 0.3 * x[torch.randperm(len(x))], y),
    "noise in place": lambda m, x, y, n: ce(m, x.add_(0.5 * torch.randn(x.shape)), y),
    "dropout": lambda m, x, y, n: ce(m, F.dropout(x, 0.2), y),
    "rolled": lambda m, x, y, n: ce(m, x + x.roll(1, 0), y),
    "shuffled by numpy": lambda m, x, y, n: ce(
        m, torch.from_numpy(np.random.permutation(x.numpy())), y
    ),
    "index_copy": lambda m, x, y, n: ce(m, x.index_copy(0, torch.tensor([0]), x[1:2]), y),
    "a drawn temperature": lambda m, x, y, n: ce(m, x * float(1 + torch.rand(())), y),
    "permuted features": lambda m, x, y, n: ce(m, x[:, PERMUTATIONS[n // 3 % 3]], y),
    "in place": lambda m, x, y, n: ce(m, x.sub_(MEAN).div_(STD), y),
    "a static buffer": lambda m, x, y, n: ce(m, BUFFER.copy_(x), y),
    "an out argument": lambda m, x, y, n: ce(m, torch.mul(x, 1 + n // 3, out=BUFFER), y),
    "filled by a schedule": lambda m, x, y, n: ce(m, x.masked_fill(x > 1 - 0.05 * n, 0), y),
    "rows of a mask": lambda m, x, y, n: ce(m, x[y != 1], y[y != 1]),
    "strided": lambda m, x, y, n: ce(m, x[::2], y[::2]) + ce(m, x[-3:], y[-3:]),
    "repeated": lambda m, x, y, n: ce(m, x.repeat_interleave(2, 0), y.repeat_interleave(2)),
    "unbound and stacked": lambda m, x, y, n: ce(
        m, torch.stack(list(x.unbind(0))[::-1]), y.flip(0)
    ),
    "gradients by the input": fgsm,
    "a gradient penalty": gradient_penalty,
    "inputs that ask for gradients": lambda m, x, y, n: ce(m, x.requires_grad_(), y),
    "a plain batch in between": lambda m, x, y, n: (
        ce(m, x, y) - 0.1 * m(torch.full((8, 6), n / 9)).mean()
    ),
}


@hostile(over=LOOPS, cases=13)
def test_whatever_a_loop_does_to_its_batches_is_right(run, loss):
    trained(run, numbered(loss), epochs=4)


@hostile
def test_what_the_loop_hangs_on_a_tensor_reaches_the_model(run):
    def loss(model, x, y, step):
        x.factor = 1.0 + step // 3
        return ce(model, x, y)

    trained(run, numbered(loss), model=net(front=lambda m, x: m.middle(m.early(x) * x.factor)))


MEAN, STD = torch.linspace(-0.5, 0.5, 6), torch.linspace(0.5, 1.5, 6)


def constant(n, mean):
    """Return the loop's own mean, written in place between epochs."""
    if n == 0:
        mean[:] = 0
    if n in (0, 6):
        mean[:] += 0.25
    return torch.as_tensor(mean)


TENSOR = torch.zeros(6)


def written_later(m, x, y, n):
    TENSOR.zero_()
    moved = x + TENSOR
    TENSOR.fill_(3.0)
    return ce(m, moved, y) + 0.1 * moved.square().mean()


SERVED = {
    "an argument that is written later": written_later,
    "normalised": lambda m, x, y, n: ce(m, (x - MEAN) / STD, y),
    "clamped by a schedule": lambda m, x, y, n: ce(m, x.clamp(min=-2.0 if n < 6 else -0.5), y),
    "a constant that is written": lambda m, x, y, n: ce(m, x - constant(n, TENSOR), y),
    "permutation": lambda m, x, y, n: ce(m, *permuted(x, y)),
    "flip": lambda m, x, y, n: ce(m, x.flip(0), y.flip(0)),
    "labels in place": lambda m, x, y, n: ce(m, x, y.add_(1).sub_(1)),
    "labels smoothed": lambda m, x, y, n: ce(m, x, F.one_hot(y, 3).float() * 0.9 + 0.1 / 3),
    "labels reshaped": lambda m, x, y, n: ce(m, x, y[:, None].squeeze(1).long()),
}


@hostile(over=SERVED, cases=6, served=True)
def test_what_can_be_followed_is_served(run, loss):
    trained(run, numbered(loss), epochs=5)


def of_images(run, change):
    """Train on what is made of images."""
    loss = numbered(lambda m, x, y, n: ce(m, change(x, n), y))
    trained(run, loss, model=ConvNet(), data=images(), boundary="body")


@hostile(served=True)
def test_images_are_normalised_per_channel(run):
    mean, std = torch.tensor([0.1, -0.1]), torch.tensor([0.9, 1.1])
    of_images(run, lambda x, n: (x - mean[None, :, None, None]) / std.view(1, 2, 1, 1))


@hostile(served=True)
def test_bytes_become_floats(run):
    data = TensorDataset((inputs().sigmoid() * 255).to(torch.uint8), labels())
    trained(run, numbered(lambda m, x, y, n: ce(m, x.float() / 255, y)), data=data)


def cut(x, by=4):
    x = x.clone()
    x[:, :, :by] = x.flip(0)[:, :, :by]
    return x


def cropped(x):
    at = int(torch.randint(3, ()))
    return x[:, :, at : at + 6, at : at + 6]


IMAGES = {"cutmix": lambda x, n: cut(x), "crops": lambda x, n: cropped(x)}


@hostile(over=IMAGES)
def test_images_that_are_made_others_are_right(run, change):
    of_images(run, change)


NAMED = {
    "sort": lambda m, x, y, n: ce(m, x.sort(0).values, y),
    "cumsum": lambda m, x, y, n: ce(m, (x.float() * 2).cumsum(0) / 3, y),
    "add": lambda m, x, y, n: ce(m, x.add_(torch.randn(6)), y),
}


@pytest.mark.parametrize("name", NAMED)
def test_an_operation_that_cannot_be_followed_is_named(name):
    judge(lambda run: trained(run, numbered(NAMED[name])), told=name)


# ---- micro-batches, kept batches, joined ones -------------------------------------------------


def pipelining(x, y):
    return split_args_kwargs_into_chunks((x, y), {}, 4)[0]


SPLITS = {
    "pipelining": pipelining,
    "slices": lambda x, y: [(x[i : i + 3], y[i : i + 3]) for i in range(0, len(x), 3)],
    "split": lambda x, y: zip(x.split(4), y.split(4), strict=True),
    "index": lambda x, y: [(x[[0, 2, 4, 6]], y[[0, 2, 4, 6]]), (x[[1, 3]], y[[1, 3]])],
}


@hostile(over=SPLITS, served=True)
def test_micro_batches_are_served(run, split):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=epoch % 2 == 0)
            for part, targets in split(x, y):
                loss = ce(model, part, targets) * len(targets) / len(y)
                run.record(loss)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    run.see(model)


@hostile
@pytest.mark.parametrize("kept", ["the first batch", "every epoch"])
def test_a_batch_kept_and_used_again_is_what_it_was(run, kept):
    model = run.freeze(Net())
    loader = run.loader(rows())
    for _ in range(3):
        batches = list(loader)
        first = batches[:1] if kept == "the first batch" else []
        run.fit(model, [*batches, *first], 2)


def joined(pairs):
    return [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs]


@hostile
@pytest.mark.parametrize("of", ["one loader", "two loaders", "two loaders of two names"])
def test_two_batches_joined_are_both(run, of):
    """Semi-supervised: one model, two loaders in step, joined in one call."""
    model, one = run.freeze(Net()), run.loader(rows())
    name = {"name": "other"} if of == "two loaders of two names" else {}
    other = run.loader(rows(seed=9), ours=name)
    for _ in range(3):
        first = iter(one)
        run.fit(model, joined(zip(first, first if of == "one loader" else other, strict=False)), 1)


@hostile(served=True)
def test_features_mixed_behind_the_boundary_are_served(run):
    """Manifold mixup."""

    def forward(model, x, order):
        h = model.front(x)
        return model.back(0.6 * h + 0.4 * h[order])

    def loss(model, batch):
        x, y = batch
        order = torch.randperm(len(x))
        out = model(x, order)
        return 0.6 * F.cross_entropy(out, y) + 0.4 * F.cross_entropy(out, y[order])

    trained(run, loss, model=net(forward=forward))


# ---- several inputs ---------------------------------------------------------------------------


def triples():
    views = lambda d, i: (d.x[i], d.x[(i + 1) % 24], d.x[(i + 5) % 24], d.y[i])  # noqa: E731
    return made(views)


def triplet(m, a, p, n, y, step):
    return F.triplet_margin_loss(m(a), m(p), m(n)) + ce(m, a, y)


def joined_triplet(m, a, p, n, y, step):
    out = m(torch.cat([a, p, n]))
    return F.triplet_margin_loss(*out.chunk(3)) + F.cross_entropy(out[: len(y)], y)


def in_turns(m, a, p, n, y, step):
    """In odd epochs the second view stands where the first stood."""
    return ce(m, (a, p)[step // 3 % 2], y)


def swapped(m, a, p, n, y, step):
    a, p = (a, p) if step // 3 % 2 == 0 else (p, a)
    return F.cross_entropy(m(a) + 0.5 * m(p), y)


INPUTS = {"apart": triplet, "joined": joined_triplet, "in turns": in_turns, "swapped": swapped}


@hostile(over=INPUTS)
def test_several_inputs_are_each_their_own(run, loss):
    trained(run, numbered(loss), data=triples(), epochs=6)


@hostile
def test_a_siamese_model_calls_its_front_twice(run):
    model = net(forward=lambda m, a, b: m.back(m.front(a)) - m.back(m.front(b)))
    loss = lambda m, b: F.cross_entropy(m(b[0], b[1]), b[3])  # noqa: E731
    trained(run, loss, data=triples(), model=model, epochs=4)
