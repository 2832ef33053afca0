"""Where nothing can be served the user learns it at once, once, and by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from tests.hostile.harness import cross_entropy, hostile, judge, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import NUM_SAMPLES, Net, inputs, labels, net, rows


class Wrapping:
    """A loader around the loader, that makes tensors of its own."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for x, y in self.loader:
            yield torch.tensor(x.tolist()), torch.tensor(y.tolist())


@hostile
def test_a_wrapper_that_makes_other_tensors_is_told(run):
    run.fit(run.freeze(Net()), Wrapping(run.loader(rows())), 3)


@hostile
def test_a_loop_without_our_loader_is_told(run):
    x, y = rows().tensors
    run.fit(run.freeze(Net()), [(x[:8], y[:8]), (x[8:16], y[8:16])], 3)


@hostile
def test_an_iterable_data_set_is_told(run):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(inputs(), labels(), strict=True))

        def __len__(self):
            return NUM_SAMPLES

    trained(run, None, data=Stream())


@hostile
def test_a_data_set_that_differs_every_time_is_told(run):
    """Its own generator goes on from sample to sample: nothing seeds it."""

    class Restless(TensorDataset):
        generator = torch.Generator().manual_seed(3)

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.rand((), generator=self.generator), y

    # The draws of the self-test move this generator: the numbers are of no use, the words are.
    model = run.freeze(Net())
    loader = run.loader(Restless(inputs(), labels()))
    optimizer = sgd(model)
    for _ in range(3):
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.record(0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_a_boundary_that_cannot_be_cut_is_told_by_name(kind):
    told, make = MODELS[kind]
    judge(lambda run: trained(run, model=make()), told=told)


@hostile
def test_a_model_called_under_another_name_is_told(run):
    """`model.forward_features(x)` passes the model's own call by."""
    model = net(forward_features=None)
    type(model).forward_features = lambda self, x: self.front(x)
    del model.forward_features
    trained(run, lambda m, b: F.cross_entropy(m.back(m.forward_features(b[0])), b[1]), model=model)


IN_LISTS = {
    "stacked in the loop": (
        {"collate_fn": lambda batch: tuple(zip(*batch, strict=True))},
        lambda m, b: F.cross_entropy(m(torch.stack(b[0])), torch.stack(b[1])),
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


@pytest.mark.parametrize("kind", IN_LISTS)
def test_batches_without_rows_are_told_as_such(kind):
    options, loss = IN_LISTS[kind]
    judge(lambda run: trained(run, loss, **options), told="in the collate_fn")


@hostile
def test_what_changes_at_every_step_is_told(run):
    trained(run, each_step=lambda model, step: model.early.weight.data.mul_(0.99), epochs=4)
