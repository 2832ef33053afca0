"""A batch changes between the loader and the model: in place, through an alias, or in its shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.hostile.harness import hostile
from tests.hostile.loops import numbered, trained
from tests.hostile.nets import NUM_SAMPLES, inputs, labels

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


def from_the_second_epoch(run, write):
    """Return a loss that leaves its batches alone while they are stored, and then does not."""

    def loss(model, x, y, step):
        if step == 3:
            run.turn()
        if step >= 3:
            write(x, 2.0)
        return F.cross_entropy(model(x), y)

    return numbered(loss)


@hostile
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_batch_written_in_place_is_what_the_model_sees(run, write):
    trained(run, from_the_second_epoch(run, write))


@hostile
@pytest.mark.parametrize("write", [by_method, by_numpy, by_data], ids=lambda w: w.__name__)
def test_a_batch_written_in_every_epoch_is_what_the_model_sees(run, write):
    def loss(model, x, y, step):
        if step == 3:
            run.turn()  # so far the values were multiplied by one
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
    """The alias is taken of every batch, and written only from the second epoch on."""

    def loss(model, x, y, step):
        alias = ALIASES[how](x)
        x = x.to(torch.float32)
        if step == 3:
            run.turn()
        if step >= 3:
            alias *= 2.0
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_an_alias_written_between_two_calls_is_seen_by_the_second(run):
    def loss(model, x, y, step):
        view = x.view(-1)
        first = F.cross_entropy(model(x), y)
        if step >= 3:
            view.mul_(2)
        return first + F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_labels_written_in_place_are_what_the_loss_sees(run):
    def loss(model, x, y, step):
        if step >= 3:
            y.add_(1).remainder_(3)
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))


@hostile
def test_labels_written_through_numpy_are_what_the_loss_sees(run):
    def loss(model, x, y, step):
        array = y.numpy()
        if step >= 3:
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
        if step == 4:
            run.turn()
        if step >= 4:
            x.transpose_(0, 1)
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss), batch_size=6)


@hostile
def test_an_input_swapped_with_another_tensor_is_the_other(run):
    def loss(model, x, y, step):
        torch.utils.swap_tensors(x, torch.full_like(x, 0.1 * (step // 3)))
        return F.cross_entropy(model(x), y)

    trained(run, numbered(loss))
