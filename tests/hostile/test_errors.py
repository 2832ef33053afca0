"""What plain PyTorch does without an error is done without one here."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset, default_collate

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.nets import NUM_SAMPLES, Net, Pairs, inputs, labels, rows


def trained(run, loss=None, *, model=None, data=None, epochs=3, **kwargs):
    model = run.freeze(model or Net())
    run.fit(model, run.loader(data if data is not None else rows(), **kwargs), epochs, loss=loss)


# ---- gradients by the input -------------------------------------------------------------------


@hostile
def test_fgsm_asks_for_the_gradient_by_the_input(run):
    def loss(model, batch):
        x, y = batch
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), y)

    trained(run, loss)


@hostile
def test_fgsm_in_one_epoch_of_several(run):
    steps = iter(range(1000))

    def loss(model, batch):
        x, y = batch
        if next(steps) // 3 != 2:
            return F.cross_entropy(model(x), y)
        x.requires_grad_()
        value = F.cross_entropy(model(x), y)
        value.backward()
        run.see(x.grad)
        return F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), y)

    trained(run, loss, epochs=4)


@hostile
def test_a_gradient_penalty_by_the_input(run):
    def loss(model, batch):
        x, y = batch
        x = x.clone().requires_grad_(True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + gradient.square().mean()

    trained(run, loss)


@hostile
def test_an_attribute_requires_grad_that_is_set(run):
    def loss(model, batch):
        x, y = batch
        x.requires_grad = True
        value = F.cross_entropy(model(x), y)
        run.see(torch.autograd.grad(value, x, retain_graph=True)[0])
        return value

    trained(run, loss)


@hostile
def test_a_learned_perturbation_of_the_input_trains(run):
    delta = torch.zeros(6, requires_grad=True)
    model = run.freeze(Net())
    optimizer = torch.optim.SGD([delta, *model.late.parameters()], lr=0.1)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0] + delta), batch[1])

    run.fit(model, run.loader(rows()), 3, loss=loss, optimizer=optimizer)
    run.see(delta)


# ---- features that the loop reads -------------------------------------------------------------


@hostile
@pytest.mark.parametrize("name", ["early", "middle"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_feature_taken_by_a_hook_can_be_read(run, name, kind):
    model = Net()
    taken = {}
    module = model.get_submodule(name)
    if kind == "forward":
        module.register_forward_hook(lambda m, a, out: taken.update(feature=out))
    else:
        module.register_forward_pre_hook(lambda m, a: taken.update(feature=a[0]))

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        run.see(taken["feature"].norm())
        return value + taken["feature"].square().mean()

    trained(run, loss, model=model)


@hostile
def test_a_feature_hook_that_joins_later_can_be_read(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    taken = []
    model.early.register_forward_hook(lambda m, a, out: taken.append(out))

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value + taken[-1].square().mean()

    run.fit(model, loader, 2, loss=loss)


@hostile
def test_a_feature_kept_as_an_attribute_can_be_read(run):
    class Keeping(Net):
        def front(self, x):
            self.feature = self.early(x)
            return self.middle(torch.tanh(self.feature))

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value + model.feature.square().mean()

    trained(run, loss, model=Keeping())


@hostile
def test_a_submodule_called_by_the_loop_gives_its_output(run):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) + model.early(x).square().mean()

    trained(run, loss)


@hostile
def test_the_front_and_the_back_called_one_after_the_other(run):
    def loss(model, batch):
        with torch.no_grad():
            h = model.front(batch[0])
        return F.cross_entropy(model.back(h), batch[1])

    trained(run, loss)


# ---- a boundary that has to be given up -------------------------------------------------------


class Packed(nn.Module):
    """Reads sentences of several lengths through a packed sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(h.mean(1))


