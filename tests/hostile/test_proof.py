"""A front that is no function of the sample, though one look at one batch does not show it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.hostile.harness import hostile
from tests.hostile.nets import ConvNet, Net, Tokens, images, inputs, labels, rows, sentences


class Statistic(Net):
    """Something about the whole batch goes into each of its rows."""

    def __init__(self, statistic):
        super().__init__()
        self.statistic = statistic

    def front(self, x):
        h = torch.tanh(self.early(x))
        return self.middle(self.statistic(h))


def absmax_quantised(h):
    scale = h.abs().max() / 7
    return (h / scale).round() * scale


def double_quantised(h):
    low, high = h.min(), h.max()
    return torch.fake_quantize_per_tensor_affine(h, ((high - low) / 15).item(), 8, 0, 15)


STATISTICS = {
    "mean": lambda h: h - h.mean(0),
    "maximum": lambda h: h / h.abs().max(),
    "quantile": lambda h: h / h.abs().quantile(0.9),
    "median": lambda h: h - h.median(),
    "absmax quantisation": absmax_quantised,
    "range quantisation": double_quantised,
    "number of rows": lambda h: h * (1 + 1 / len(h)),
    "parity of the number of rows": lambda h: h if len(h) % 2 else -h,
    "number of positive rows": lambda h: h * (h[:, 0] > 0).sum(),
    "parity of positive rows": lambda h: h if (h[:, 0] > 0).sum() % 2 else -h,
    "sorted": lambda h: h.sort(0).values,
    "first row": lambda h: h + h[:1],
    "largest row": lambda h: h + h[h.norm(dim=1).argmax()],
    "position in the batch": lambda h: h * torch.arange(1, len(h) + 1)[:, None].float(),
    "even positions": lambda h: torch.cat([h[::2] * 2, h[1::2]])[: len(h)],
    "any": lambda h: -h if (h > 0.999).any() else h,
    "contrast of pairs": lambda h: h + torch.cdist(h, h).mean(1, keepdim=True),
    "duplicates": lambda h: (
        h * torch.unique(h[:, 0].round(decimals=1), return_counts=True)[1].max()
    ),
    "top k of the batch": lambda h: h * (h[:, :1] >= h[:, 0].topk(min(3, len(h))).values[-1]),
    "histogram": lambda h: h + torch.histc(h, 4, -1, 1).argmax(),
    "batch norm by function": lambda h: F.batch_norm(h, None, None, training=True),
}


@hostile
@pytest.mark.parametrize("kind", STATISTICS)
def test_a_statistic_of_the_batch_is_seen(run, kind):
    model = run.freeze(Statistic(STATISTICS[kind]))
    run.fit(model, run.loader(rows(), shuffle=True))


@hostile
@pytest.mark.parametrize("kind", ["maximum", "number of rows", "mean", "any"])
def test_a_statistic_is_seen_though_the_first_batch_has_one_sample(run, kind):
    order = [[0], *[[*range(i, i + 8)] for i in (0, 8, 16)], [23, 2, 4, 6]]
    model = run.freeze(Statistic(STATISTICS[kind]))
    run.fit(model, run.loader(rows(), batch_sampler=order), 4)


@hostile
@pytest.mark.parametrize("kind", ["maximum", "number of rows", "first row"])
def test_a_statistic_is_seen_in_the_last_partial_batch(run, kind):
    model = run.freeze(Statistic(STATISTICS[kind]))
    run.fit(model, run.loader(rows(20), shuffle=True))


@hostile
@pytest.mark.parametrize("kind", ["maximum", "mean", "position in the batch"])
def test_a_statistic_is_seen_though_all_samples_are_alike(run, kind):
    """The first batch holds one sample eight times: no order of it differs from any other."""
    x = inputs()
    x[:8] = x[0]
    model = run.freeze(Statistic(STATISTICS[kind]))
    run.fit(model, run.loader(TensorDataset(x, labels())), 4, each_epoch=lambda epoch: None)


@hostile
@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("other", ["first", "last", "one before", "one after"])
def test_one_row_alone_that_reads_another_is_seen(run, row, other):
    """Whichever of the first batch it is, it has another company in some part of the proof."""
    x = inputs()
    x[:, 0] = 0
    x[row, 0] = 5

    class Reading(Net):
        def front(self, x):
            h = torch.tanh(self.early(x))
            others = {
                "first": h[:1], "last": h[-1:], "one before": h.roll(1, 0),
                "one after": h.roll(-1, 0),
            }  # fmt: skip
            return self.middle(h + (x[:, :1] > 4) * others[other])

    run.fit(run.freeze(Reading()), run.loader(TensorDataset(x, labels()), shuffle=False), 1)
    run.turn()
    model = run.freeze(Reading())
    order = [[*range(8)], [*range(8, 16)], [9, 11, row, 13, 15, 17, 19, 2]]
    run.fit(model, run.loader(TensorDataset(x, labels()), batch_sampler=order), 1)
    shuffled = [[*range(12, 20)], [row + 8, *range(7), row], [20, 21]]
    run.fit(model, run.loader(TensorDataset(x, labels()), batch_sampler=shuffled), 2)


@hostile(limit="that depends on the whole batch, cannot be seen before it is taken")
def test_a_statistic_behind_a_threshold_that_the_first_batch_does_not_reach(run):
    """One in 24 samples is an outlier, and then the whole batch is scaled."""
    x = inputs()
    x[:8] *= 0.1
    x[9] *= 50

    def statistic(h):
        return h / h.abs().max().clamp(min=0.95)

    order = [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    shuffled = [[*range(0, 24, 3)], [*range(1, 24, 3)], [*range(2, 24, 3)]]
    model = run.freeze(Statistic(statistic))
    for batches in (order, order, shuffled):
        run.fit(model, run.loader(TensorDataset(x, labels()), batch_sampler=batches), 1)


@hostile
def test_a_small_statistic_beside_one_huge_feature_is_seen(run):
    """The tolerance must not be that of the largest value of the whole tensor."""

    class Huge(Net):
        def front(self, x):
            h = self.middle(torch.tanh(self.early(x)))
            h = h + 0.3 * h.mean(0)
            return torch.cat([h[:, :7], h[:, 7:] * 0 + 1e6], 1)

        def back(self, h):
            return super().back(h.clamp(max=5))

    run.fit(run.freeze(Huge()), run.loader(rows(), shuffle=True))


@hostile
def test_a_small_statistic_beside_one_huge_sample_is_seen(run):
    x = inputs()
    x[::8] *= 1e7

    class Huge(Net):
        def front(self, x):
            h = self.early(x)
            return self.middle(torch.sign(h) * h.abs().log1p() + 0.2 * torch.tanh(x).mean(0)[:1])

    run.fit(run.freeze(Huge()), run.loader(TensorDataset(x, labels()), shuffle=True))


@hostile
def test_a_small_noise_beside_one_huge_feature_is_seen(run):
    class Huge(Net):
        def front(self, x):
            h = self.middle(torch.tanh(self.early(x)))
            h = h + 0.3 * torch.rand_like(h)
            return torch.cat([h[:, :7], h[:, 7:] * 0 + 1e6], 1)

        def back(self, h):
            return super().back(h.clamp(max=5))

    def loss(model, batch):
        torch.manual_seed(len(run.trace.values))
        return F.cross_entropy(model(batch[0]), batch[1])

    run.fit(run.freeze(Huge()), run.loader(rows()), loss=loss)


# ---- constants that are none ------------------------------------------------------------------


class Lengths(nn.Module):
    def forward(self, mask):
        return mask.sum(1).max()


class Longest(Net):
    """A module returns how long the longest of the batch is; the head uses it."""

    def __init__(self, inside=False):
        super().__init__()
        self.lengths, self.inside = Lengths(), inside

    def forward(self, x):
        longest = self.lengths(x > 0)
        h = torch.tanh(self.early(x))
        h = self.middle(h * longest if self.inside else h)
        return self.back(h) * (1 if self.inside else longest)


def with_lengths():
    """Only two samples have a row without negative numbers; most batches agree."""
    x = inputs()
    x[:, 0] = -1
    x[[5, 18]] = x[[5, 18]].abs()
    return TensorDataset(x, labels())


@hostile
@pytest.mark.parametrize("inside", [True, False])
def test_the_longest_of_the_batch_is_no_constant(run, inside):
    model = run.freeze(Longest(inside))
    run.fit(model, run.loader(with_lengths(), shuffle=True), 4)


@hostile
@pytest.mark.parametrize("kind", ["item", "int", "bool", "list", "shape"])
def test_a_number_taken_from_the_batch_is_no_constant(run, kind):
    class Taking(Net):
        def forward(self, x):
            positive = (x[:, 0] > 0).sum()
            number = {
                "item": lambda: positive.item(),
                "int": lambda: int(positive),
                "bool": lambda: 2.0 if positive > 4 else 1.0,
                "list": lambda: sum(x[:, 0].tolist()),
                "shape": lambda: (x[:, 0] > 0).nonzero().shape[0],
            }[kind]()
            return self.back(self.front(x) * (1 + 0.1 * number))

    run.fit(run.freeze(Taking()), run.loader(rows(), shuffle=True), 4)


@hostile
def test_the_number_of_rows_read_by_the_head_may_change(run):
    class Sized(Net):
        def forward(self, x):
            n = self.early(x).shape[0]
            return self.back(self.front(x)) * n

    run.fit(run.freeze(Sized()), run.loader(rows(20), shuffle=True), 4)


@hostile
def test_a_mask_made_of_the_longest_sentence_is_right(run):
    class Masked(Tokens):
        def forward(self, tokens):
            longest = int((tokens > 3).sum(1).max())
            tokens = tokens[:, :longest]
            return super().forward(tokens)

    run.fit(run.freeze(Masked(), "block"), run.loader(sentences(), shuffle=True), 4)


# ---- writes that move no counter --------------------------------------------------------------


@hostile
@pytest.mark.parametrize("how", ["data", "numpy", "detach"])
def test_a_feature_written_behind_the_boundary_is_not_stored_so(run, how):
    """The head's own code writes into what the boundary returned."""

    class Writing(Net):
        def back(self, h):
            if how == "data":
                h.data.mul_(2)
            elif how == "numpy":
                h.detach().numpy()[:] *= 2
            else:
                h.detach().mul_(2)
            return super().back(h)

    run.fit(run.freeze(Writing()), run.loader(rows()), 4)


