"""What can be served is served: ordinary loops, each with its own habit."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.nets import (
    NUM_SAMPLES,
    ConvNet,
    Net,
    Pairs,
    Tokens,
    images,
    inputs,
    labels,
    rows,
    sentences,
)


def trained(run, loss=None, *, model=None, data=None, epochs=4, boundary="middle", **kwargs):
    model = run.freeze(model or Net(), boundary)
    run.fit(model, run.loader(data if data is not None else rows(), **kwargs), epochs, loss=loss)


# ---- what the loop does to its inputs ---------------------------------------------------------

MEAN, STD = torch.linspace(-0.5, 0.5, 6), torch.linspace(0.5, 1.5, 6)


PREPARED = {
    "normalised": lambda x: (x - MEAN) / STD,
    "by numbers": lambda x: (x - 0.5) / 2.0,
    "by methods": lambda x: x.sub(MEAN).div(STD),
    "by functions": lambda x: torch.div(torch.sub(x, MEAN), STD),
    "affine": lambda x: x * STD + MEAN,
    "from the left": lambda x: STD * x,
    "chain": lambda x: x.mul(2).float().contiguous(),
    "there and back": lambda x: x.to(torch.float64).to(torch.float32),
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
    "padded": lambda x: F.pad(x[:, :4], (1, 1)),
    "F.normalize": F.normalize,
    "clamped": lambda x: x.clamp(-1, 1),
    "squared": lambda x: -(x**2),
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
    "torch.chunk": lambda x, y: zip(torch.chunk(x, 2), torch.chunk(y, 2), strict=True),
    "split": lambda x, y: zip(x.split(4), y.split(4), strict=True),
    "split by sizes": lambda x, y: zip(x.split([3, 5]), y.split([3, 5]), strict=True),
    "tensor_split": lambda x, y: zip(x.tensor_split(3), y.tensor_split(3), strict=True),
    "narrow": lambda x, y: [(x.narrow(0, i, 4), y.narrow(0, i, 4)) for i in (0, 4)],
    "every second": lambda x, y: [(x[i::2], y[i::2]) for i in range(2)],
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


# ---- kinds of batches -------------------------------------------------------------------------


class Encoding(collections.UserDict):
    """As `transformers.BatchEncoding`: a mapping with attributes, and a `to`."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, *args, **kwargs):
        self.data = {key: value.to(*args, **kwargs) for key, value in self.data.items()}
        return self