@hostile
@pytest.mark.parametrize("boundary", ["embed", "gru"])
def test_packed_sequences_pass(run, boundary):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(11, (NUM_SAMPLES, 5), generator=generator)
    lengths = torch.randint(2, 6, (NUM_SAMPLES,), generator=generator)
    model = run.freeze(Packed(), boundary)
    run.fit(
        model, run.loader(TensorDataset(tokens, lengths, labels()), shuffle=True), 3,
        loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
    )  # fmt: skip


@hostile
def test_a_last_batch_as_large_as_a_constant_passes(run):
    """Four positions, and a last batch of four samples."""

    class Positions(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 6), requires_grad=False)

        def front(self, x):
            return super().front(x[:, None] + self.table).mean(1)

    trained(run, model=Positions(), data=rows(20), epochs=4)


@hostile
def test_a_front_that_takes_another_way_in_the_last_batch_passes(run):
    class Small(Net):
        def front(self, x):
            if len(x) < 8:
                return torch.stack([super(Small, self).front(row[None])[0] for row in x])
            return super().front(x)

    trained(run, model=Small(), data=rows(20), epochs=4)


@hostile
def test_a_front_that_skips_its_layers_at_random_passes(run):
    """Layer drop by the loop's own choice: `model.depth` is drawn every step."""

    class Deep(Net):
        depth = 2

        def front(self, x):
            h = torch.tanh(self.early(x))
            for _ in range(self.depth):
                h = self.middle(h)
            return h

    model = run.freeze(Deep())
    generator = torch.Generator().manual_seed(3)

    def each_step(step):
        model.depth = int(torch.randint(1, 4, (), generator=generator))

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile
def test_an_error_of_the_model_is_the_models_own(run):
    """The head raises in one step, and the loop goes on."""

    class Raising(Net):
        fails = False

        def back(self, h):
            if self.fails:
                raise FloatingPointError("too hot")
            return super().back(h)

    model = run.freeze(Raising())
    loader = run.loader(rows())
    optimizer = sgd(model)
    for epoch in range(4):
        for number, batch in enumerate(loader):
            model.fails = (epoch, number) in [(0, 0), (1, 1), (2, 2)]
            try:
                loss = cross_entropy(model, batch)
            except FloatingPointError:
                model.fails = False
                loss = cross_entropy(model, batch)
            run.step(loss, optimizer)
    run.see(model)


@hostile
def test_an_error_of_the_data_set_is_the_data_sets_own(run):
    class Raising(Pairs):
        fails = False

        def __getitem__(self, index):
            if self.fails and index == 12:
                raise OSError("not there for the moment")
            return super().__getitem__(index)

    data = Raising()
    model = run.freeze(Net())
    loader = run.loader(data)
    optimizer = sgd(model)
    for epoch in range(4):
        data.fails = epoch == 0
        with contextlib.suppress(OSError):
            for batch in loader:
                run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile(served=True)
def test_an_error_of_the_loop_and_a_new_epoch(run):
    model = run.freeze(Net())
    loader = run.loader(rows(), shuffle=True)
    optimizer = sgd(model)
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError):
            for number, batch in enumerate(loader):
                run.step(cross_entropy(model, batch), optimizer)
                if number == 1:
                    raise ZeroDivisionError
    run.see(model)


@hostile
def test_closing_the_cache_in_the_middle_of_an_epoch(run):
    model = run.freeze(Net())
    loader = run.loader(rows())

    def each_step(step):
        if step == 7 and run.cache is not None:
            run.cache.close()

    run.fit(model, loader, 3, each_step=each_step)


# ---- unusual batches --------------------------------------------------------------------------


class Labelled(torch.Tensor):
    """A subclass, as torchvision's `tv_tensors` are."""


def subclassed(samples):
    x, y = default_collate(samples)
    return x.as_subclass(Labelled), y


def jagged(samples):
    x = torch.nested.nested_tensor([s[0] for s in samples], layout=torch.jagged)
    return x, torch.stack([s[1] for s in samples])


def sparse(samples):
    x, y = default_collate(samples)
    return x.relu().to_sparse(), y


