"""A batch changes between the loader and the model: in place, through an alias, or in its shape."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from tests.hostile.harness import hostile
from tests.hostile.nets import NUM_SAMPLES, Net, inputs, labels, rows


def trained(run, loss, *, model=None, data=None, epochs=4, **kwargs):
    """Train with a loss that does something to its batch, which differs from epoch to epoch."""
    model = run.freeze(model or Net())
    loader = run.loader(data if data is not None else rows(), **kwargs)
    run.fit(model, loader, epochs, loss=loss)


def numbered(function):
    """Return a loss that calls `function(model, x, y, step)`."""
    steps = iter(range(10_000))
    return lambda model, batch: function(model, *batch, next(steps))


# ---- values written in place: what reaches the model is what was written ----------------------


def by_method(x, f):
    x.mul_(f)


def by_index(x, f):
    x[:, :3] = f


def by_numpy(x, f):
    np.multiply(x.numpy(), f, out=x.numpy())


def by_data(x, f):
    x.data.mul_(f)


def by_detached(x, f):
    x.detach().mul_(f)


def by_view(x, f):
    x.view(-1)[::2] *= f


def by_row(x, f):
    for row in x:
        row.mul_(f)


def by_chunk(x, f):
    x.chunk(2)[0].mul_(f)


def by_out(x, f):
    torch.mul(x, f, out=x)


def by_dlpack(x, f):
    torch.from_dlpack(x).mul_(f)


def by_mask(x, f):
    x.masked_fill_(x > 0, f)


def by_set(x, f):
    x.set_((x * f).detach().clone())


def by_new_data(x, f):
    x.data = x.data * f


def by_relu(x, f):
    F.relu(x, inplace=True)
    x.add_(f)


def by_storage(x, f):
    other = (x * f).detach().clone()
    x.untyped_storage().copy_(other.untyped_storage())


WRITES = [
    by_method, by_index, by_numpy, by_data, by_detached, by_view, by_row,
    by_chunk, by_out, by_dlpack, by_mask,
    by_set, by_new_data, by_relu, by_storage,
]  # fmt: skip


def from_the_third_epoch(run, write):
    """Return a loss that leaves its batches alone while they are stored, and then does not."""

    def loss(model, x, y, step):
        if step == 6:
            run.turn()
        if step >= 6:
            write(x, 2.0)
        return F.cross_entropy(model(x), y)

    return numbered(loss)


@hostile
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_batch_written_in_place_is_what_the_model_sees(run, write):
    trained(run, from_the_third_epoch(run, write))


@hostile
@pytest.mark.parametrize("write", WRITES[:4], ids=lambda write: write.__name__)
def test_a_batch_written_in_every_epoch_is_what_the_model_sees(run, write):
    def loss(model, x, y, step):
        write(x, 1.0 + 0.3 * (step // 3))
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


ALIASES = {
    "numpy": lambda x: x.numpy(),
    "data": lambda x: x.data,
    "detached": lambda x: x.detach(),
    "view": lambda x: x.view(len(x), 2, 3),
    "dlpack": torch.from_dlpack,
    "memoryview": lambda x: np.asarray(memoryview(x.numpy())),
    "expanded": lambda x: x.expand(1, -1, -1),
    "row": lambda x: x[3],
}


@hostile
@pytest.mark.parametrize("how", ALIASES)
def test_an_alias_that_is_written_later_writes_the_batch(run, how):
    """The alias is taken of every batch, and written only in the third epoch."""

    def loss(model, x, y, step):
        alias = ALIASES[how](x)
        x = x.to(torch.float32)
        if step == 6:
            run.turn()
        if step >= 6:
            alias *= 2.0
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_an_alias_written_between_two_calls_is_seen_by_the_second(run):
    def loss(model, x, y, step):
        view = x.view(-1)
        first = F.cross_entropy(model(x), y)
        if step >= 6:
            view.mul_(2)
        return first + F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_labels_written_in_place_are_what_the_loss_sees(run):
    def loss(model, x, y, step):
        if step >= 6:
            y.add_(1).remainder_(3)
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_labels_written_through_numpy_are_what_the_loss_sees(run):
    def loss(model, x, y, step):
        array = y.numpy()
        if step >= 6:
            array += 1
            array %= 3
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_labels_that_are_stored_with_hits_are_not_those_written(run):
    """The model's call comes before the labels are written; the next epoch's are the data set's."""

    def loss(model, x, y, step):
        out = model(x)
        y.mul_(0) if step % 2 else None
        return F.cross_entropy(out, y)

    class Fresh(Dataset):
        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            return inputs()[index], labels()[index]

    trained(run, numbered(loss), data=Fresh())


