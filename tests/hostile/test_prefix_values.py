"""What the prefix is, changes though no tensor does: numbers, objects, modes, counts."""

from __future__ import annotations

import array
import contextvars
import ctypes
import dataclasses
import functools
import os
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import DeQuantStub, QuantStub
from torch.nn import functional as F

from tests.hostile.harness import AT_RUN_TIME, cross_entropy, hostile
from tests.hostile.loops import changed, numbered, trained
from tests.hostile.nets import ConvNet, Net, Tokens, images, layered, net, rows, sentences

# ---- plain attributes, of a module of the front and of the code around it ----------------------


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Nested:
    def __init__(self, inner):
        self.inner = inner


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


def cell(value):
    """Return a function with a closure, and what changes it."""

    def read():
        return value

    def write(new):
        nonlocal value
        value = new

    return read, write


def put(**attributes):
    def change(module):
        for name, value in attributes.items():
            setattr(module, name, value)

    return change


SETTINGS = {
    "float": (lambda: 1.0, lambda s: s, put(setting=2.0)),
    "str": (lambda: "tanh", lambda s: 1.0 if s == "tanh" else 2.0, put(setting="relu")),
    "list": (lambda: [1.0, 0.0], lambda s: s[0], lambda m: m.setting.__setitem__(0, 2.0)),
    "dict": (lambda: {"a": 1.0}, lambda s: s["a"], lambda m: m.setting.update(a=2.0)),
    "array replaced": (
        lambda: np.ones(1, np.float32), lambda s: s[0].item(),
        put(setting=np.full(1, 2, np.float32)),
    ),
    "array in place": (
        lambda: np.ones(1, np.float32), lambda s: s[0].item(),
        lambda m: m.setting.__setitem__(0, 2.0),
    ),
    "plain tensor replaced": (
        lambda: torch.ones(1), lambda s: s, put(setting=torch.full((1,), 2.0)),
    ),
    "plain tensor in place": (lambda: torch.ones(1), lambda s: s, lambda m: m.setting.mul_(2)),
    "tensor in an object": (
        lambda: Nested(torch.ones(1)), lambda s: s.inner,
        lambda m: setattr(m.setting, "inner", torch.full((1,), 2.0)),
    ),
    "object": (lambda: Nested(1.0), lambda s: s.inner, lambda m: setattr(m.setting, "inner", 2.0)),
    "object in an object": (
        lambda: Nested(Nested(1.0)), lambda s: s.inner.inner,
        lambda m: setattr(m.setting.inner, "inner", 2.0),
    ),
    "slots": (lambda: Slotted(1.0), lambda s: s.scale, lambda m: setattr(m.setting, "scale", 2.0)),
    "dataclass": (Config, lambda s: s.scale, lambda m: setattr(m.setting, "scale", 2.0)),
    "namespace": (
        lambda: types.SimpleNamespace(a=1.0), lambda s: s.a, lambda m: setattr(m.setting, "a", 2.0),
    ),
    "function replaced": (lambda: lambda: 1.0, lambda s: s(), put(setting=lambda: 2.0)),
    "closure": (lambda: cell(1.0), lambda s: s[0](), lambda m: m.setting[1](2.0)),
    "iterator": (lambda: iter([1.0] * 200 + [2.0] * 9), lambda s: 1.0, put(setting=iter([]))),
}  # fmt: skip


class Tuned(nn.Linear):
    """A frozen layer whose output hangs on a setting."""

    def __init__(self, setting, read, size=6):
        super().__init__(size, 8)
        self.setting, self.read = setting, read

    def forward(self, x):
        return super().forward(x) * self.read(self.setting)


class Around(Net):
    """A model whose own code, before the boundary, reads a setting."""

    def __init__(self, setting, read):
        super().__init__()
        self.setting, self.read = setting, read

    def front(self, x):
        return self.middle(torch.tanh(self.early(x)) * self.read(self.setting))


def tuned(part, setting, read):
    if part == "the model":
        return Around(setting, read)
    model = Net()
    setattr(model, part, Tuned(setting, read, 6 if part == "early" else 8))
    return model


KINDS = [kind for kind in SETTINGS if kind != "iterator"]
FEW = ["float", "str", "dict", "array in place", "tensor in an object", "dataclass", "closure"]


@hostile
@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("part", "kind"),
    [
        *(("early", kind) for kind in KINDS),
        *(("the model", kind) for kind in FEW),
        *(("middle", kind) for kind in ("float", "list", "object")),
    ],
)
def test_a_setting_that_changes_is_obeyed(run, part, kind):
    make, read, change = SETTINGS[kind]
    at = (lambda m: m) if part == "the model" else (lambda m: m.get_submodule(part))
    changed(run, lambda m: change(at(m)), tuned(part, make(), read))


