"""Copies, threads and contexts: what is done to a model passes as under plain PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from tests.hostile.harness import hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import Net, inputs, labels, rows, saved

# ---- gradients by the input -------------------------------------------------------------------


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
    [traced, copy.deepcopy, copy.copy, pickled, saved_whole, exported, symbolic,
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


@hostile(error="`torch.jit.script` cannot read a model's forward while a cache is attached to it")
def test_a_model_is_scripted_before_a_cache_is_attached(run):
    model = run.freeze(Plain())
    run.see(script(model)(inputs()))


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