@hostile
@pytest.mark.parametrize("how", ["mul_", "data", "numpy"])
def test_a_returned_feature_written_by_the_loop_is_not_stored_so(run, how):
    class Returning(Net):
        def forward(self, x):
            h = self.front(x)
            return self.back(h), h

    def loss(model, batch):
        out, h = model(batch[0])
        value = F.cross_entropy(out, batch[1]) + h.square().mean()
        with torch.no_grad():
            if how == "mul_":
                h.mul_(0)
            elif how == "data":
                h.data.mul_(0)
            else:
                h.detach().numpy()[:] = 0
        return value

    run.fit(run.freeze(Returning()), run.loader(rows()), 4, loss=loss)


@hostile
def test_a_cached_feature_written_by_a_hook_of_the_head_is_not_stored_so(run):
    model = run.freeze(Net())
    model.late.register_forward_pre_hook(lambda m, args: (args[0].data.mul_(1.5),))
    run.fit(model, run.loader(rows()), 4)


@hostile
def test_an_input_written_by_the_front_is_right(run):
    class Normalising(Net):
        def front(self, x):
            x.data.div_(x.data.norm(dim=1, keepdim=True))
            return super().front(x)

    def loss(model, batch):
        x, y = batch
        value = F.cross_entropy(model(x), y)
        run.see(x.sum())
        return value

    run.fit(run.freeze(Normalising()), run.loader(rows()), 4, loss=loss)