@hostile
def test_an_attribute_that_is_not_read_does_no_harm(run):
    make, read, change = SETTINGS["iterator"]
    changed(run, lambda m: change(m.early), tuned("early", make(), read))


@hostile(served=True)
def test_an_attribute_set_to_what_it_was_is_served_on(run):
    make, read, _ = SETTINGS["dict"]
    model = tuned("early", make(), read)
    changed(run, lambda m: setattr(m.early, "setting", {"a": 1.0}), model, epochs=6)


@hostile(served=True)
def test_settings_of_the_active_part_are_free(run):
    make, read, change = SETTINGS["float"]
    changed(run, lambda m: change(m.late), tuned("late", make(), read))


@hostile
def test_a_config_that_all_modules_share_is_obeyed(run):
    config = Config()
    model = tuned("early", config, lambda s: s.scale)
    model.config = config
    changed(run, lambda m: setattr(m.config, "scale", 2.0), model)


# ---- what the front reads, wherever it lies ---------------------------------------------------

GLOBAL_SCALE = 1.0
GLOBAL_TABLE = {"scale": 1.0}
SCALE = contextvars.ContextVar("scale", default=1.0)
OBJECT = Nested(1.0)
MODULE = types.ModuleType("user_settings")


class Kept(threading.local):
    scale = 1.0


def scaled(h):
    return h * scaled.by


def set_global(at, k):
    global GLOBAL_SCALE
    GLOBAL_SCALE = k


class One:
    factor = 1.0

    def __call__(self):
        return 1.0


class Other(One):
    def __call__(self):
        return 2.0


class Elsewhere:
    def __init__(self, table):
        self.table = table

    def __get__(self, instance, owner):
        return self.table["scale"]


PLACES = {
    "global": (lambda: None, lambda at: GLOBAL_SCALE, set_global),
    "global table": (
        lambda: None, lambda at: GLOBAL_TABLE["scale"], lambda at, k: GLOBAL_TABLE.update(scale=k),
    ),
    "array": (lambda: array.array("d", [1.0]), lambda at: at[0],
              lambda at, k: at.__setitem__(0, k)),
    "ctypes": (lambda: ctypes.c_double(1), lambda at: at.value,
               lambda at, k: setattr(at, "value", k)),
    "bytes": (lambda: bytearray([10]), lambda at: at[0] / 10,
              lambda at, k: at.__setitem__(0, int(10 * k))),
    "thread-local": (Kept, lambda at: at.scale, lambda at, k: setattr(at, "scale", k)),
    "function": (lambda: scaled, lambda at: scaled(1.0), lambda at, k: setattr(scaled, "by", k)),
    "context": (lambda: None, lambda at: SCALE.get(), lambda at, k: SCALE.set(k)),
    "environment": (lambda: None, lambda at: float(os.environ["HOSTILE_SCALE"]),
                    lambda at, k: os.environ.update(HOSTILE_SCALE=str(k))),
    "module": (lambda: None, lambda at: MODULE.scale,
               lambda at, k: setattr(MODULE, "scale", k)),
    "object in a global": (
        lambda: OBJECT, lambda at: OBJECT.inner, lambda at, k: setattr(OBJECT, "inner", k),
    ),
    "object two deep in a closure": (
        lambda: Nested(Nested(1.0)), lambda at: at.inner.inner,
        lambda at, k: setattr(at.inner, "inner", k),
    ),
    "attribute of a class": (lambda: One, lambda at: at.factor,
                             lambda at, k: setattr(One, "factor", k)),
    "attribute of an object's class": (
        One, lambda at: at.factor, lambda at, k: setattr(One, "factor", k),
    ),
    "class of an object": (
        One, lambda at: at(), lambda at, k: setattr(at, "__class__", One if k == 1 else Other),
    ),
    "operator of a class": (
        One, lambda at: at(), lambda at, k: setattr(One, "__call__", lambda self: k),
    ),
}  # fmt: skip


@hostile
@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", PLACES)
def test_a_number_that_the_front_reads_wherever_it_lies(run, kind):
    make, read, write = PLACES[kind]
    at = make()
    write(at, 1.0)
    changed(run, lambda m: write(at, 2.0), layered(lambda layer, h: h * read(at)))