class Holder:
    """A batch that is an object of no particular kind, as PyG's."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return Holder(self.x.to(device), self.y.to(device))


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


Point = collections.namedtuple("Point", "x y")

KINDS = {
    "mapping": lambda x, y: Encoding({"x": x, "y": y}),
    "object": Holder,
    "dataclass": Example,
    "named tuple": Point,
    "namespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "ordered": lambda x, y: collections.OrderedDict(x=x, y=y),
    "list": lambda x, y: [x, y],
    "nested": lambda x, y: {"inputs": {"x": x}, "targets": (y, [y])},
}


def read(batch):
    if isinstance(batch, dict) and "inputs" in batch:
        return batch["inputs"]["x"], batch["targets"][0]
    if isinstance(batch, list):
        return batch
    if isinstance(batch, collections.OrderedDict):
        return batch["x"], batch["y"]
    return batch.x, batch.y


@hostile(served=True)
@pytest.mark.parametrize("whole", [False, True], ids=["taken apart", "given whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_kind_are_served(run, kind, whole):
    class Whole(Net):
        def forward(self, batch):
            return super().forward(read(batch)[0] if whole else batch)

    def collate(samples):
        return KINDS[kind](*default_collate(samples))

    def loss(model, batch):
        x, y = read(batch)
        return F.cross_entropy(model(batch if whole else x), y)

    trained(run, loss, model=Whole(), collate_fn=collate)


@hostile(served=True)
@pytest.mark.parametrize("how", ["to", "unpacked"])
def test_an_encoding_is_moved_and_unpacked(run, how):
    class Keywords(Net):
        def forward(self, x, y=None):
            out = super().forward(x)
            return F.cross_entropy(out, y)

    def loss(model, batch):
        return model(**(batch.to("cpu") if how == "to" else batch))

    trained(
        run, loss, model=Keywords(),
        collate_fn=lambda s: Encoding(dict(zip("xy", default_collate(s), strict=True))),
    )  # fmt: skip


EXTRA = {
    "count": len,
    "number": lambda s: 0.5,
    "scalar tensor": lambda s: torch.tensor(len(s)),
    "text": lambda s: "train",
    "None": lambda s: None,
    "class weights": lambda s: torch.tensor([0.1, 0.2, 0.3]),
    "nested": lambda s: {"epoch": 1, "names": ["a"] * len(s)},
    "names": lambda s: [f"row {i}" for i in range(len(s))],
    "positions": lambda s: torch.arange(len(s)),
}


def with_extra(run, kind, whole):
    class Whole(Net):
        def forward(self, batch):
            return super().forward(batch["x"] if whole else batch)

    def collate(samples):
        x, y = default_collate(samples)
        return {"x": x, "y": y, "extra": EXTRA[kind](samples)}

    def loss(model, batch):
        if not isinstance(batch["extra"], dict | list):
            run.see(batch["extra"])
        return F.cross_entropy(model(batch if whole else batch["x"]), batch["y"])

    trained(run, loss, model=Whole(), collate_fn=collate)


@hostile(served=True)
@pytest.mark.parametrize("kind", [*EXTRA][:-2])
def test_a_batch_may_hold_more_than_rows(run, kind):
    with_extra(run, kind, whole=False)


@hostile(served=True)
@pytest.mark.parametrize("kind", ["count", "text", "nested"])
def test_a_batch_given_whole_may_hold_more_than_rows(run, kind):
    with_extra(run, kind, whole=True)


@hostile
@pytest.mark.parametrize("kind", ["names", "positions"])
def test_what_counts_the_places_of_a_batch_is_served_or_told(run, kind):
    with_extra(run, kind, whole=False)


@hostile(served=True)
def test_names_from_the_data_set_are_strings_of_the_batch(run):
    class Named(Pairs):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"x": x, "y": y, "name": f"image {index}"}

    def loss(model, batch):
        run.see(batch["name"][0])
        return F.cross_entropy(model(batch["x"]), batch["y"])

    trained(run, loss, data=Named())


class Sequences(nn.Module):
    """Time first, as recurrent networks have it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.GRU(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        return self.head(h.mean(0))


@hostile(served=True)
@pytest.mark.parametrize("how", ["collate", "loop"])
@pytest.mark.parametrize("boundary", ["embed", "rnn"])
def test_batches_with_time_first_are_served(run, how, boundary):
    def collate(samples):
        x, y = default_collate(samples)
        return (x.t().contiguous() if how == "collate" else x), y

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x if how == "collate" else x.t()), y)

    trained(run, loss, model=Sequences(), data=sentences(), boundary=boundary, collate_fn=collate)


@hostile(served=True)
@pytest.mark.parametrize("where", ["collate", "model"])
def test_masks_of_padded_sentences_are_served(run, where):
    masked(run, where)


@hostile
def test_masks_of_padded_sentences_made_by_the_loop_are_served_or_told(run):
    masked(run, "loop")


def masked(run, where):
    class Masking(Tokens):
        def forward(self, tokens, mask=None):
            return super().forward(tokens, (tokens == 0) if where == "model" else mask)

    def collate(samples):
        x, y = default_collate(samples)
        return {"tokens": x, "y": y, **({"mask": x == 0} if where == "collate" else {})}

    def loss(model, batch):
        mask = batch["tokens"] == 0 if where == "loop" else batch.get("mask")
        return F.cross_entropy(model(batch["tokens"], mask), batch["y"])

    tokens, y = sentences().tensors
    tokens[:, 0] = 1 + tokens[:, 0] % 10
    trained(
        run, loss, model=Masking(), data=TensorDataset(tokens, y), boundary="block",
        collate_fn=collate,
    )  # fmt: skip


# ---- labels -----------------------------------------------------------------------------------


@hostile(served=True)
@pytest.mark.parametrize(
    "relabel",
    [
        lambda y: y - 1,
        lambda y: y.sub_(1),
        lambda y: y.clone().add_(0) - 1,
        lambda y: F.one_hot(y - 1, 3).float() * 0.9 + 0.1 / 3,
        lambda y: (y - 1).long(),
        lambda y: torch.where(y > 1, y - 1, 0),
        lambda y: (y - 1)[:, None].squeeze(1),
    ],
    ids=["shifted", "in place", "cloned", "smoothed", "cast", "where", "reshaped"],
)
def test_labels_prepared_by_the_loop_are_served(run, relabel):
    trained(
        run, lambda m, b: F.cross_entropy(m(b[0]), relabel(b[1])),
        data=TensorDataset(inputs(), labels() + 1),
    )  # fmt: skip


@hostile(served=True)
def test_several_targets_are_served(run):
    data = StackDataset(x=inputs(), y=labels(), z=inputs(seed=5), weight=labels(seed=6) + 1.0)

    def loss(model, batch):
        out = model(batch["x"])
        each = F.cross_entropy(out, batch["y"], reduction="none") * batch["weight"]
        return each.mean() + F.mse_loss(out, batch["z"][:, :3])

    trained(run, loss, data=data)


