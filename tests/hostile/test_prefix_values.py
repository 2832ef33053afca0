"""What the prefix is, changes though no tensor does: numbers, objects, globals, counts."""

from __future__ import annotations

import dataclasses
import enum
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import AT_RUN_TIME, hostile
from tests.hostile.loops import changed
from tests.hostile.nets import ConvNet, Net, Tokens, images, rows, sentences

# ---- plain attributes, of a module of the front and of the code around it ----------------------


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Nested:
    def __init__(self, inner):
        self.inner = inner


class Size(enum.Enum):
    SMALL = 1.0
    LARGE = 2.0


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


GLOBAL_SCALE = 1.0
GLOBAL_TABLE = {"scale": 1.0}


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


@hostile
@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "iterator"])
def test_a_setting_that_changes_is_obeyed(run, kind):
    make, read, change = SETTINGS[kind]
    changed(run, lambda m: change(m.early), tuned("early", make(), read), rows())


FEW = ["float", "str", "dict", "array in place", "tensor in an object", "dataclass", "closure"]


@hostile
@pytest.mark.parametrize("kind", FEW)
def test_a_setting_of_the_code_around_the_boundary_is_obeyed(run, kind):
    make, read, change = SETTINGS[kind]
    changed(run, change, tuned("the model", make(), read), rows())


@hostile
@pytest.mark.parametrize("kind", ["float", "list", "object"])
def test_a_setting_of_the_boundary_itself_is_obeyed(run, kind):
    make, read, change = SETTINGS[kind]
    changed(run, lambda m: change(m.middle), tuned("middle", make(), read), rows())


@hostile
def test_an_attribute_that_is_not_read_does_no_harm(run):
    make, read, change = SETTINGS["iterator"]
    changed(run, lambda m: change(m.early), tuned("early", make(), read), rows())


@hostile(served=True)
def test_an_attribute_set_to_what_it_was_is_served_on(run):
    make, read, _ = SETTINGS["dict"]
    changed(run, lambda m: setattr(m.early, "setting", {"a": 1.0}), tuned("early", make(), read),
            rows(), epochs=6)  # fmt: skip


@hostile(served=True)
def test_settings_of_the_active_part_are_free(run):
    make, read, change = SETTINGS["float"]
    changed(run, lambda m: change(m.late), tuned("late", make(), read), rows())


# ---- globals, classes, and what other modules hold --------------------------------------------


@hostile
@pytest.mark.parametrize("part", ["early", "the model"])
def test_a_global_that_forward_reads_is_obeyed(run, part):
    global GLOBAL_SCALE
    GLOBAL_SCALE = 1.0

    def change(model):
        global GLOBAL_SCALE
        GLOBAL_SCALE = 2.0

    changed(run, change, tuned(part, None, lambda s: GLOBAL_SCALE), rows())


@hostile
def test_a_global_table_that_forward_reads_is_obeyed(run):
    GLOBAL_TABLE["scale"] = 1.0
    changed(
        run, lambda m: GLOBAL_TABLE.update(scale=2.0),
        tuned("early", None, lambda s: GLOBAL_TABLE["scale"]), rows(),
    )  # fmt: skip


@hostile(limit=AT_RUN_TIME)
def test_a_function_of_torch_that_is_patched_is_called(run, monkeypatch):
    class Activated(Net):
        def front(self, x):
            return self.middle(F.gelu(self.early(x)))

    with monkeypatch.context() as patched:
        changed(run, lambda m: patched.setattr(F, "gelu", torch.relu), Activated(), rows())