FOUND_LATE = {
    "descriptor": (
        lambda: type("Described", (), {"scale": Elsewhere(GLOBAL_TABLE)})(),
        lambda at: at.scale, lambda at, k: GLOBAL_TABLE.update(scale=k),
    ),
    "function in a module": (
        lambda: None, lambda at: MODULE.scale(), lambda at, k: setattr(MODULE, "scale", lambda: k),
    ),
    "list in a partial": (
        lambda: functools.partial(lambda f: f[0], [1.0]), lambda at: at(),
        lambda at, k: at.args[0].__setitem__(0, k),
    ),
    "weights that are no child's": (
        lambda: nn.Linear(2, 2), lambda at: at.weight.detach().sum(),
        lambda at, k: nn.init.constant_(at.weight, k),
    ),
    "flag of torch": (
        lambda: None, lambda at: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda at, k: torch.use_deterministic_algorithms(k == 2),
    ),
    "function of torch": (
        lambda: None, lambda at: F.hardtanh(torch.tensor(5.0)),
        lambda at, k: setattr(F, "hardtanh", HARDTANH if k == 1 else torch.relu),
    ),
}  # fmt: skip
HARDTANH = F.hardtanh


@hostile(limit=AT_RUN_TIME)
@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", FOUND_LATE)
def test_what_is_found_at_run_time_only_is_found_by_the_audit(run, kind):
    make, read, write = FOUND_LATE[kind]
    at = make()
    write(at, 1.0)
    try:
        changed(run, lambda m: write(at, 2.0), layered(lambda layer, h: h * read(at)))
    finally:
        write(at, 1.0)


@hostile(limit=AT_RUN_TIME)
def test_a_setting_of_the_head_that_the_front_looks_at_is_obeyed(run):
    """The first layer scales by an attribute of the last one."""
    model = Net()
    model.head.scale = 1.0
    model.early = Tuned([model.head], lambda s: s[0].scale)
    changed(run, lambda m: setattr(m.head, "scale", 2.0), model)


@hostile
@pytest.mark.parametrize("how", ["class", "property"])
def test_an_attribute_of_the_layers_class_is_obeyed(run, how):
    where = Nested(1.0)
    if how == "class":
        changed(
            run, lambda m: setattr(type(m.early), "by", 2.0),
            layered(lambda layer, h: h * layer.by, by=1.0),
        )  # fmt: skip
    else:
        model = layered(
            lambda layer, h: h * layer.by, where=where, by=property(lambda layer: layer.where.inner)
        )
        changed(run, lambda m: setattr(where, "inner", 2.0), model)


# ---- settings of torch's own modules ----------------------------------------------------------


class Zoo(nn.Module):
    """One frozen layer of torch's own, and a head."""

    def __init__(self, *layers):
        super().__init__()
        self.early = nn.Sequential(*layers)
        self.middle = nn.Flatten(1)
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.middle(self.early(x)) * 3)


TORCH_SETTINGS = {
    "BatchNorm.eps": (lambda: nn.BatchNorm2d(2), {"eps": 1.0}),
    "GroupNorm.eps": (lambda: nn.GroupNorm(1, 2), {"eps": 1.0}),
    "GroupNorm.num_groups": (lambda: nn.GroupNorm(1, 2), {"num_groups": 2}),
    "Conv.padding_mode": (
        lambda: nn.Conv2d(2, 4, 3, padding=1), {"padding_mode": "circular"},
    ),
    "LeakyReLU.negative_slope": (nn.LeakyReLU, {"negative_slope": 0.5}),
    "AvgPool.divisor": (lambda: nn.AvgPool2d(2, 2), {"divisor_override": 1}),
    "Threshold.value": (lambda: nn.Threshold(0.1, 0.0), {"value": 5.0}),
    "Softmax.dim": (lambda: nn.Softmax(1), {"dim": 2}),
}  # fmt: skip


@hostile
@pytest.mark.parametrize("kind", TORCH_SETTINGS)
def test_a_setting_of_torchs_own_modules_is_obeyed(run, kind):
    make, attributes = TORCH_SETTINGS[kind]
    model = Zoo(make())
    model(images().tensors[0])  # the head is lazy
    changed(run, lambda m: put(**attributes)(m.early[0]), model, images())


@hostile
def test_a_stride_that_changes_is_obeyed(run):
    model = Net()
    model.early = nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, stride=1), nn.AdaptiveAvgPool1d(4), nn.Flatten()
    )
    changed(run, lambda m: put(stride=(2,))(m.early[1]), model)


