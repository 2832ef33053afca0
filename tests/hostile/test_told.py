"""Where nothing can be served the user learns it at once, once, and by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tests.hostile.harness import hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import NUM_SAMPLES, ConvNet, Net, images, inputs, labels, rows


def mixed(x):
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def cut(x):
    x = x.clone()
    x[:, :3] = x.flip(0)[:, :3]
    return x


@hostile
@pytest.mark.parametrize("prepare", [mixed, cut], ids=["mixup", "cutmix"])
def test_inputs_mixed_with_each_other_are_told(run, prepare):
    trained(run, lambda m, b: F.cross_entropy(m(prepare(b[0])), b[1]))


CHANGES = {
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.2),
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x + x.roll(1, 0),
    "cumsum": lambda x: x.cumsum(0),
    "numpy": lambda x: torch.from_numpy(np.random.permutation(x.numpy())),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[1:2]),
}


@hostile
@pytest.mark.parametrize("name", CHANGES)
def test_a_random_or_mixing_change_of_the_loop_is_told(run, name):
    def loss(model, batch):
        x = CHANGES[name](batch[0])
        y = batch[1].repeat(len(x) // len(batch[1]))
        return F.cross_entropy(model(x), y)

    trained(run, loss)


@hostile(told="sort")
def test_the_operation_is_named(run):
    trained(run, lambda m, b: F.cross_entropy(m(b[0].sort(0).values), b[1]))


@hostile(told="cumsum")
def test_the_operation_in_the_middle_of_a_chain_is_named(run):
    def loss(model, batch):
        x = batch[0].float() * 2
        x = x.cumsum(0)
        return F.cross_entropy(model(x / 3), batch[1])

    trained(run, loss)


@hostile(told="add")
def test_an_operation_in_place_is_named(run):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0].add_(torch.randn(6))), batch[1])

    trained(run, loss)


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
def test_batches_that_are_sent_through_numpy_are_told(run):
    def loss(model, batch):
        return F.cross_entropy(model(torch.from_numpy(batch[0].numpy().copy())), batch[1])

    trained(run, loss)


@hostile
def test_batches_as_arrays_are_told(run):
    def collate(samples):
        x, y = default_collate(samples)
        return x.numpy(), y.numpy()

    def loss(model, batch):
        return F.cross_entropy(model(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))

    trained(run, loss, collate_fn=collate)


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
    data = Restless(inputs(), labels())
    model = run.freeze(Net())
    loader = run.loader(data)
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            run.record(0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@hostile
def test_a_random_crop_of_the_loop_is_told(run):
    def loss(model, batch):
        x, y = batch
        at = int(torch.randint(3, ()))
        return F.cross_entropy(model(x[:, :, at : at + 6, at : at + 6]), y)

    trained(run, loss, model=ConvNet(), data=images(), boundary="body")


@hostile
def test_another_size_for_every_batch_is_told(run):
    steps = iter(range(1000))

    def loss(model, batch):
        x, y = batch
        size = 8 + next(steps) % 5
        return F.cross_entropy(model(F.interpolate(x, size=(size, size))), y)

    trained(run, loss, model=ConvNet(), data=images(), boundary="body")


@hostile
def test_a_temperature_drawn_for_every_batch_is_told(run):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0] * float(1 + torch.rand(()))), batch[1])

    trained(run, loss)


@hostile(told="trainable")
def test_a_boundary_with_trained_code_before_it_is_told_by_name(run):
    class Prompted(Net):
        def __init__(self):
            super().__init__()
            self.prompt = torch.nn.Parameter(torch.zeros(6))

        def front(self, x):
            return super().front(x + self.prompt)

    trained(run, None, model=Prompted())


@hostile(told="middle")
def test_a_front_that_mixes_its_samples_is_told_by_name(run):
    class Mixing(Net):
        def front(self, x):
            h = self.early(x)
            return self.middle(h - h.mean(0))

    trained(run, None, model=Mixing())


@hostile
def test_a_boundary_that_never_runs_is_told(run):
    class Unused(Net):
        def front(self, x):
            return torch.tanh(self.early(x))

    trained(run, None, model=Unused())


@hostile
def test_a_boundary_that_runs_last_is_served_or_told(run):
    class Backwards(Net):
        def forward(self, x):
            h = torch.tanh(self.early(x))
            h = torch.tanh(self.late(h))
            return self.head(torch.tanh(self.middle(h)))

    trained(run, None, model=Backwards())


@hostile
def test_a_model_called_under_another_name_is_told(run):
    """`model.forward_features(x)` passes the model's own call by."""

    class Featuring(Net):
        def forward_features(self, x):
            return self.front(x)

    trained(
        run, lambda m, b: F.cross_entropy(m.back(m.forward_features(b[0])), b[1]),
        model=Featuring(),
    )  # fmt: skip


@hostile
def test_a_batch_of_two_loaders_is_told(run):
    model = run.freeze(Net())
    one, other = run.loader(rows()), run.loader(rows(seed=9), ours={"name": "other"})
    optimizer = sgd(model)
    for _ in range(3):
        for a, b in zip(one, other, strict=True):
            x = torch.cat([a[0], b[0]])
            run.step(F.cross_entropy(model(x), torch.cat([a[1], b[1]])), optimizer)
    run.see(model)


@hostile
def test_inputs_that_ask_for_gradients_are_told(run):
    def loss(model, batch):
        x = batch[0].requires_grad_()
        return F.cross_entropy(model(x), batch[1])

    trained(run, loss)


@hostile
def test_what_changes_at_every_step_is_told(run):
    model = run.freeze(Net())

    def each_step(step):
        with torch.no_grad():
            model.early.weight.mul_(0.99)

    run.fit(model, run.loader(rows()), 4, each_step=each_step)