def csr(samples):
    x, y = default_collate(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.relu().to_sparse_csr(), y


def quantised(samples):
    x, y = default_collate(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), y


def half(samples):
    x, y = default_collate(samples)
    return x.bfloat16(), y


def complicated(samples):
    x, y = default_collate(samples)
    return torch.complex(x, -x), y


def to_dense(x):
    if x.is_nested:
        return torch.nested.to_padded_tensor(x, 0.0)
    if x.is_quantized:
        return x.dequantize()
    if x.is_complex():
        return x.real * 2 + x.imag
    return (x.to_dense() if x.layout != torch.strided else x).float()


@hostile
@pytest.mark.parametrize(
    "collate", [subclassed, jagged, sparse, csr, quantised, half, complicated],
    ids=lambda collate: collate.__name__,
)  # fmt: skip
@pytest.mark.parametrize("where", ["loop", "model"])
def test_tensors_of_any_kind_pass(run, collate, where):
    class Dense(Net):
        def forward(self, x):
            return super().forward(to_dense(x) if where == "model" else x)

    def loss(model, batch):
        x, y = batch
        run.see(type(x).__name__ if collate is subclassed else "Tensor")
        return F.cross_entropy(model(x if where == "model" else to_dense(x)), y)

    trained(run, loss, model=Dense(), collate_fn=collate)


@hostile
def test_rows_padded_to_the_longest_of_their_batch_pass(run):
    class Ragged(Dataset):
        def __len__(self):
            return NUM_SAMPLES

        def __getitems__(self, indices):
            longest = max(2 + i % 4 for i in indices)
            return [
                (F.pad(inputs()[i, : 2 + i % 4], (0, longest - 2 - i % 4)), labels()[i])
                for i in indices
            ]

    class Padding(Net):
        def forward(self, x):
            return super().forward(F.pad(x, (0, 6 - x.shape[1])))

    trained(run, model=Padding(), data=Ragged(), shuffle=True)


@hostile
@pytest.mark.parametrize("kind", ["string", "number", "property", "list"])
def test_an_attribute_named_sample_id_is_the_data_sets_own(run, kind):
    class Named(Pairs):
        pass

    if kind == "property":
        Named.sample_id = property(lambda self: "mine")
        Named.sample_version = property(lambda self: 3)
    else:
        value = {"string": "mine", "number": 7, "list": ["a"] * NUM_SAMPLES}[kind]
        Named.sample_id = Named.sample_version = value
    trained(run, data=Named())


@hostile
@pytest.mark.parametrize(
    "key",
    [
        lambda i: (float(i), 0.5), lambda i: f"rows/{i}.txt", lambda i: (i, "left"),
        lambda i: frozenset([i]), lambda i: slice(i, i + 1), lambda i: {"index": i},
        lambda i: np.int64(i), lambda i: torch.tensor(i), lambda i: [i, 0],
        lambda i: Key(i), lambda i: float(i),
    ],
    ids=[
        "floats", "path", "tuple", "set", "slice", "dict", "int64", "tensor", "list", "object",
        "float",
    ],
)  # fmt: skip
def test_a_sampler_may_give_items_of_any_kind(run, key):
    class Keyed(Dataset):
        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, key):
            i = number(key)
            return inputs()[i], labels()[i]

    trained(run, data=Keyed(), sampler=[key(i) for i in range(NUM_SAMPLES)])


@dataclasses.dataclass
class Key:
    index: int


def number(key):
    if isinstance(key, str):
        return int(key.partition("/")[2].partition(".")[0])
    if isinstance(key, Key):
        return key.index
    if isinstance(key, dict):
        return key["index"]
    if isinstance(key, slice):
        return key.start
    if isinstance(key, tuple | list | frozenset):
        return int(next(iter(key)))
    return int(key)


@hostile
def test_an_empty_batch_passes(run):
    def collate(samples):
        return default_collate(samples) if samples else (torch.zeros(0, 6), labels()[:0])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 4

    trained(run, loss, collate_fn=collate, batch_sampler=[[0, 1, 2, 3], [], [4, 5, 6, 7]])