@hostile(served=True)
@pytest.mark.parametrize(
    "change",
    [
        lambda m: put(p=0.7)(m.stem[3]),
        lambda m: put(momentum=0.5)(m.stem[1]),
        lambda m: put(note="no one reads this")(m.head),
    ],
    ids=["p of held dropout", "momentum of held BatchNorm", "a note"],
)
def test_settings_that_decide_nothing_are_served_in_the_end(run, change):
    changed(run, change, ConvNet(), images(), boundary="body", epochs=7)


@hostile
def test_an_attention_scale_that_changes_is_obeyed(run):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.scale = nn.Linear(8, 24), 0.35

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + (q @ k.mT * self.scale).softmax(-1) @ v

    class Small(Tokens):
        def __init__(self):
            super().__init__()
            self.block = Attention()

        def forward(self, tokens):
            return self.head(torch.tanh(self.late(self.block(self.embed(tokens)))).mean(1))

    changed(run, lambda m: put(scale=5.0)(m.block), Small(), sentences(), boundary="block")


# ---- modes ------------------------------------------------------------------------------------


def asking(ask):
    """Return a model whose front asks for a mode."""
    return net(front=lambda m, x: m.middle(m.early(x) * (2.0 if ask(m) else 1.0)).float())


@hostile
@pytest.mark.parametrize(
    ("ask", "eval_"),
    [(lambda m: m.training, True), (lambda m: torch.is_grad_enabled(), False)],
    ids=["training", "gradients"],
)
def test_code_that_asks_for_a_mode_is_asked_again(run, ask, eval_):
    model = run.freeze(asking(ask))
    loader = run.loader(rows())

    def evaluate(epoch):
        model.train(not eval_)
        with torch.no_grad():
            for x, _ in loader:
                run.record(model(x).square().sum())

    run.fit(model, loader, 3, each_epoch=evaluate)


def in_autocast(switch, parts=1):
    """Return a loss in autocast, where the switch is on."""

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=switch[0]):
            out = torch.cat([model(x) for x in batch[0].chunk(parts)])
        return F.cross_entropy(out.float(), batch[1])

    return loss


@hostile
def test_a_front_that_asks_whether_autocast_is_on_is_asked_again(run):
    switch = [False]

    def each_epoch(model, epoch):
        if epoch == 2:
            run.turn()
        switch[0] = epoch >= 2

    model = asking(lambda m: torch.is_autocast_enabled("cpu"))
    trained(run, in_autocast(switch), model=model, each_epoch=each_epoch, epochs=4)


@hostile(served=True)
@pytest.mark.parametrize("parts", [1, 2])
def test_autocast_in_one_epoch_alone(run, parts):
    switch = [False]
    trained(
        run, in_autocast(switch, parts), epochs=4,
        each_epoch=lambda model, epoch: switch.__setitem__(0, epoch == 1),
    )  # fmt: skip


@hostile(served=True)
def test_another_default_dtype_for_what_the_front_makes(run):
    def front(model, x):
        ones = torch.full((8,), 1 / 3).double() * 3e7
        return model.middle(torch.tanh(model.early(x)) * (ones - 1e7 + 1).float())

    def each_epoch(model, epoch):
        torch.set_default_dtype(torch.float64 if epoch == 1 else torch.float32)

    try:
        trained(run, model=net(front=front), each_epoch=each_epoch, epochs=4)
    finally:
        torch.set_default_dtype(torch.float32)