@hostile
def test_labels_of_a_batch_of_hits_written_through_numpy_stay_the_data_sets(run):
    def loss(model, x, y, step):
        out = model(x)
        value = F.cross_entropy(out, y)
        y.numpy()[:] = 0
        return value

    trained(run, numbered(loss), epochs=5)


@hostile
def test_an_input_written_after_the_call_is_not_what_is_stored(run):
    def loss(model, x, y, step):
        out = model(x)
        x.zero_()
        return F.cross_entropy(out, y)

    trained(run, numbered(loss))


@hostile
@pytest.mark.parametrize("noise", ["new", "in place"])
def test_noise_of_the_loop_is_fresh_every_time(run, noise):
    def loss(model, x, y, step):
        if noise == "new":
            x = x + 0.5 * torch.randn_like(x)
        else:
            x += 0.5 * torch.randn(x.shape)
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x.unsqueeze_(1), y)[0],
        lambda x, y: x.transpose_(0, 1),
        lambda x, y: x.t_(),
        lambda x, y: x.squeeze_(),
        lambda x, y: x.swapaxes_(0, 1),
        lambda x, y: x.resize_(len(x), 6),
    ],
    ids=["unsqueeze_", "transpose_", "t_", "squeeze_", "swapaxes_", "resize_"],
)
def test_a_shape_changed_in_place_is_the_shape(run, change):
    def loss(model, x, y, step):
        change(x, y)
        x = x.reshape(-1, 6) if x.shape[0] == len(y) else x.t().contiguous()
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_labels_unsqueezed_in_place_have_another_shape(run):
    def loss(model, x, y, step):
        y.unsqueeze_(1)
        out = model(x)
        run.see(y.dim())
        return F.cross_entropy(out, y.squeeze(1))

    trained(run, numbered(loss))


@hostile
def test_square_batches_transposed_in_place_are_transposed(run):
    """Six samples of six numbers: only the values tell that the batch was turned."""

    def loss(model, x, y, step):
        if step >= 8:
            x.transpose_(0, 1)
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss), batch_size=6)