@hostile
@pytest.mark.parametrize("size", [None, 1])
def test_batches_of_none_and_of_one_pass(run, size):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.reshape(-1, 6)), torch.as_tensor(y).reshape(-1))

    trained(run, loss, batch_size=size, data=rows(6))


# ---- what people do to a tensor of the batch --------------------------------------------------

OPERATIONS = {
    "tolist": lambda x, y: sum(map(sum, x.tolist())),
    "numpy": lambda x, y: float(x.numpy().sum()),
    "asarray": lambda x, y: float(np.asarray(x).sum()),
    "item": lambda x, y: y[0].item(),
    "int": lambda x, y: int(y[1]),
    "range": lambda x, y: len(range(y[0] + 1)),
    "iteration": lambda x, y: torch.stack([row.sum() for row in x]),
    "repr": lambda x, y: len(repr(x.detach().clone())) > 0,
    "equality": lambda x, y: bool((x == x).all()),
    "index": lambda x, y: torch.eye(3)[y],
    "index into": lambda x, y: torch.zeros(3).index_add(0, y, x[:, 0]),
    "assignment": lambda x, y: torch.zeros(len(x), 6).copy_(x),
    "part of": lambda x, y: torch.zeros(9, 6).index_put((torch.arange(len(x)),), x),
    "cat": lambda x, y: torch.cat([x, x]),
    "einsum": lambda x, y: torch.einsum("bi,bj->ij", x, x),
    "deepcopy": lambda x, y: copy.deepcopy((x, y))[0].sum(),
    "pickle": lambda x, y: pickle.loads(pickle.dumps(x)).sum(),
    "save": lambda x, y: torch.load(saved(x)).sum(),
    "collate": lambda x, y: default_collate([x, x]),
    "new_zeros": lambda x, y: x.new_zeros(2).dtype == x.dtype,
    "empty_like": lambda x, y: torch.zeros_like(x).shape[1],
    "as_tensor": lambda x, y: torch.as_tensor(x).sum(),
    "type": lambda x, y: x.type(),
    "storage": lambda x, y: len(x.untyped_storage()) > 0,
    "bincount": lambda x, y: torch.bincount(y, minlength=3),
    "one_hot": lambda x, y: F.one_hot(y, 3),
    "vmap": lambda x, y: torch.func.vmap(lambda row: row.sum())(x),
    "grad": lambda x, y: torch.func.grad(lambda t: t.square().sum())(x),
    "custom function": lambda x, y: Negate.apply(x),
    "script": lambda x, y: scripted(x),
    "out": lambda x, y: torch.add(x, 1.0, out=torch.empty(len(x), 6)),
    "is": lambda x, y: type(x) is torch.Tensor,
    "set default": lambda x, y: torch.tensor(x.shape),
    "dlpack": lambda x, y: torch.from_dlpack(x).sum(),
    "share": lambda x, y: x.share_memory_().sum(),
    "map": lambda x, y: x.clone().apply_(lambda v: v + 1),
    "split by label": lambda x, y: next(x[y == c].sum() for c in range(3)),
    "hash": lambda x, y: len({x: 1}),
    "allclose": lambda x, y: torch.allclose(x, x),
    "parameter": lambda x, y: nn.Parameter(x.clone()).sum(),
    "buffer": lambda x, y: kept_as_buffer(x),
    "module list": lambda x, y: nn.utils.rnn.pad_sequence(list(x), batch_first=True),
}