@hostile(served=True)
def test_input_and_target_of_an_autoencoder_are_one_tensor(run):
    class Auto(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 6)

    trained(run, lambda m, x: F.mse_loss(m(x[0]), x[0]), model=Auto(), data=TensorDataset(inputs()))


# ---- loops ------------------------------------------------------------------------------------


@hostile(served=True)
def test_a_loader_made_anew_every_epoch_is_served(run):
    model = run.freeze(Net())
    data = rows()
    for _ in range(20):
        run.fit(model, run.loader(data), 1)


@hostile(served=True)
def test_a_loader_and_a_data_set_made_anew_every_epoch_are_served(run):
    model = run.freeze(Net())
    for epoch in range(4):
        run.fit(model, run.loader(Subset(rows(), [*range(24)]), shuffle=epoch > 1), 1)


@hostile(served=True)
def test_two_loaders_of_one_model_are_both_served(run):
    model = run.freeze(Net())
    loaders = [run.loader(rows()), run.loader(rows(seed=7), ours={"name": "other"})]
    for _ in range(3):
        for loader in loaders:
            run.fit(model, loader, 1)


@hostile(served=True)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between_is_served(run, context):
    model = run.freeze(Net())
    loader, other = run.loader(rows()), run.loader(rows(seed=7), 24, ours={"name": "val"})

    def evaluate(epoch):
        model.eval()
        with context():
            for x, y in other:
                run.record(F.cross_entropy(model(x), y))

    run.fit(model, loader, 5, each_epoch=evaluate)


@hostile(served=True)
def test_evaluation_in_the_middle_of_an_epoch_is_served(run):
    model = run.freeze(Net())
    other = run.loader(rows(seed=7), ours={"name": "val"})

    def evaluate(step):
        if step % 2 == 1:
            model.eval()
            with torch.no_grad():
                for x, y in other:
                    run.record(F.cross_entropy(model(x), y))
            model.train()

    run.fit(model, run.loader(rows()), 4, each_step=evaluate)


@hostile(served=True)
def test_two_calls_a_step_are_served(run):
    """R-drop: the same batch twice, dropout behind the boundary makes the difference."""

    class Dropping(Net):
        def back(self, h):
            return super().back(F.dropout(h, 0.3, self.training))

    def loss(model, batch):
        x, y = batch
        a, b = model(x), model(x)
        return F.cross_entropy(a, y) + F.cross_entropy(b, y) + F.mse_loss(a, b)

    trained(run, loss, model=Dropping())


@hostile(served=True)
def test_a_batch_used_for_several_steps_is_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model, 0.05)
    for _ in range(4):
        for batch in loader:
            for _ in range(3):
                run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile(served=True)
def test_sharpness_aware_steps_are_served(run):
    model = run.freeze(Net())
    active = [p for p in model.parameters() if p.requires_grad]
    loader = run.loader(rows())
    for _ in range(4):
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.record(loss)
            gradients = torch.autograd.grad(loss, active)
            with torch.no_grad():
                norm = torch.stack([g.norm() for g in gradients]).norm()
                for p, g in zip(active, gradients, strict=True):
                    p.add_(g, alpha=0.05 / float(norm))
            second = torch.autograd.grad(cross_entropy(model, batch), active)
            with torch.no_grad():
                for p, g, h in zip(active, gradients, second, strict=True):
                    p.sub_(g, alpha=0.05 / float(norm)).sub_(h, alpha=0.1)
    run.see(model)


@hostile(served=True)
def test_double_backward_is_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model, 0.05)
    for _ in range(4):
        for batch in loader:
            loss = cross_entropy(model, batch)
            gradients = torch.autograd.grad(loss, [*model.head.parameters()], create_graph=True)
            run.step(loss + sum(g.square().sum() for g in gradients), optimizer)
    run.see(model)


