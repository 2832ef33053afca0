"""A front that is no function of the sample, though one look at one batch does not show it."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.hostile.harness import cross_entropy, hostile
from tests.hostile.loops import ce, trained
from tests.hostile.nets import ConvNet, Net, images, inputs, labels, net, rows
from tests.hostile.places import WRITES


def statistic(of):
    """Return a model where something about the whole batch goes into each of its rows."""
    return net(front=lambda m, x: m.middle(of(torch.tanh(m.early(x)))))


def absmax_quantised(h):
    scale = h.abs().max() / 7
    return (h / scale).round() * scale


STATISTICS = {
    "mean": lambda h: h - h.mean(0),
    "maximum": lambda h: h / h.abs().max(),
    "absmax quantisation": absmax_quantised,
    "number of rows": lambda h: h * (1 + 1 / len(h)),
    "parity of positive rows": lambda h: h if (h[:, 0] > 0).sum() % 2 else -h,
    "first row": lambda h: h + h[:1],
    "position in the batch": lambda h: h * torch.arange(1, len(h) + 1)[:, None].float(),
    "any": lambda h: -h if (h > 0.999).any() else h,
    "any, in NumPy": lambda h: -h if (h.detach().numpy() > 0.999).any() else h,
    "contrast of pairs": lambda h: h + torch.cdist(h, h).mean(1, keepdim=True),
    "batch norm by function": lambda h: F.batch_norm(h, None, None, training=True),
    "quantile": lambda h: h - h.mean(1).quantile(0.5),
    "parity": lambda h: h * (1 + len(h) % 2),
    "cumulative sum": lambda h: h.cumsum(0),
    "rank": lambda h: h + h.sum(1).argsort()[:, None],
    "winner": lambda h: h + (h.sum(1) == h.sum(1).max())[:, None],
    "duplicates": lambda h: h * len(torch.unique(h, dim=0)),
}


def alike():
    """One sample eight times in the first batch: no order of it differs from any other."""
    x = inputs()
    x[:8] = x[0]
    return TensorDataset(x, labels())


ONE_FIRST = [[0], *[[*range(i, i + 8)] for i in (0, 8, 16)], [23, 2, 4, 6]]
BATCHES = {
    "shuffled": (rows, {"shuffle": True}, STATISTICS),
    "one sample first": (
        rows, {"batch_sampler": ONE_FIRST}, ("maximum", "number of rows", "mean", "any"),
    ),
    "a last partial batch": (
        lambda: rows(20), {"shuffle": True}, ("maximum", "number of rows", "first row"),
    ),
    "all alike": (alike, {}, ("maximum", "mean", "position in the batch")),
    "of two": (rows, {"batch_size": 2}, ("maximum", "mean", "rank", "duplicates", "first row")),
    "of three": (rows, {"batch_size": 3}, ("quantile", "parity", "winner", "cumulative sum")),
}  # fmt: skip
TAKEN = {
    f"{kind}, {batches}": (STATISTICS[kind], make, options)
    for batches, (make, options, kinds) in BATCHES.items()
    for kind in kinds
}


@hostile(over=TAKEN, cases=8)
def test_a_statistic_of_the_batch_is_seen(run, of, make, options):
    trained(run, model=statistic(of), data=make(), epochs=4, **options)


OTHERS = {
    "first": lambda h: h[:1], "last": lambda h: h[-1:], "one before": lambda h: h.roll(1, 0),
    "one after": lambda h: h.roll(-1, 0),
}  # fmt: skip


@hostile(over=OTHERS)
@pytest.mark.parametrize("row", range(8))
def test_one_row_alone_that_reads_another_is_seen(run, other, row):
    """Whichever of the first batch it is, it has another company in some part of the proof."""
    x = inputs()
    x[:, 0] = 0
    x[row, 0] = 5

    def front(model, x):
        h = torch.tanh(model.early(x))
        return model.middle(h + (x[:, :1] > 4) * other(h))

    run.fit(run.freeze(net(front=front)), run.loader(TensorDataset(x, labels())), 1)
    run.turn()
    model = run.freeze(net(front=front))
    order = [[*range(8)], [*range(8, 16)], [9, 11, row, 13, 15, 17, 19, 2]]
    run.fit(model, run.loader(TensorDataset(x, labels()), batch_sampler=order), 1)
    shuffled = [[*range(12, 20)], [row + 8, *range(7), row], [20, 21]]
    run.fit(model, run.loader(TensorDataset(x, labels()), batch_sampler=shuffled), 2)


IS_ANY = {
    "compared": lambda a: (a > 4).any(), "in NumPy": lambda a: (a.numpy() > 4).any(),
    "picked": lambda a: len(a[a > 4]), "counted": lambda a: len((a > 4).nonzero()),
}  # fmt: skip


@hostile(over=IS_ANY)
def test_what_is_read_for_one_row_alone_is_seen(run, is_any):
    x = inputs()
    x[:, 0] = 0
    x[5, 0] = 5

    def front(model, x):
        h = torch.tanh(model.early(x))
        if is_any(x[:, 0]):
            h = torch.where(x[:, :1] > 4, h * model.scale, h)
        return model.middle(h)

    model = run.freeze(net(front=front, scale=1.0))
    for model.scale in (1.0, 2.0):
        run.fit(model, run.loader(TensorDataset(x, labels()), batch_size=24), 2)


@hostile(limit="that depends on the whole batch, cannot be seen before it is taken")
def test_a_statistic_behind_a_threshold_that_the_first_batch_does_not_reach(run):
    """One in 24 samples is an outlier, and then the whole batch is scaled."""
    x = inputs()
    x[:8] *= 0.1
    x[9] *= 50

    order = [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    shuffled = [[*range(0, 24, 3)], [*range(1, 24, 3)], [*range(2, 24, 3)]]
    model = run.freeze(statistic(lambda h: h / h.abs().max().clamp(min=0.95)))
    for batches in (order, order, shuffled):
        run.fit(model, run.loader(TensorDataset(x, labels()), batch_sampler=batches), 1)


def beside_a_huge_feature(more):
    def front(model, x):
        h = more(model.middle(torch.tanh(model.early(x))))
        return torch.cat([h[:, :7], h[:, 7:] * 0 + 1e6], 1)

    return net(front=front, back=lambda m, h: Net.back(m, h.clamp(max=5)))


def seeded_loss(run):
    def loss(model, batch):
        torch.manual_seed(len(run.trace.values))
        return cross_entropy(model, batch)

    return loss


@hostile
@pytest.mark.parametrize("kind", ["statistic", "noise"])
def test_what_is_small_beside_one_huge_feature_is_seen(run, kind):
    """The tolerance must not be that of the largest value of the whole tensor."""
    more = lambda h: h + 0.3 * (h.mean(0) if kind == "statistic" else torch.rand_like(h))  # noqa: E731
    trained(run, seeded_loss(run), model=beside_a_huge_feature(more), shuffle=True)


@hostile
def test_a_small_statistic_beside_one_huge_sample_is_seen(run):
    x = inputs()
    x[::8] *= 1e7

    def front(model, x):
        h = model.early(x)
        return model.middle(torch.sign(h) * h.abs().log1p() + 0.2 * torch.tanh(x).mean(0)[:1])

    trained(run, model=net(front=front), data=TensorDataset(x, labels()), shuffle=True)


# ---- constants that are none ------------------------------------------------------------------


class Lengths(nn.Module):
    def forward(self, mask):
        return mask.sum(1).max()


def longest_inside(model, x):
    longest = model.lengths(x > 0)
    return model.back(model.middle(torch.tanh(model.early(x)) * longest))


def longest_behind(model, x):
    """A module returns how long the longest of the batch is; the head uses it."""
    longest = model.lengths(x > 0)
    return model.back(model.middle(torch.tanh(model.early(x)))) * longest


def with_lengths():
    """Only two samples have a row without negative numbers; most batches agree."""
    x = inputs()
    x[:, 0] = -1
    x[[5, 18]] = x[[5, 18]].abs()
    return TensorDataset(x, labels())


@hostile(over={"inside": longest_inside, "behind": longest_behind})
def test_the_longest_of_the_batch_is_no_constant(run, forward):
    torch.manual_seed(5)
    model = net(forward=forward, lengths=Lengths())
    model.lengths = model._modules.pop("lengths")
    trained(run, model=model, data=with_lengths(), shuffle=True, epochs=4)


NUMBERS = {
    "item": lambda x: (x[:, 0] > 0).sum().item(),
    "int": lambda x: int((x[:, 0] > 0).sum()),
    "bool": lambda x: 2.0 if (x[:, 0] > 0).sum() > 4 else 1.0,
    "list": lambda x: sum(x[:, 0].tolist()),
    "shape": lambda x: (x[:, 0] > 0).nonzero().shape[0],
    "rows": len,
}


@hostile(over=NUMBERS)
def test_a_number_taken_from_the_batch_is_no_constant(run, number):
    forward = lambda m, x: m.back(m.front(x) * (1 + 0.1 * number(x)))  # noqa: E731
    trained(run, model=net(forward=forward), data=rows(20), shuffle=True, epochs=4)


# ---- writes that move no counter --------------------------------------------------------------


def zeroed(h):
    with torch.no_grad():
        h.mul_(0)


UNSEEN = "its data", "numpy", "detached"
PAST = {"mul_": zeroed} | {k: lambda h, write=WRITES[k]: write(h, 2.0) for k in UNSEEN}


def written_by_the_head(write):
    def back(model, h):
        write(h)
        return Net.back(model, h)

    return net(back=back)


def written_by_a_hook(write):
    def hook(module, args):
        write(args[0])

    model = Net()
    model.late.register_forward_pre_hook(hook)
    return model


@hostile(over={how: write for how, write in PAST.items() if how != "mul_"})
@pytest.mark.parametrize("make", [written_by_the_head, written_by_a_hook])
def test_a_feature_written_behind_the_boundary_is_not_stored_so(run, write, make):
    """Code of the head, or a hook, writes into what the boundary returned."""
    trained(run, model=make(write), epochs=4)


@hostile(over=PAST)
def test_a_returned_feature_written_by_the_loop_is_not_stored_so(run, write):
    def forward(model, x):
        h = model.front(x)
        return model.back(h), h

    def loss(model, batch):
        out, h = model(batch[0])
        value = F.cross_entropy(out, batch[1]) + h.square().mean()
        write(h)
        return value

    trained(run, loss, model=net(forward=forward), epochs=4)


# ---- randomness -------------------------------------------------------------------------------


@hostile
@pytest.mark.parametrize("rare", [1, 3, 10])
def test_rare_randomness_around_the_boundary_is_seen_or_found(run, rare):
    """Every so often a number of Python's generator decides."""
    front = lambda m, x: Net.front(m, x if random.randrange(rare) else x * 2)  # noqa: E731
    trained(run, model=net(front=front), epochs=6)