class Negate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def saved(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return buffer


def kept_as_buffer(x):
    module = nn.Module()
    module.register_buffer("x", x)
    return module.state_dict()["x"].sum()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted = torch.jit.trace(lambda x: x * 2 + 1, torch.zeros(2, 6), check_trace=False)


def looking(run, names):
    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        for name in names:
            run.see(OPERATIONS[name](*batch))
        return value

    trained(run, loss)


ODD = ("is", "parameter")
USUAL = [name for name in OPERATIONS if name not in ODD]


@hostile
@pytest.mark.parametrize("name", ODD)
def test_a_batch_looks_like_a_plain_tensor(run, name):
    looking(run, [name])


@hostile
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_a_batch_can_be_looked_at_in_any_way(run, first):
    looking(run, USUAL[first : first + 8])


@hostile
@pytest.mark.parametrize("first", [0, 10, 20])
def test_a_batch_that_was_looked_at_can_be_trained_on(run, first):
    """Looking may give the memory away: what the model sees must still be vouched for."""
    names = USUAL[first : first + 10]

    def loss(model, batch):
        for name in names:
            run.see(OPERATIONS[name](*batch))
        return F.cross_entropy(model(batch[0]), batch[1])

    trained(run, loss)


# ---- what people do to the model --------------------------------------------------------------


def script(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


def traced(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, inputs(), check_trace=False)


class Plain(Net):
    """What `torch.jit.script` can read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(torch.tanh(self.early(x)))
        return self.head(torch.tanh(self.late(torch.tanh(h))))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    return torch.load(saved(model), weights_only=False)


def exported(model):
    return torch.export.export(model, (inputs(),)).module()


def symbolic(model):
    return torch.fx.symbolic_trace(model)


def cloned_by_state(model):
    other = Plain()
    other.load_state_dict(model.state_dict())
    return other


@hostile(served=True)
@pytest.mark.parametrize(
    "make",
    [script, traced, copy.deepcopy, copy.copy, pickled, saved_whole, exported, symbolic,
     cloned_by_state],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_a_copy_of_any_kind_is_made_while_training_goes_on(run, make):
    model = run.freeze(Plain())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    other = make(model)
    with torch.no_grad():
        run.see(other(inputs()))
        for x, _ in loader if make is not exported else ():
            run.record(other(x).sum())
    run.fit(model, loader, 2)


@hostile(served=True)
def test_functional_calls_with_other_weights_are_right(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    for _ in range(4):
        for x, y in loader:
            other = {name: p * 0.5 for name, p in model.head.named_parameters()}
            other = {f"head.{name}": p for name, p in other.items()}
            out = torch.func.functional_call(model, other, (x,))
            run.step(F.cross_entropy(out, y) + F.cross_entropy(model(x), y), optimizer)
    run.see(model)


@hostile
def test_functional_calls_with_another_front_are_right(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    optimizer = sgd(model)
    for epoch in range(4):
        for x, y in loader:
            other = {"early.weight": model.early.weight * (1 + epoch)}
            out = torch.func.functional_call(model, other, (x,))
            run.step(F.cross_entropy(out, y) + F.cross_entropy(model(x), y), optimizer)
    run.see(model)


@hostile
def test_per_sample_gradients_by_vmap_are_right(run):
    model = run.freeze(Net())
    active = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def one(parameters, x, y):
        out = torch.func.functional_call(model, parameters, (x[None],))
        return F.cross_entropy(out, y[None])

    for _ in range(3):
        for x, y in run.loader(rows()):
            gradients = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(active, x, y)
            run.record(sum(g.square().sum() for g in gradients.values()))


@hostile
def test_a_second_thread_evaluates_the_model(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    outputs, errors = [], []

    def evaluate():
        try:
            with torch.no_grad():
                outputs.append(model(inputs()).sum())
        except Exception as error:
            errors.append(error)

    def each_step(step):
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    run.fit(model, loader, 4, each_step=each_step)
    assert not errors, errors
    for output in outputs:
        run.see(output)


@hostile
def test_a_second_thread_evaluates_while_the_model_runs(run):
    """It asks in the middle of a forward: a hook of the head starts it and waits."""
    model = Net()
    outputs, errors, asked = [], [], [False]

    def evaluate():
        try:
            with torch.no_grad():
                outputs.append(model(inputs()).sum())
        except Exception as error:
            errors.append(error)

    def wait(module, args):
        if asked[0]:
            asked[0] = False
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    model.late.register_forward_pre_hook(wait)
    run.freeze(model)
    run.fit(model, run.loader(rows()), 3, each_step=lambda step: asked.__setitem__(0, True))
    assert not errors, errors
    for output in outputs:
        run.see(output)


@hostile
@pytest.mark.parametrize("kind", ["lock", "file", "generator", "raises", "itself", "lambda"])
def test_a_model_that_cannot_be_copied_is_right(run, kind):
    class Held(Net):
        def __deepcopy__(self, memo):
            if kind == "raises":
                raise RuntimeError("this model is not to be copied")
            return super().__deepcopy__(memo)

    model = Held() if kind == "raises" else Net()
    model.early.extra = {
        "lock": threading.Lock,
        "file": lambda: io.StringIO("open"),
        "generator": lambda: (i for i in range(9)),
        "raises": lambda: None,
        "itself": lambda: [model],
        "lambda": lambda: lambda x: x,
    }[kind]()
    trained(run, model=model)


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@hostile
@pytest.mark.parametrize(
    "make",
    [
        Counting, Watching, lambda: torch.autograd.set_detect_anomaly(True), torch.enable_grad,
        torch.autograd.graph.save_on_cpu, lambda: torch.device("cpu"),
        lambda: torch.autograd.profiler.record_function("step"),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["dispatch mode", "function mode", "anomaly", "enable_grad", "saved tensors", "device",
         "record_function", "kernel"],
)  # fmt: skip
def test_any_context_of_torchs_may_surround_the_model(run, make):
    def loss(model, batch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with make():
                return F.cross_entropy(model(batch[0]), batch[1])

    trained(run, loss)


@hostile
def test_the_whole_call_may_be_checkpointed(run):
    def loss(model, batch):
        out = torch.utils.checkpoint.checkpoint(model, batch[0], use_reentrant=False)
        return F.cross_entropy(out, batch[1])

    trained(run, loss)


@hostile
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_may_span_the_boundary(run, reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            h = torch.tanh(self.early(x))

            def rest(h):
                return torch.tanh(self.late(torch.tanh(self.middle(h))))

            h = torch.utils.checkpoint.checkpoint(rest, h, use_reentrant=reentrant)
            return self.head(h)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no input that asks for a gradient
        trained(run, model=Checkpointed())


@hostile
def test_everything_in_double_by_default(run):
    torch.set_default_dtype(torch.float64)
    try:
        trained(run, model=Net(), data=TensorDataset(inputs().double(), labels()))
    finally:
        torch.set_default_dtype(torch.float32)


@hostile
def test_other_batches_of_plain_tensors_come_in_between(run):
    """A generator's samples, replayed memories, a sanity check."""
    noise = torch.Generator().manual_seed(8)

    def loss(model, batch):
        fake = torch.randn(8, 6, generator=noise)
        return F.cross_entropy(model(batch[0]), batch[1]) - 0.1 * model(fake).mean()

    trained(run, loss, epochs=4)


@hostile
def test_a_model_without_parameters_behind_the_boundary_passes(run):
    """Everything is frozen but a scale in the loss."""
    model = Net()
    scale = torch.ones((), requires_grad=True)
    run.freeze(model, "head")
    optimizer = torch.optim.SGD([scale], lr=0.1)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]) * scale, batch[1])

    run.fit(model, run.loader(rows()), 3, loss=loss, optimizer=optimizer)
    run.see(scale)


@hostile
def test_a_model_that_returns_its_input_passes(run):
    class Returning(Net):
        def forward(self, x):
            return super().forward(x), x

    def loss(model, batch):
        out, same = model(batch[0])
        run.see(same)
        return F.cross_entropy(out, batch[1]) + same.mean()

    trained(run, loss, model=Returning())


@hostile
def test_images_given_one_by_one_pass(run):
    def loss(model, batch):
        pairs = zip(*batch, strict=True)
        losses = [F.cross_entropy(model(row[None]), label[None]) for row, label in pairs]
        return torch.stack(losses).mean()

    trained(run, loss, model=Net())
