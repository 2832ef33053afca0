"""What plain PyTorch does without an error is done without one here."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import cross_entropy, hostile, judge
from tests.hostile.loops import ce, numbered, trained
from tests.hostile.nets import Net, inputs, net, rows, seeded

# ---- features and inputs that the loop reads --------------------------------------------------


@hostile
def test_a_learned_perturbation_of_the_input_trains(run):
    delta = torch.zeros(6, requires_grad=True)
    trained(
        run, lambda m, b: ce(m, b[0] + delta, b[1]),
        optimizer=lambda m: torch.optim.SGD([delta, *m.late.parameters()], lr=0.1),
    )  # fmt: skip
    run.see(delta)


@hostile(over={"first": lambda n: n < 3, "turns": lambda n: n % 5 == 1}, served=True)
def test_errors_of_a_head_are_the_loops(run, fails):
    def back(model, h):
        model.num_calls += 1
        if fails(model.num_calls):
            raise FloatingPointError("not a number")
        return Net.back(model, h)

    model = run.freeze(net(back=back, num_calls=0))
    run.fit(model, run.loader(rows()), 4, catching=(FloatingPointError,))
    run.see(model.num_calls)


def keeping(model, x):
    model.feature = model.early(x)
    return model.middle(torch.tanh(model.feature))


def returning(model, x):
    return Net.forward(model, x), x


def with_feature(m, x, y, n):
    return ce(m, x, y) + m.feature.square().mean()


def with_input(m, x, y, n):
    out, same = m(x)
    return F.cross_entropy(out, y) + same.mean()


def front_then_back(m, x, y, n):
    with torch.no_grad():
        h = m.front(x)
    return F.cross_entropy(m.back(h), y)


READ = {
    "an attribute": (lambda: net(front=keeping), with_feature),
    "its input": (lambda: net(forward=returning), with_input),
    "a submodule": (Net, lambda m, x, y, n: ce(m, x, y) + m.early(x).square().mean()),
    "the front": (Net, lambda m, x, y, n: ce(m, x, y) + m.front(x).detach().mean()),
    "first the front, then the back": (Net, front_then_back),
}


@hostile(over=READ)
def test_what_the_loop_asks_the_model_for_besides_it_gets(run, make, loss):
    trained(run, numbered(loss), model=make())


# ---- a boundary that has to be given up -------------------------------------------------------


def one_by_one(model, x):
    if len(x) < 8:
        return torch.stack([Net.front(model, row[None])[0] for row in x])
    return Net.front(model, x)


def deep(model, x):
    h = torch.tanh(model.early(x))
    for _ in range(model.depth):
        h = model.middle(h)
    return h


def with_a_table():
    table = nn.Parameter(torch.randn(4, 6), requires_grad=False)
    return net(front=lambda m, x: Net.front(m, x[:, None] + m.table).mean(1), table=table)


DIFFERING = {
    "as large as a constant": with_a_table,
    "another way": lambda: net(front=one_by_one),
    "layers at random": lambda: net(front=deep, depth=2),
}


@hostile(over=DIFFERING)
def test_a_front_that_differs_from_batch_to_batch_passes(run, make):
    """Four positions and a last batch of four; layer drop by the loop's own choice."""
    generator = seeded(3)

    def each_step(model, step):
        model.depth = int(torch.randint(1, 4, (), generator=generator))

    trained(run, model=make(), data=rows(20), epochs=4, each_step=each_step)


# ---- copies -----------------------------------------------------------------------------------