def mixed(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = model.early(x)
        with torch.autocast("cpu", enabled=False):
            return model.middle(torch.tanh(h.float()))


def with_a_compiled_head():
    model = Net()
    model.late.compile(backend="eager")
    return model


ODD = {
    "autocast within autocast": lambda: net(front=mixed),
    "no gradients": lambda: net(front=torch.no_grad()(Net.front)),
    "a compiled head": with_a_compiled_head,
    "stubs of quantisation": lambda: net(
        forward=lambda m, x: m.dequant(Net.forward(m, m.quant(x))), quant=QuantStub(),
        dequant=DeQuantStub(),
    ),
}  # fmt: skip


@hostile
@pytest.mark.parametrize("kind", ODD)
def test_models_with_modes_of_their_own_are_right(run, kind):
    trained(run, model=ODD[kind]())


# ---- counts and schedules ---------------------------------------------------------------------


class Counting(nn.Linear):
    """Counts its calls, as schedules inside of models do."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@hostile
@pytest.mark.parametrize("who", ["the head", "the loop"])
def test_a_counter_of_the_front_that_others_read_counts(run, who):
    warming = lambda m, h: Net.back(m, h) * min(1.0, m.early.calls / 10)  # noqa: E731
    model = net(back=warming) if who == "the head" else Net()
    model.early = Counting(6, 8)
    trained(run, model=model, epochs=4, each_step=lambda m, step: run.see(m.early.calls))


def counts(decide):
    """Return a model that counts its calls: `decide(h, calls)` is what the first layer gives."""

    def forward(self, x):
        self.calls += 1
        h = decide(self.early(x), self.calls)
        return self.back(self.middle(torch.tanh(h))) * (1 + 0.001 * self.calls)

    return net(forward=forward, calls=0)


LATE = {
    "mean": lambda h, calls: h - h.mean(0) if calls > 12 else h,
    "scale": lambda h, calls: h / 2 if calls > 12 else h,
    "by and by": lambda h, calls: h * 0.9**calls,
    "in every 20th call": lambda h, calls: h if calls % 20 else -h,
    "in turns of 25 calls": lambda h, calls: -h if calls // 25 % 2 else h,
}


@hostile
@pytest.mark.parametrize("what", LATE)
def test_a_counter_of_the_models_own_that_decides_of_the_front(run, what):
    trained(run, model=counts(LATE[what]), epochs=10)


@hostile(served=True)
def test_a_counter_of_the_models_own_that_decides_nothing_of_the_front(run):
    model = trained(run, model=counts(lambda h, calls: h), epochs=4)
    run.see(model.calls)


@hostile
@pytest.mark.parametrize("part", ["early", "the model"])
@pytest.mark.parametrize("when", ["each_step", "each_epoch"])
def test_a_temperature_that_the_loop_lowers_is_obeyed(run, part, when):
    def lower(model, number):
        put(setting=0.8**number)(model if part == "the model" else model.early)

    trained(run, model=tuned(part, 1.0, lambda s: s), epochs=4, **{when: lower})


@hostile(served=True)
def test_a_temperature_of_the_head_may_fall_each_step(run):
    trained(
        run, model=tuned("late", 1.0, lambda s: s), epochs=4,
        each_step=lambda model, step: setattr(model.late, "setting", 0.9**step),
    )  # fmt: skip


# ---- arguments --------------------------------------------------------------------------------


def scale_of(given):
    if isinstance(given, Config):
        return given.scale
    if isinstance(given, dict):
        return given["scale"]
    if isinstance(given, np.ndarray | list):
        return float(given[0])
    return given


def given_early(model, x, given):
    return model.back(model.front(x * scale_of(given)))


def given_late(model, x, given):
    return model.back(model.front(x) * given)


ARGUMENTS = {
    "config": (Config, lambda g: setattr(g, "scale", 2.0)),
    "array": (lambda: np.ones(1, np.float32), lambda g: g.__setitem__(0, 2.0)),
    "dict": (lambda: {"scale": 1.0}, lambda g: g.update(scale=2.0)),
    "list": (lambda: [1.0], lambda g: g.__setitem__(0, 2.0)),
    "tensor": (lambda: torch.ones(()), lambda g: g.mul_(2)),
    "tensor written past its version": (lambda: torch.ones(()), lambda g: g.data.mul_(2)),
}


@hostile
@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_changes_inside_is_read_again(run, kind):
    make, change = ARGUMENTS[kind]
    given = make()

    def each_epoch(model, epoch):
        if epoch == 2:
            run.turn()
            change(given)

    trained(
        run, lambda m, b: F.cross_entropy(m(b[0], given), b[1]), model=net(forward=given_early),
        epochs=4, each_epoch=each_epoch,
    )  # fmt: skip


def given(values):
    """Return a loss that gives the model one value in each step."""
    return numbered(lambda m, x, y, step: cross_entropy(lambda x: m(x, values(step)), (x, y)))


@hostile
@pytest.mark.parametrize(
    "values",
    [lambda step: Config(1.0 if step < 6 else 2.0), lambda step: 1.0 + 0.1 * step],
    ids=["a new object in the place of one that is gone", "a schedule"],
)
def test_another_argument_of_the_front_is_another(run, values):
    """Objects are told apart by what they hold: a new one may have the old one's address."""
    trained(run, given(values), model=net(forward=given_early), epochs=4)


@hostile(served=True)
@pytest.mark.parametrize(
    ("forward", "values"),
    [
        (given_late, lambda step: 1.0 + 0.1 * step),
        (given_late, lambda step: torch.tensor(1.0 + 0.1 * step)),
        (given_early, lambda step: float(1 + step % 2)),
    ],
    ids=["a schedule of the head", "as a tensor", "a flag of the front that alternates"],
)
def test_arguments_that_do_not_make_another_front_are_served(run, forward, values):
    trained(run, given(values), model=net(forward=forward), epochs=5)