@hostile
def test_dropout_by_function_that_is_always_on_is_seen(run):
    front = lambda m, x: m.middle(F.dropout(torch.tanh(m.early(x)), 0.3, training=True))  # noqa: E731
    trained(run, seeded_loss(run), model=net(front=front))


@hostile
@pytest.mark.parametrize("kind", ["mixed", "plain tensors"])
def test_norms_of_the_front_stand_still_over_batches_that_are_not_known(run, kind):
    """Mixup makes another batch, or the loop brings its own."""
    model = run.freeze(ConvNet(), "body")
    x, y = images().tensors
    batches = [(x[:8], y[:8]), (x[8:16], y[8:16])]
    loss = lambda m, b: ce(m, 0.7 * b[0] + 0.3 * b[0].flip(0), b[1])  # noqa: E731
    run.fit(model, run.loader(images()) if kind == "mixed" else batches, 3, loss=loss)


@hostile
@pytest.mark.parametrize("kind", ["a branch", "other modules"])
def test_a_front_that_takes_another_way_for_other_batches_is_right(run, kind):
    x = inputs()
    x[:8, 0] = -1
    routed = lambda m, x: m.middle(torch.tanh((m.early if x[0, 0] > 0 else m.other)(x)))  # noqa: E731
    branch = lambda m, x: Net.front(m, x if x[:, 0].sum() < 0 else -x)  # noqa: E731
    model = net(
        front=branch if kind == "a branch" else routed, other=nn.Linear(6, 8).requires_grad_(False)
    )
    data = TensorDataset(x, labels())
    trained(run, model=model, data=data, shuffle=kind != "a branch", epochs=4)