@hostile
def test_an_attribute_of_the_class_is_obeyed(run):
    class Classy(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Net()
    model.early = Classy(6, 8)
    changed(run, lambda m: setattr(Classy, "scale", 2.0), model, rows())


@hostile
def test_a_property_over_something_else_is_obeyed(run):
    class Proper(nn.Linear):
        where = Nested(1.0)

        @property
        def scale(self):
            return self.where.inner

        def forward(self, x):
            return super().forward(x) * self.scale

    Proper.where = Nested(1.0)
    model = Net()
    model.early = Proper(6, 8)
    changed(run, lambda m: setattr(Proper.where, "inner", 2.0), model, rows())


@hostile
def test_a_config_that_all_modules_share_is_obeyed(run):
    config = Config()
    model = tuned("early", config, lambda s: s.scale)
    model.config = config
    changed(run, lambda m: setattr(m.config, "scale", 2.0), model, rows())


@hostile(limit=AT_RUN_TIME)
def test_a_weight_of_the_head_that_the_front_looks_at_is_obeyed(run):
    """The first layer scales by an attribute of the last one."""
    model = Net()
    model.head.scale = 1.0
    model.early = Tuned([model.head], lambda s: s[0].scale)
    changed(run, lambda m: setattr(m.head, "scale", 2.0), model, rows())


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
    changed(run, lambda m: put(stride=(2,))(m.early[1]), model, rows())


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


@hostile
def test_code_that_asks_for_the_mode_gets_the_models_own(run):
    class Moody(Net):
        def front(self, x):
            return self.middle(torch.tanh(self.early(x)) * (2.0 if self.training else 1.0))

    model = run.freeze(Moody())
    loader = run.loader(rows())

    def evaluate(epoch):
        model.eval()
        with torch.no_grad():
            for x, _ in loader:
                run.record(model(x).square().sum())

    run.fit(model, loader, 3, each_epoch=evaluate)


@hostile
def test_a_front_that_asks_whether_gradients_are_on_is_asked_again(run):
    class Asking(Net):
        def front(self, x):
            return self.middle(self.early(x) * (1.0 if torch.is_grad_enabled() else 2.0))

    model = run.freeze(Asking())
    loader = run.loader(rows())

    def evaluate(epoch):
        with torch.no_grad():
            for x, _ in loader:
                run.record(model(x).square().sum())

    run.fit(model, loader, 3, each_epoch=evaluate)


@hostile
def test_a_front_that_asks_whether_autocast_is_on_is_asked_again(run):
    class Asking(Net):
        def front(self, x):
            on = torch.is_autocast_enabled("cpu")
            return self.middle(self.early(x) * (2.0 if on else 1.0)).float()

    model = run.freeze(Asking())
    switch = [False]

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=switch[0]):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
        switch[0] = epoch >= 2

    run.fit(model, run.loader(rows()), 4, loss=loss, each_epoch=each_epoch)


# ---- counts and schedules ---------------------------------------------------------------------