def quietly(make):
    def made(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(model)

    return made


class Plain(Net):
    """What `torch.jit.script` can read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(torch.tanh(self.early(x)))
        return self.head(torch.tanh(self.late(torch.tanh(h))))


def within(model):
    """Made by the head in each forward, of the model as it stands then."""
    made = []
    keep = lambda *_: made.__setitem__(slice(1), [copy.deepcopy(model)])  # noqa: E731
    model.head.register_forward_pre_hook(keep)
    return lambda x: model(x) + made[0](x)


COPIES = {
    "deepcopy": copy.deepcopy,
    "traced": quietly(lambda m: torch.jit.trace(m, inputs(), check_trace=False)),
    "shallow": lambda m: (
        vars(other := copy.copy(m)).update(_modules={**m._modules, "late": nn.Tanh()}) or other
    ),
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "within": within,
    "exported": lambda m: torch.export.export(m, (inputs(),)).module(),
}


@hostile(over=COPIES, cases=3, served=True)
def test_a_copy_of_any_kind_is_made_while_training_goes_on(run, make):
    model, loader = run.freeze(Plain()), run.loader(rows())
    run.fit(model, loader, 2)
    other = make(model)
    with torch.no_grad():
        run.see(other(inputs()))
        for x, _ in loader if make is not COPIES["exported"] else ():
            run.record(other(x).sum())
    run.fit(model, loader, 2)


@hostile(error="`torch.jit.script` cannot read a model's forward while a cache is attached to it")
def test_a_model_is_scripted_before_a_cache_is_attached(run):
    model = run.freeze(Plain())
    run.see(quietly(torch.jit.script)(model)(inputs()))


@hostile(silent=True)
def test_a_scripted_head_is_served(run):
    trained(run, model=net(head=quietly(torch.jit.script)(nn.Linear(8, 3))))


NOT_COPIED = {
    "lock": lambda model: threading.Lock(),
    "file": lambda model: io.StringIO("open"),
    "generator": lambda model: (i for i in range(9)),
    "itself": lambda model: [model],
    "lambda": lambda model: lambda x: x,
    "raises": lambda model: setattr(type(model), "__deepcopy__", lambda *_: 1 // 0),
}


@hostile(over=NOT_COPIED)
def test_a_model_that_cannot_be_copied_is_right(run, held):
    model = net()
    model.early.extra = held(model)
    trained(run, model=model)


# ---- functional calls -------------------------------------------------------------------------


def functional(changes):
    """Return a loss of a call with other parameters; `changes(model, step)` gives them."""
    call = lambda m, x, n: torch.func.functional_call(m, changes(m, n), (x,))  # noqa: E731
    return numbered(lambda m, x, y, n: F.cross_entropy(call(m, x, n), y) + ce(m, x, y))


@hostile(served=True)
def test_functional_calls_with_another_head_are_served(run):
    other = lambda m, n: {f"head.{k}": p * 0.5 for k, p in m.head.named_parameters()}  # noqa: E731
    trained(run, functional(other), epochs=4)


@hostile
def test_functional_calls_with_another_front_are_right(run):
    trained(run, functional(lambda m, n: {"early.weight": m.early.weight * (1 + n // 3)}), epochs=4)


def grad(m, x):
    return torch.func.grad(lambda v: m(v).sum())(x)


def vmap(m, x):
    return torch.func.vmap(lambda v: m(v[None])[0])(x)


def trace(m, x):
    return quietly(lambda m: torch.jit.trace(m, x))(m)(x + 1)


def per_sample_gradients(m, x):
    active = {name: p.detach() for name, p in m.named_parameters() if p.requires_grad}
    one = lambda p, row: torch.func.functional_call(m, p, (row[None],)).sum()  # noqa: E731
    gradients = torch.func.vmap(torch.func.grad(one), (None, 0))(active, x)
    return sum(g.square().sum() for g in gradients.values())


def head_gradients(m, x):
    head = {f"head.{name}": p.detach() for name, p in m.head.named_parameters()}
    gradients = torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sum())(head)
    return sum(g.square().sum() for g in gradients.values())


LOOKS = (grad, vmap, trace, per_sample_gradients, head_gradients)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@hostile(over={look.__name__: look for look in LOOKS}, served=True)
@pytest.mark.parametrize("before", [False, True])
def test_torch_func_over_a_batch(run, look, before):
    def loss(model, batch):
        if before:
            run.see(look(model, batch[0]))
        value = cross_entropy(model, batch)
        run.see(look(model, batch[0]))
        return value

    trained(run, loss)


def test_calls_within_torch_func_alone_are_told():
    def loss(model, batch):
        return F.cross_entropy(vmap(model, batch[0]), batch[1])

    judge(lambda run: trained(run, loss), told="within `torch.func`")


# ---- threads, contexts, regions ---------------------------------------------------------------


@hostile
@pytest.mark.parametrize("when", ["between steps", "within a forward"])
def test_a_second_thread_evaluates_the_model(run, when):
    """It asks between two steps, or in the middle of a forward: a hook starts it and waits."""
    model = Net()
    outputs, errors, asked = [], [], [False]

    def evaluate():
        try:
            with torch.no_grad():
                outputs.append(model(inputs()).sum())
        except Exception as error:
            errors.append(error)

    def wait(module=None, args=None):
        if asked[0]:
            asked[0] = False
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    def each_step(step):
        asked[0] = True
        if when == "between steps":
            wait()

    model.late.register_forward_pre_hook(wait)
    run.freeze(model)
    run.fit(model, run.loader(rows()), 3, each_step=each_step)
    assert not errors, errors
    for output in outputs:
        run.see(output)


class Passing:
    """A mode that looks at every operation and does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    __torch_function__ = __torch_dispatch__


class Counting(Passing, TorchDispatchMode):
    pass


class Watching(Passing, TorchFunctionMode):
    pass


CONTEXTS = {
    "dispatch mode": Counting,
    "function mode": Watching,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "enable_grad": torch.enable_grad,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "device": lambda: torch.device("cpu"),
    "record_function": lambda: torch.autograd.profiler.record_function("step"),
    "kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@hostile(over=CONTEXTS, cases=3)
def test_any_context_of_torchs_may_surround_the_model(run, context):
    def loss(model, batch):
        with context():
            return cross_entropy(model, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(run, loss)


class DispatchTwice(TorchDispatchMode):
    """A mode under which `tanh` and a product are others."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        return out + out if func in (aten.tanh.default, aten.mul.Tensor) else out


class FunctionTwice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + out if func in (torch.tanh, torch.Tensor.mul) else out


@hostile(over={"of dispatch": DispatchTwice, "of functions": FunctionTwice})
@pytest.mark.parametrize("since", [7, 0], ids=["late", "always"])
@pytest.mark.parametrize("where", ["model", "loop"])
def test_a_mode_that_makes_other_operations_reaches_what_runs_under_it(run, mode, since, where):
    def loss(model, x, y, step):
        context = mode() if step >= since else contextlib.nullcontext()
        with context:
            x = x.mul(1.1)
            if where == "model":
                return ce(model, x, y)
        return ce(model, x, y)

    trained(run, numbered(loss), epochs=4)


@hostile(served=True)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_may_span_the_boundary(run, reentrant):
    def forward(model, x):
        def rest(h):
            return torch.tanh(model.late(torch.tanh(model.middle(h))))

        return model.head(checkpoint(rest, torch.tanh(model.early(x)), use_reentrant=reentrant))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no input that asks for a gradient
        trained(run, model=net(forward=forward))


@hostile
def test_a_model_without_parameters_behind_the_boundary_passes(run):
    """Everything is frozen but a scale in the loss."""
    scale = torch.ones((), requires_grad=True)
    trained(
        run, lambda m, b: F.cross_entropy(m(b[0]) * scale, b[1]), boundary="head",
        optimizer=lambda m: torch.optim.SGD([scale], lr=0.1),
    )  # fmt: skip
    run.see(scale)


HOOKS = {
    "whose leaf requires a gradient": lambda own: lambda m, a, out: out.detach().requires_grad_(),
    "that asks for the mode": lambda own: lambda m, a, out: out if own.training else out * 1,
}


@hostile(over=HOOKS)
def test_a_hook_within_the_front(run, hook):
    model = Net()
    model.early.register_forward_hook(hook(model.early))
    trained(run, model=model, each_epoch=lambda m, _: run.see(m.eval()(inputs(8))))