@hostile(served=True)
def test_autocast_and_a_scaler_are_served(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(4):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            run.record(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run.see(model)


@hostile(served=True)
def test_a_teacher_by_deepcopy_is_right_beside_it(run):
    model = run.freeze(Net())
    teacher = copy.deepcopy(model).requires_grad_(False).eval()

    def loss(model, batch):
        x, y = batch
        with torch.no_grad():
            target = teacher(x)
        return F.cross_entropy(model(x), y) + F.mse_loss(model(x), target)

    run.fit(model, run.loader(rows()), 4, loss=loss)


@hostile(served=True)
def test_a_mean_teacher_follows_the_student(run):
    model = run.freeze(Net())
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model, batch):
        x, y = batch
        with torch.no_grad():
            target = teacher(x)
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return F.cross_entropy(model(x), y) + F.mse_loss(model(x), target)

    run.fit(model, run.loader(rows()), 4, loss=loss)


@hostile(served=True)
@pytest.mark.parametrize("region", ["behind", "ends at the boundary", "layers of the head"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_served(run, region, reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            if region == "ends at the boundary":
                h = checkpoint(self.front, x, use_reentrant=reentrant)
                return self.back(h)
            h = self.front(x)
            if region == "behind":
                return checkpoint(self.back, h, use_reentrant=reentrant)
            h = checkpoint(self.late, torch.tanh(h), use_reentrant=reentrant)
            return self.head(torch.tanh(h))

    model = Checkpointed()
    if reentrant and region != "ends at the boundary":
        # The reentrant kind needs an input that asks for a gradient.
        class Asking(Checkpointed):
            def __init__(self):
                super().__init__()
                self.one = nn.Parameter(torch.ones(()))

            def front(self, x):
                return super().front(x) * self.one

        model = Asking()
        model.one.requires_grad_(True)
    with_warnings(run, model)


def with_warnings(run, model):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(run, model=model)


@hostile(served=True)
def test_a_last_partial_batch_is_served(run):
    trained(run, data=rows(21), shuffle=True)


@hostile(served=True)
def test_a_model_inside_of_the_users_module_is_served(run):
    """As Lightning's modules hold theirs: the cache is given the inner one."""

    class Module(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return cross_entropy(self.model, batch)

    model = run.freeze(Net())
    outer = Module(model)
    run.fit(outer, run.loader(rows()), 4, loss=lambda outer, batch: outer.training_step(batch))


@hostile(served=True)
def test_the_model_may_take_its_loss_along(run):
    class Lossy(Net):
        def forward(self, x, y=None):
            out = super().forward(x)
            return (out, None if y is None else F.cross_entropy(out, y))

    trained(run, lambda m, b: m(b[0], y=b[1])[1], model=Lossy())


@hostile(served=True)
def test_hidden_states_of_the_front_that_the_model_returns_are_served(run):
    class Returning(Net):
        def forward(self, x):
            early = torch.tanh(self.early(x))
            h = self.middle(early)
            return {"logits": self.back(h), "hidden": [early, h]}

    def loss(model, batch):
        out = model(batch[0])
        return F.cross_entropy(out["logits"], batch[1]) + sum(h.mean() for h in out["hidden"])

    trained(run, loss, model=Returning())


@hostile(served=True)
@pytest.mark.parametrize("order", [["early", "middle", "late"], ["middle", "early", "middle"]])
def test_a_boundary_that_moves_is_served_where_it_comes_to_rest(run, order):
    model = run.freeze(Net(), "early")
    loader = run.loader(rows())
    for boundary in order:
        run.move(model, boundary)
        run.fit(model, loader, 3)


@hostile(served=True)
def test_learning_rates_and_losses_may_change_at_will(run):
    model = run.freeze(Net())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    losses = [
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        lambda m, b: F.multi_margin_loss(m(b[0]), b[1]),
    ]

    def each_step(step):
        if step:
            schedule.step()

    steps = iter(range(100))
    run.fit(
        model, run.loader(rows()), 4, optimizer=optimizer, each_step=each_step,
        loss=lambda m, b: losses[next(steps) % 2](m, b),
    )  # fmt: skip


@hostile(served=True)
def test_active_layers_may_be_frozen_and_thawed_at_will(run):
    model = run.freeze(Net())

    def each_epoch(epoch):
        model.late.requires_grad_(epoch % 2 == 0)

    run.fit(model, run.loader(rows()), 5, each_epoch=each_epoch)


@hostile(served=True)
def test_a_head_replaced_by_a_wider_one_is_served_on(run):
    """Class-incremental training."""
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    model.head = nn.Linear(8, 5)
    run.fit(model, loader, 2)


@hostile(served=True)
def test_a_head_with_an_adapter_that_joins_is_served_on(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    model.late = nn.Sequential(model.late, nn.Tanh(), nn.Linear(8, 8))
    run.fit(model, loader, 2)


@hostile(served=True)
def test_weights_and_optimizer_loaded_from_a_checkpoint_are_served_on(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = run.fit(model, loader, 2)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    run.fit(model, loader, 1, optimizer=optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    run.fit(model, loader, 4, optimizer=optimizer)


class Noisy(Dataset):
    """A data set that draws from a generator of its own per sample: the same every time."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), labels()[index]


@hostile(served=True)
def test_a_data_set_with_generators_of_its_own_is_served(run):
    trained(run, data=Noisy())
