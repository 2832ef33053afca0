"""Where nothing can be served the user learns it at once, once, and by name."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import Run, cross_entropy, hostile, judge
from tests.hostile.loops import trained
from tests.hostile.nets import Net, made, net, rows, seeded


class Wrapping(list):
    """Batches of a loader as tensors of its own, made anew in each pass."""

    def __iter__(self):
        for loader in super().__iter__():
            for x, y in loader:
                yield torch.tensor(x.tolist()), torch.tensor(y.tolist())


def without_our_loader(run):
    return [rows()[:8], rows()[8:16]]


@hostile(over={"a wrapper": lambda run: Wrapping([run.loader(rows())]), "none": without_our_loader})
def test_a_loop_without_our_loader_is_told(run, batches):
    run.fit(run.freeze(Net()), batches(run), 3)


@hostile(told="not the same when it is loaded again under the same seed")
def test_a_data_set_that_differs_every_time_is_told(run):
    """Its own generator goes on from sample to sample: nothing seeds it."""
    generator = seeded(3)
    restless = made(lambda d, i: (d.x[i] + torch.rand((), generator=generator), d.y[i]))
    model = run.freeze(Net())
    for _ in range(3):  # a loader for each epoch: it is said once
        # The draws of the self-test move this generator: the numbers are of no use, the words are.
        run.fit(model, run.loader(restless), 1, loss=lambda m, b: 0.0 * cross_entropy(m, b))


@pytest.mark.parametrize("given", [int, float, str])
@hostile(told="has another value each time")
def test_an_epoch_that_is_given_to_the_front_is_told(run, given):
    epoch = [0]

    def begin(model, number):
        epoch[0] = number
        if number == 2:
            run.turn()

    model = net(forward=lambda m, x, epoch: m.back(m.front(x * (1 + float(epoch)))))
    loss = lambda m, b: F.cross_entropy(m(b[0], given(epoch[0])), b[1])  # noqa: E731
    trained(run, loss, model=model, epochs=4, each_epoch=begin)


@hostile(over={"all": list, "one": lambda loader: 14 * [next(iter(loader))]}, told="again")
def test_batches_that_a_loop_keeps_are_told(run, keep):
    model = run.freeze(Net())
    kept = keep(run.loader(rows()))
    run.fit(model, kept, 3, each_epoch=lambda epoch: run.turn() if epoch == 1 else None)


def test_an_object_of_unknown_parts_that_the_front_makes_is_told(tmp_path):
    make = lambda self, x: types.SimpleNamespace(h=nn.Linear.forward(self, x))  # noqa: E731
    model = net(forward=lambda m, x: m.back(m.middle(m.early(x)).h))
    model.middle = type("Making", (nn.Linear,), {"forward": make})(8, 8)
    trace = Run("always", tmp_path / "cache").run(lambda run: trained(run, model=model))
    assert "a 'SimpleNamespace'" in str(trace.error)


def mixing(model, x):
    h = model.early(x)
    return model.middle(h - h.mean(0))


def backwards(model, x):
    h = torch.tanh(model.late(torch.tanh(model.early(x))))
    return model.head(torch.tanh(model.middle(h)))


MODELS = {
    "trained code before it": (
        "trainable",
        lambda: net(
            front=lambda m, x: Net.front(m, x + m.prompt), prompt=nn.Parameter(torch.zeros(6))
        ),
    ),
    "samples are mixed": ("middle", lambda: net(front=mixing)),
    "traced": (
        "traced or scripted",
        lambda: net(early=torch.jit.trace(nn.Linear(6, 8), torch.zeros(2, 6))),
    ),
    "never runs": (None, lambda: net(front=lambda m, x: torch.tanh(m.early(x)))),
    "runs last": (None, lambda: net(forward=backwards)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(("told", "make"), MODELS.values(), ids=list(MODELS))
def test_a_boundary_that_cannot_be_cut_is_told_by_name(told, make):
    judge(lambda run: trained(run, model=make()), told=told)


@hostile
def test_a_model_called_under_another_name_is_told(run):
    """`model.forward_features(x)` passes the model's own call by."""
    early = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    model = net(early=early)
    type(model).forward_features = lambda self, x: self.front(x)
    trained(run, lambda m, b: F.cross_entropy(m.back(m.forward_features(b[0])), b[1]), model=model)


IN_LISTS = {
    "stacked in the loop": (
        {"collate_fn": lambda batch: tuple(zip(*batch, strict=True))},
        lambda m, b: F.cross_entropy(m(torch.stack(b[0])), torch.stack(b[1])),
    ),
    "nested": (
        {"collate_fn": lambda b: [torch.nested.nested_tensor([*x]) for x in zip(*b, strict=True)]},
        lambda m, b: F.cross_entropy(m(torch.stack(b[0].unbind())), torch.stack(b[1].unbind())),
    ),
    "each by itself": (
        {"collate_fn": lambda batch: list(zip(*batch, strict=True))},
        lambda m, b: sum(F.cross_entropy(m(x[None]), y[None]) for x, y in zip(*b, strict=True)),
    ),
    "a batch is a sample": (
        {"batch_size": 1, "collate_fn": lambda batch: (batch[0][0].repeat(3, 1), batch[0][1])},
        lambda m, b: F.cross_entropy(m(b[0]).mean(0), b[1]),
    ),
}


@hostile(over=IN_LISTS, told="in the collate_fn")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_without_rows_are_told_as_such(run, options, loss):
    trained(run, loss, **options)


def packed(samples):
    x, y = map(torch.stack, zip(*samples, strict=True))
    return {"x": x.repeat_interleave(2, 0), "y": y}


def test_a_structure_in_which_samples_have_no_rows_is_told_and_no_error(tmp_path):
    model = net(forward=lambda m, batch: m.back(m.front(batch["x"]))[::2])
    loss = lambda m, b: F.cross_entropy(m(b), b["y"])  # noqa: E731
    script = lambda run: trained(run, loss, model=model, collate_fn=packed)  # noqa: E731
    trace = Run("always", tmp_path / "cache").run(script)
    assert (trace.error, trace.calls) == (None, 9)
    assert "holds no row for each sample" in str(trace.why_not)


@hostile
def test_what_changes_at_every_step_is_told(run):
    trained(run, each_step=lambda model, step: model.early.weight.data.mul_(0.99), epochs=4)
