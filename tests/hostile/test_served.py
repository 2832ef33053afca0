"""What can be served is served: ordinary loops, each with its own habit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import (
    ConvNet,
    Net,
    images,
    inputs,
    labels,
    rows,
)

# ---- what the loop does to its inputs ---------------------------------------------------------

MEAN, STD = torch.linspace(-0.5, 0.5, 6), torch.linspace(0.5, 1.5, 6)


PREPARED = {
    "normalised": lambda x: (x - MEAN) / STD,
    "by numbers": lambda x: (x - 0.5) / 2.0,
    "by methods": lambda x: x.sub(MEAN).div(STD),
    "affine": lambda x: x * STD + MEAN,
    "view": lambda x: x.view(len(x), -1),
    "flatten": lambda x: x.flatten(1),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "detached": lambda x: x.detach(),
    "sliced whole": lambda x: x[:],
}


@hostile(served=True)
@pytest.mark.parametrize("how", PREPARED)
def test_the_same_preparation_every_time_is_served(run, how):
    trained(run, lambda m, b: F.cross_entropy(m(PREPARED[how](b[0])), b[1]))


PREPARED_OTHERWISE = {
    "in place": lambda x: x.sub_(MEAN).div_(STD),
    "in place on a clone": lambda x: x.clone().sub_(MEAN).div_(STD),
    "permuted features": lambda x: x[:, [1, 0, 2, 3, 4, 5]],
    "flipped features": lambda x: x.flip(1),
    "F.normalize": F.normalize,
    "clamped": lambda x: x.clamp(-1, 1),
}


@hostile
@pytest.mark.parametrize("how", PREPARED_OTHERWISE)
def test_another_preparation_is_served_or_told(run, how):
    trained(run, lambda m, b: F.cross_entropy(m(PREPARED_OTHERWISE[how](b[0])), b[1]))


@hostile(served=True)
def test_images_are_normalised_per_channel(run):
    mean, std = torch.tensor([0.1, -0.1]), torch.tensor([0.9, 1.1])

    def loss(model, batch):
        x = (batch[0] - mean[None, :, None, None]) / std.view(1, 2, 1, 1)
        return F.cross_entropy(model(x), batch[1])

    trained(run, loss, model=ConvNet(), data=images(), boundary="body")


@hostile(served=True)
def test_bytes_become_floats(run):
    bytes_ = (inputs().sigmoid() * 255).to(torch.uint8)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0].float() / 255), batch[1])

    trained(run, loss, data=TensorDataset(bytes_, labels()))


@hostile
def test_images_interpolated_to_another_size_are_served_or_told(run):
    def loss(model, batch):
        x = F.interpolate(batch[0], size=(10, 10), mode="bilinear")
        return F.cross_entropy(model(x), batch[1])

    trained(run, loss, model=ConvNet(), data=images(), boundary="body")


# ---- micro-batches ----------------------------------------------------------------------------


def slices(x, y):
    return [(x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4)]


SPLITS = {
    "slices": slices,
    "chunk": lambda x, y: zip(x.chunk(2), y.chunk(2), strict=True),
    "split": lambda x, y: zip(x.split(4), y.split(4), strict=True),
    "tensor_split": lambda x, y: zip(x.tensor_split(3), y.tensor_split(3), strict=True),
    "narrow": lambda x, y: [(x.narrow(0, i, 4), y.narrow(0, i, 4)) for i in (0, 4)],
    "front and rest": lambda x, y: [(x[:3], y[:3]), (x[3:], y[3:])],
    "index": lambda x, y: [(x[[0, 2, 4, 6]], y[[0, 2, 4, 6]]), (x[[1, 3]], y[[1, 3]])],
}


@hostile(served=True)
@pytest.mark.parametrize("how", SPLITS)
def test_micro_batches_are_served(run, how):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            for part, targets in SPLITS[how](x, y):
                loss = F.cross_entropy(model(part), targets)
                run.record(loss)
                loss.backward()
            optimizer.step()
    run.see(model)


@hostile(served=True)
def test_gradient_accumulation_is_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), 4)
    optimizer = sgd(model)
    for _ in range(4):
        for number, batch in enumerate(loader):
            loss = cross_entropy(model, batch) / 2
            run.record(loss)
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    run.see(model)


@hostile(served=True)
@pytest.mark.parametrize(
    "permute",
    [
        lambda x, y: (lambda p: (x[p], y[p]))(torch.randperm(len(x))),
        lambda x, y: (x.flip(0), y.flip(0)),
        lambda x, y: (x.roll(1, 0), y.roll(1, 0)),
        lambda x, y: (lambda p: (x.index_select(0, p), y.index_select(0, p)))(
            torch.randperm(len(x))
        ),
    ],
    ids=["permutation", "flip", "roll", "index_select"],
)
def test_a_batch_in_another_order_is_known_rows(run, permute):
    trained(run, lambda m, b: (lambda p: F.cross_entropy(m(p[0]), p[1]))(permute(*b)))


@hostile(served=True)
def test_features_mixed_behind_the_boundary_are_served(run):
    """Manifold mixup."""

    class Mixing(Net):
        def forward(self, x, order=None, share=1.0):
            h = self.front(x)
            return self.back(h if order is None else share * h + (1 - share) * h[order])

    def loss(model, batch):
        x, y = batch
        share = 0.7
        order = torch.randperm(len(x))
        out = model(x, order, share)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    trained(run, loss, model=Mixing())