# ---- randomness -------------------------------------------------------------------------------


@hostile
@pytest.mark.parametrize("rare", [1, 3, 10])
def test_rare_randomness_around_the_boundary_is_seen_or_found(run, rare):
    """Every so often a number of Python's generator decides."""

    class Rare(Net):
        def front(self, x):
            if random.randrange(rare) == 0:
                x = x * 2
            return super().front(x)

    run.fit(run.freeze(Rare()), run.loader(rows()), 6)


@hostile
@pytest.mark.parametrize("own", ["torch", "numpy", "python"])
def test_a_generator_of_the_fronts_own_goes_on(run, own):
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.torch = torch.Generator().manual_seed(3)
            self.numpy = np.random.default_rng(3)
            self.python = random.Random(3)

        def front(self, x):
            noise = {
                "torch": lambda: torch.rand((), generator=self.torch),
                "numpy": self.numpy.random,
                "python": self.python.random,
            }[own]()
            return super().front(x * (1 + float(noise)))

    run.fit(run.freeze(Own()), run.loader(rows()), 4)


@hostile
def test_dropout_by_function_that_is_always_on_is_seen(run):
    class Dropping(Net):
        def front(self, x):
            return self.middle(F.dropout(torch.tanh(self.early(x)), 0.3, training=True))

    def loss(model, batch):
        torch.manual_seed(len(run.trace.values))
        return F.cross_entropy(model(batch[0]), batch[1])

    run.fit(run.freeze(Dropping()), run.loader(rows()), loss=loss)