@hostile
def test_an_input_swapped_with_another_tensor_is_the_other(run):
    def loss(model, x, y, step):
        torch.utils.swap_tensors(x, torch.full_like(x, 0.1 * (step // 3)))
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


# ---- buffers that are used again --------------------------------------------------------------


class Buffered:
    """A collate function that fills the same memory for every batch."""

    def __init__(self, through_numpy=False):
        self.x, self.y = torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)
        self.through_numpy = through_numpy

    def __call__(self, samples):
        for i, (x, y) in enumerate(samples):
            if self.through_numpy:
                self.x.numpy()[i], self.y.numpy()[i] = x.numpy(), y.item()
            else:
                self.x[i], self.y[i] = x, y
        return self.x[: len(samples)], self.y[: len(samples)]


@hostile
@pytest.mark.parametrize("through_numpy", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_collate_function_may_use_its_buffer_again(run, through_numpy, shuffle):
    trained(
        run, lambda m, b: F.cross_entropy(m(b[0]), b[1]), collate_fn=Buffered(through_numpy),
        shuffle=shuffle,
    )  # fmt: skip


@hostile
def test_a_collate_function_may_give_the_same_dict_every_time(run):
    shell = {}

    def collate(samples):
        shell["x"], shell["y"] = default_collate(samples)
        return shell

    trained(run, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), collate_fn=collate)


@hostile
def test_a_shared_dict_may_be_added_to_by_the_loop(run):
    shell = {"meta": {"seen": 0}}

    def collate(samples):
        shell["x"], shell["y"] = default_collate(samples)
        return shell

    def loss(model, batch):
        batch["meta"]["seen"] += 1
        run.see(batch["meta"]["seen"])
        return F.cross_entropy(model(batch["x"]), batch["y"])

    trained(run, loss, collate_fn=collate)


@hostile
def test_a_data_set_may_give_views_of_one_buffer(run):
    class Views(Dataset):
        def __init__(self):
            self.buffer = torch.zeros(6)

        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            self.buffer.copy_(inputs()[index])
            return self.buffer.clone(), labels()[index]

    trained(run, lambda m, b: F.cross_entropy(m(b[0]), b[1]), data=Views())


# ---- structures whose constructors act --------------------------------------------------------


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    y: torch.Tensor
    num_made: int = 0

    def __post_init__(self):
        self.x = self.x * 2
        self.num_made += 1


class Doubling(NamedTuple("Doubling", [("x", torch.Tensor), ("y", torch.Tensor)])):
    def __new__(cls, x, y):
        return super().__new__(cls, x * 2, y)


class Dropping(collections.UserDict):
    """A mapping that changes what is put into it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2 if key == "x" else value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    extra: str = dataclasses.field(init=False, default="")

    def __post_init__(self):
        object.__setattr__(self, "extra", "made")


@dataclasses.dataclass
class Keyed:
    x: torch.Tensor
    y: torch.Tensor
    where: dataclasses.InitVar[int] = 3

    def __post_init__(self, where):
        self.x = self.x + where


class Attributed(dict):
    """A mapping with attributes beside its items."""

    def __init__(self, **items):
        super().__init__(items)
        self.size = len(items["y"])

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


@hostile
@pytest.mark.parametrize(
    "kind", [Scaled, Doubling, Frozen, Keyed, Attributed], ids=lambda kind: kind.__name__
)
def test_a_structure_is_made_once(run, kind):
    def collate(samples):
        x, y = default_collate(samples)
        return kind(x=x, y=y)

    def loss(model, batch):
        assert type(batch) is kind
        run.see(getattr(batch, "num_made", 0))
        run.see(getattr(batch, "extra", "none"))
        return F.cross_entropy(model(batch.x), batch.y)

    trained(run, loss, collate_fn=collate)


@hostile
def test_a_mapping_that_changes_what_it_is_given_does_so_once(run):
    def collate(samples):
        x, y = default_collate(samples)
        return Dropping(x=x, y=y)

    trained(run, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), collate_fn=collate)


@hostile
def test_a_default_dict_stays_one(run):
    def collate(samples):
        x, y = default_collate(samples)
        return collections.defaultdict(lambda: torch.ones(()), x=x, y=y)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]) * batch["weight"]

    trained(run, loss, collate_fn=collate)


@hostile
def test_two_leaves_that_share_their_memory_go_on_sharing_it(run):
    def collate(samples):
        x, y = default_collate(samples)
        return {"x": x, "same": x, "y": y}

    def loss(model, batch):
        batch["same"].mul_(2)
        return F.cross_entropy(model(batch["x"]), batch["y"])

    trained(run, loss, collate_fn=collate)


@hostile
def test_a_batch_kept_and_used_again_is_what_it_was(run):
    """The first batch is kept, and trained on once more in every epoch."""
    kept = []

    def loss(model, batch):
        if not kept:
            kept.append(batch)
        return F.cross_entropy(model(batch[0]), batch[1]) + F.cross_entropy(
            model(kept[0][0]), kept[0][1]
        )

    trained(run, loss)


@hostile
def test_a_whole_epoch_of_batches_kept_is_what_it_was(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    for _ in range(3):
        batches = list(loader)
        run.fit(model, batches, 2)


@hostile
def test_rows_dropped_from_a_batch_are_dropped(run):
    """Only the samples that are hard are trained on."""

    def loss(model, x, y, step):
        keep = x[:, 0] > 0
        return F.cross_entropy(model(x[keep]), y[keep])

    trained(run, numbered(loss))


@hostile
def test_rows_in_another_order_are_in_that_order(run):
    def loss(model, x, y, step):
        order = torch.randperm(len(x))
        return F.cross_entropy(model(x[order]), y[order])

    trained(run, numbered(loss))


@hostile
def test_two_batches_joined_are_both(run):
    model = run.freeze(Net())
    loader = run.loader(rows())

    def pairs():
        iterator = iter(loader)
        for a, b in zip(iterator, iterator, strict=False):
            yield torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])

    for _ in range(3):
        run.fit(model, list(pairs()), 1)


@hostile
def test_inputs_and_labels_of_two_loaders_are_each_their_own(run):
    """Semi-supervised: one model, two loaders in step, joined in one call."""
    model = run.freeze(Net())
    labelled, other = run.loader(rows()), run.loader(rows(seed=9))
    for _ in range(3):
        batches = zip(labelled, other, strict=True)
        run.fit(model, [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in batches], 1)