class Counting(nn.Linear):
    """Counts its calls, as schedules inside of models do."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@hostile
def test_a_counter_of_the_front_that_the_head_reads_counts(run):
    class Warming(Net):
        def __init__(self):
            super().__init__()
            self.early = Counting(6, 8)

        def back(self, h):
            return super().back(h) * min(1.0, self.early.calls / 10)

    run.fit(run.freeze(Warming()), run.loader(rows()), 4)


@hostile
def test_a_counter_of_the_front_that_the_loop_reads_counts(run):
    model = Net()
    model.early = Counting(6, 8)
    run.freeze(model)
    run.fit(model, run.loader(rows()), 4, each_step=lambda step: run.see(model.early.calls))


@hostile
def test_a_counter_of_the_model_itself_counts(run):
    class Own(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * min(1.0, self.calls / 10)

    model = run.freeze(Own())
    run.fit(model, run.loader(rows()), 4)
    run.see(model.calls)


@hostile
def test_a_temperature_that_the_loop_lowers_each_step_is_obeyed(run):
    model = run.freeze(tuned("early", 1.0, lambda s: s))

    def each_step(step):
        model.early.setting = 0.9**step

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


@hostile
def test_a_temperature_that_the_loop_lowers_each_epoch_is_obeyed(run):
    model = run.freeze(tuned("the model", 1.0, lambda s: s))
    run.fit(model, run.loader(rows()), 4, each_epoch=lambda epoch: put(setting=0.5**epoch)(model))


@hostile
def test_a_temperature_that_the_front_lowers_itself_is_obeyed(run):
    class Cooling(nn.Linear):
        temperature = 1.0

        def forward(self, x):
            self.temperature *= 0.9
            return super().forward(x) * self.temperature

    model = Net()
    model.early = Cooling(6, 8)
    run.fit(run.freeze(model), run.loader(rows()), 4)


@hostile(served=True)
def test_a_temperature_of_the_head_may_fall_each_step(run):
    model = run.freeze(tuned("late", 1.0, lambda s: s))

    def each_step(step):
        model.late.setting = 0.9**step

    run.fit(model, run.loader(rows()), 4, each_step=each_step)


# ---- arguments --------------------------------------------------------------------------------


class Given(Net):
    """Takes more than the batch, and uses it before the boundary."""

    def forward(self, x, given):
        scale = given
        if isinstance(given, Config):
            scale = given.scale
        elif isinstance(given, dict):
            scale = given["scale"]
        elif isinstance(given, np.ndarray):
            scale = given[0].item()
        elif isinstance(given, list):
            scale = given[0]
        return self.back(self.front(x * scale))


class GivenLate(Net):
    """Uses what it is given after the boundary."""

    def forward(self, x, given):
        return self.back(self.front(x) * given)


ARGUMENTS = {
    "config": (Config, lambda g: setattr(g, "scale", 2.0)),
    "array": (lambda: np.ones(1, np.float32), lambda g: g.__setitem__(0, 2.0)),
    "dict": (lambda: {"scale": 1.0}, lambda g: g.update(scale=2.0)),
    "list": (lambda: [1.0], lambda g: g.__setitem__(0, 2.0)),
    "tensor": (lambda: torch.ones(()), lambda g: g.mul_(2)),
    "tensor written past its version": (lambda: torch.ones(()), lambda g: g.data.mul_(2)),
}


@hostile
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_changes_inside_is_read_again(run, kind):
    make, change = ARGUMENTS[kind]
    given = make()
    model = run.freeze(Given())

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
            change(given)

    run.fit(
        model, run.loader(rows()), 4, each_epoch=each_epoch,
        loss=lambda m, b: F.cross_entropy(m(b[0], given), b[1]),
    )  # fmt: skip


@hostile
def test_a_new_argument_in_the_place_of_one_that_is_gone_is_another(run):
    """Objects are told apart by what they hold: a new one may have the old one's address."""
    model = run.freeze(Given())
    scale = [1.0]

    def each_epoch(epoch):
        if epoch == 2:
            run.turn()
            scale[0] = 2.0

    run.fit(
        model, run.loader(rows()), 4, each_epoch=each_epoch,
        loss=lambda m, b: F.cross_entropy(m(b[0], Config(scale[0])), b[1]),
    )  # fmt: skip


@hostile(served=True)
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_a_schedule_given_to_the_head_is_served(run, kind):
    model = run.freeze(GivenLate())
    steps = iter(range(1000))

    def loss(model, batch):
        given = 1.0 + 0.1 * next(steps)
        return F.cross_entropy(
            model(batch[0], torch.tensor(given) if kind == "tensor" else given), batch[1]
        )

    run.fit(model, run.loader(rows()), 5, loss=loss)


@hostile
def test_a_schedule_given_to_the_front_is_told(run):
    steps = iter(range(1000))
    run.fit(
        run.freeze(Given()), run.loader(rows()), 4,
        loss=lambda m, b: F.cross_entropy(m(b[0], 1.0 + 0.1 * next(steps)), b[1]),
    )  # fmt: skip


@hostile(served=True)
def test_a_flag_that_alternates_has_a_cut_for_each(run):
    steps = iter(range(1000))
    run.fit(
        run.freeze(Given()), run.loader(rows()), 4,
        loss=lambda m, b: F.cross_entropy(m(b[0], float(1 + next(steps) % 2)), b[1]),
    )  # fmt: skip