@hostile(served=True)
def test_one_dropout_before_and_behind_the_boundary_drops_behind_it(run):
    """The module is the front's and the head's: held in one place, and active in the other."""

    class Shared(Net):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.4)

        def forward(self, x):
            h = self.middle(torch.tanh(self.early(x)))
            return self.head(self.drop(torch.tanh(self.late(h))))

    def loss(model, batch):
        torch.manual_seed(len(run.trace.values))
        return F.cross_entropy(model(batch[0]), batch[1])

    run.fit(run.freeze(Shared()), run.loader(rows()), 4, loss=loss)


@hostile
def test_norms_of_the_front_stand_still_in_a_loop_whose_batches_are_not_known(run):
    """Mixup makes another batch; BatchNorm of the frozen front must not learn from it."""

    def loss(model, batch):
        x, y = batch
        x = 0.7 * x + 0.3 * x.flip(0)
        return F.cross_entropy(model(x), y)

    run.fit(run.freeze(ConvNet(), "body"), run.loader(images()), 3, loss=loss)


@hostile
def test_norms_of_the_front_stand_still_under_plain_tensors(run):
    """The loop brings its own batches: no loader of ours."""
    model = run.freeze(ConvNet(), "body")
    x, y = images().tensors
    run.fit(model, [(x[:8], y[:8]), (x[8:16], y[8:16])], 3)


@hostile
def test_a_front_with_batch_statistics_as_such_is_right(run):
    """`track_running_stats=False`: also in inference mode a mean over the batch."""
    model = Net()
    model.early = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False))
    run.fit(run.freeze(model), run.loader(rows(), shuffle=True))


@hostile
def test_ghost_batches_of_the_front_are_seen(run):
    class Ghost(nn.Module):
        def forward(self, x):
            return torch.cat([part - part.mean(0) for part in x.split(4)])

    model = Net()
    model.early = nn.Sequential(nn.Linear(6, 8), Ghost())
    run.fit(run.freeze(model), run.loader(rows(), shuffle=True))


@hostile
def test_a_memory_bank_that_the_front_reads_is_read(run):
    class Bank(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("bank", torch.zeros(6))

        def front(self, x):
            return super().front(x + self.bank)

        def forward(self, x):
            out = super().forward(x)
            self.bank.lerp_(x.mean(0), 0.1)
            return out

    run.fit(run.freeze(Bank()), run.loader(rows()), 4)


@hostile
def test_a_branch_that_the_first_batch_does_not_take_is_taken(run):
    x = inputs()
    x[:8, 0] = -1

    class Branching(Net):
        def front(self, x):
            return super().front(x if x[:, 0].sum() < 0 else -x)

    model = run.freeze(Branching())
    run.fit(model, run.loader(TensorDataset(x, labels())), 4)


@hostile
def test_a_front_that_runs_other_modules_for_other_batches_is_right(run):
    class Routed(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(6, 8).requires_grad_(False)

        def front(self, x):
            early = self.early if x[0, 0] > 0 else self.other
            return self.middle(torch.tanh(early(x)))

    run.fit(run.freeze(Routed()), run.loader(rows(), shuffle=True), 4)
