"""What the prefix is, changes though no tensor does: numbers, objects, modes, counts."""

import dataclasses
import functools
import math
import random
import threading
import types
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import cross_entropy, hostile
from tests.hostile.loops import ce, changed, numbered, trained
from tests.hostile.nets import ConvNet, Net, images, layered, net, rows
from tests.hostile.places import (
    COUNTERS,
    ELSEWHERE,
    HELD,
    REPLACED,
    TABLE,
    Config,
    One,
    call,
    cell,
    of_class,
    scale,
    set_scale,
    shared,
    write_global,
)

# ---- a number that the front reads, wherever it lies ------------------------------------------


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


def tuned(part, setting, read=lambda setting: setting):
    if part == "":
        return Around(setting, read)
    model = Net()
    setattr(model, part, Tuned(setting, read, 6 if part == "early" else 8))
    return model


def put(part, **attributes):
    """What sets attributes of a part of the model."""

    def change(model):
        for name, value in attributes.items():
            setattr(model.get_submodule(part), name, value)

    return change


MISTAKEN = {
    "a table's mode": (
        lambda k: {"training": k}, lambda table: table["training"],
        lambda table, k: table.update(training=k),
    ),
    "a truth": (
        lambda k: [True], lambda given: 2 - (given[0] is True),
        lambda given, k: given.__setitem__(0, 1),
    ),
    "a sign": (
        lambda k: [0.0], lambda given: math.copysign(1, given[0]),
        lambda given, k: given.__setitem__(0, -0.0),
    ),
    "two lists": (
        lambda k: ([1.0, k], [k]), lambda lists: sum(lists[0]),
        lambda lists, k: lists[1].insert(0, lists[0].pop()),
    ),
}  # fmt: skip
SETTINGS = REPLACED | HELD | MISTAKEN
FEW = [
    "a float", "a truth", "a sign", "a word", "a table", "an array", "a tensor in an object",
    "a closure",
]  # fmt: skip
HOLDERS = {
    **{f"the first layer's {kind}": ("early", SETTINGS[kind]) for kind in SETTINGS},
    **{f"the model's {kind}": ("", SETTINGS[kind]) for kind in FEW},
    **{f"the boundary's {kind}": ("middle", SETTINGS[kind]) for kind in ("a float", "a list")},
}


@hostile(over=HOLDERS, cases=6)
def test_a_setting_that_changes_is_obeyed(run, part, place):
    make, read, write = place

    def change(model):
        owner = model.get_submodule(part)
        if write is None:
            owner.setting = make(2.0)
        else:
            write(owner.setting, 2.0)

    changed(run, change, tuned(part, make(1.0), read))


def worked_out(model):
    if not hasattr(model, "setting"):
        model.setting = 1.0
    return model.setting


READ = {
    "by vars": lambda model: vars(model)["given"],
    "from its dict": lambda model: sum(v for k, v in model.__dict__.items() if k == "given"),
    "as its first call works it out": worked_out,
    "of all that it holds": lambda model: vars(model.held)["".join(("giv", "en"))],
    "by a name that is made": lambda model: getattr(model.held, "giv" + "".join("en")),
    "from a table that fills itself": lambda model: model.table["setting"],
    "through a view of a table": lambda model: model.view["setting"],
}


@hostile(over=READ)
def test_a_setting_of_the_model_is_obeyed_however_it_is_read(run, read):
    front = lambda model, x: Net.front(model, x * read(model))  # noqa: E731
    model = net(front=front, given=1.0, table=defaultdict(lambda: 1.0))
    behind = {"setting": 1.0}
    model.view = types.MappingProxyType(behind)
    model.held = types.SimpleNamespace(given=1.0)

    def change(model):
        model.held.given = 2.0
        model.given = model.table["setting"] = model.setting = behind["setting"] = 2.0

    changed(run, change, model)


NOTES = {
    "a size": lambda model, x: setattr(model, "noted", len(x)) or model.noted / len(x),
    "a shape": lambda model, x: setattr(model, "noted", x.shape) or model.noted[1] / 6,
    "tables by size": lambda model, x: model.table.setdefault(len(x), torch.ones(len(x), 1)),
}


@hostile(over=NOTES, silent=True)
def test_what_the_model_notes_of_each_batch_is_no_change(run, note):
    front = lambda model, x: Net.front(model, x * note(model, x))  # noqa: E731
    trained(run, model=net(front=front, noted=None, table={}), batch_size=7, epochs=4)


def found_in_a_closure(one, other, use):
    """What is no number, and decides one."""
    return (
        lambda k: cell(one if k == 1 else other), lambda at: use(at()),
        lambda at, k: at.write(one if k == 1 else other),
    )  # fmt: skip


def kept(k):
    """Return what gives the one tensor that it keeps."""
    found = functools.lru_cache(lambda: torch.full((1,), k))
    found()
    return found


class Used:
    """Says what it is when it is used, and nobody names what of it is read."""

    def __init__(self, k):
        self.k = k

    def __float__(self):
        return self.k

    def __iter__(self):
        yield self.k

    def __rmul__(self, x):
        return x * self.k


def defaulting(k):
    return lambda *, kept=k: kept


def put_k(at, k):
    at.k = k


def put_table(at, k):
    TABLE["scale"] = k


def imported(at):
    from tests.hostile.places import NUMBER

    return NUMBER


class Scaling(torch.autograd.Function):
    k = 1.0

    @staticmethod
    def forward(ctx, x):
        return x * Scaling.k

    @staticmethod
    def backward(ctx, grad):
        return grad * Scaling.k


@torch.library.custom_op("hostile::scaled", mutates_args=())
def scaled_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    return x * Scaling.k


def dispatching():
    """Return a function that keeps in a memo which class of argument leads where."""
    found = functools.singledispatch(lambda x: None)
    found.register(float, lambda x: x * Scaling.k)
    return found


class Meta(type):
    k = 1.0

    @property
    def read(cls):
        return cls.k

    def __len__(cls):
        return int(cls.k)


class Classed(metaclass=Meta):
    pass


class Elsewhere:
    def __get__(self, instance, owner):
        return TABLE["scale"]


class Dispatching:
    @functools.singledispatchmethod
    def of(self, x):
        return Scaling.k


HARDTANH = F.hardtanh
kept_object = shared(One(), set_scale)


NAMED = {
    "a library's function": found_in_a_closure(torch.exp, torch.exp2, lambda f: f(torch.ones(1))),
    "a function": found_in_a_closure(lambda: 1.0, lambda: 2.0, lambda f: f()),
    "a dtype": found_in_a_closure(torch.float64, torch.int8, lambda t: torch.tensor(1.5).to(t)),
    "a class": found_in_a_closure(nn.Tanh, nn.Sigmoid, lambda kind: kind()(torch.ones(1))),
    "nothing yet": found_in_a_closure(None, 2.0, lambda k: k or 1.0),
    "a list in a partial": (
        lambda k: functools.partial(lambda f: f[0], [k]), lambda at: at(),
        lambda at, k: at.args[0].__setitem__(0, k),
    ),
    "a keyword of a partial": (
        lambda k: functools.partial(dict, k=k), lambda at: at()["k"],
        lambda at, k: at.keywords.update(k=k),
    ),
    "a tensor that is kept for a function": (kept, lambda at: at(), lambda at, k: at().fill_(k)),
    "what it had from its class": (of_class(One), scale, lambda at, k: k > 1 and set_scale(at, k)),
    "weights that are no child's": (
        lambda k: nn.Linear(2, 2).requires_grad_(False), lambda at: at.weight.sum(),
        lambda at, k: nn.init.constant_(at.weight, k),
    ),
    "an operator": (Used, lambda at: 1.0 * at, put_k),
    "a conversion": (Used, float, put_k),
    "an iterator": (Used, sum, put_k),
    "by its name": (Used, lambda at: getattr(at, "k"), put_k),  # noqa: B009
    "a function of autograd": (
        lambda k: put_k(Scaling, k) or Scaling, lambda at: at.apply(torch.ones(1)), put_k,
    ),
    "a metaclass": (
        lambda k: put_k(Meta, k) or Classed, lambda at: at.read * len(at),
        lambda at, k: put_k(Meta, k),
    ),
    "a module that is handed on": (shared(types.ModuleType("held"), set_scale), scale, set_scale),
    "a weak proxy": (lambda k: weakref.proxy(kept_object(k)), scale, set_scale),
    "the key of a weak table": (
        lambda k: weakref.WeakKeyDictionary({kept_object(k): None}),
        lambda at: next(iter(at)).scale, lambda at, k: set_scale(next(iter(at)), k),
    ),
    "an operator of torch's library": (
        lambda k: put_k(Scaling, k), lambda at: torch.ops.hostile.scaled(torch.ones(1)),
        lambda at, k: put_k(Scaling, k),
    ),
    "what is dispatched to": (
        lambda k: put_k(Scaling, k) or dispatching(), lambda at: at(1.0),
        lambda at, k: put_k(Scaling, k),
    ),
    "what a method is dispatched to": (
        lambda k: put_k(Scaling, k) or Dispatching(), lambda at: at.of(1.0),
        lambda at, k: put_k(Scaling, k),
    ),
    "a descriptor": (
        lambda k: type("Described", (), {"scale": Elsewhere()})(), scale,
        lambda at, k: TABLE.update(scale=k),
    ),
    "a function of torch's": (
        lambda k: None, lambda at: F.hardtanh(torch.tensor(5.0)),
        lambda at, k: setattr(F, "hardtanh", HARDTANH if k == 1 else torch.relu),
    ),
    "a method made in C": (
        lambda k: {"k": k}.get, lambda at: at("k"), lambda at, k: at.__self__.update(k=k),
    ),
    "an event": (lambda k: threading.Event(), lambda at: 1 + at.is_set(), lambda at, k: at.set()),
    "a default": (defaulting, lambda at: at(), lambda at, k: at.__kwdefaults__.update(kept=k)),
}  # fmt: skip
"""What code of the front names, of any kind."""


UNTOLD = {
    "all of an object": (Config, lambda at: sum(vars(at).values()), put_k),
    "a computed attribute": (Config, lambda at: getattr(at, "".join("k")), put_k),
    "the dict of an object": (Config, lambda at: at.__dict__.get("".join("k")), put_k),
    "a copy of a data class": (Config, lambda at: dataclasses.asdict(at)["scale"], set_scale),
    "evaluated": (str, lambda at: eval("TABLE")["scale"], put_table),
    "a computed global": (str, lambda at: globals()["".join("TABLE")]["scale"], put_table),
    "a text of the globals": (str, lambda at: globals()["TABLE"]["scale"], put_table),
    "imported in the call": (shared(None, write_global), imported, write_global),
}
"""Reads under a name that the code does not tell."""


TOLD = {
    "of an object": lambda m, at: at.scale * getattr(at, "scale", len(m.early.weight[0])),
    "of the model": lambda m, at: at.scale * m.get_submodule("".join(("ear", "ly"))).k,
    "of a library": lambda m, at: getattr(torch, "".join("ones"))(1) * at.scale,
}


@hostile(over=TOLD, silent=True)
def test_names_that_are_told_leave_the_rest_alone(run, read):
    at = Config()
    model = net(front=lambda m, x: Net.front(m, x * read(m, at)))
    model.early.k = 1.0

    def each_step(model, step):
        at.step = model.step = step

    trained(run, model=model, epochs=4, each_step=each_step)


class Unit(nn.Dropout):
    k = 1.0
    kept = None

    def forward(self, x):
        self.kept = x.new_ones(()) if self.kept is None else self.kept
        return x * self.kept * (self.k if self.training else 2.0)


GIVEN = [None]
HOLDING = {
    "a list": lambda m: m.held[0],
    "an object": lambda m: m.held[1].scale,
    "a global": lambda m: GIVEN[0],
}
OF_A_UNIT = {
    "a setting": lambda unit: setattr(unit, "k", 3.0),
    "its mode": nn.Module.eval,
    "a hook": lambda unit: unit.register_forward_hook(lambda m, given, out: 2 * out),
    "a class": lambda unit: setattr(unit, "__class__", nn.Tanh),
}


def with_a_unit(find):
    GIVEN[0] = unit = Unit()
    return net(front=lambda m, x: Net.front(m, find(m)(x)), held=[unit, Config(unit)])


@hostile(over={f"{k} in {h}": (OF_A_UNIT[k], HOLDING[h]) for k in OF_A_UNIT for h in HOLDING})
def test_whatever_changes_of_a_module_that_is_no_child_is_obeyed(run, change, find):
    changed(run, lambda m: change(find(m)), with_a_unit(find))


@hostile(over=HOLDING, silent=True)
def test_a_module_that_is_no_child_may_count_and_keep_what_it_works_out(run, find):
    model = with_a_unit(find)
    counted = lambda unit, given: setattr(unit, "calls", getattr(unit, "calls", 0) + 1)  # noqa: E731
    find(model).register_forward_pre_hook(counted)
    trained(run, model=model, epochs=4)
    run.see(find(model).calls)


BEHIND = {
    "called behind": lambda m, x: m.back(m.front(x)) * TABLE["scale"],
    "called around it": lambda m, x: m.late_scale(m.front(x)),
    "of a function of its own": lambda m, x: scaled_head(m, m.front(x)),
    "read before": lambda m, x: (1 + 0.01 * m.step) * m.back(m.front(x)),
}


def scaled_head(model, h):
    return model.back(h) * TABLE["scale"]


@hostile(over=BEHIND, silent=True)
def test_what_only_the_head_reads_is_no_change_of_the_front(run, forward):
    model = net(forward=forward, step=0)
    type(model).late_scale = scaled_head
    each_step = lambda m, n: TABLE.update(scale=1.0 + 0.01 * n) or setattr(m, "step", n)  # noqa: E731
    try:
        trained(run, model=model, each_step=each_step, epochs=4)
    finally:
        TABLE.update(scale=1.0)


BOTH = {
    "in a branch behind the call": lambda m, x: (
        m.back(m.front(x)) if TABLE["scale"] == 1 else m.back(m.front(x * TABLE["scale"]))
    ),
    "in a loop": lambda m, x: functools.reduce(
        lambda h, part: part(h) * TABLE["scale"], (m.early, m.middle, m.late, m.head), x
    ),
}


@hostile(over=BOTH)
def test_what_the_front_reads_behind_the_call_as_well_is_obeyed(run, forward):
    TABLE.update(scale=1.0)
    try:
        changed(run, lambda m: TABLE.update(scale=2.0), net(forward=forward))
    finally:
        TABLE.update(scale=1.0)


def written(run, make, read, write):
    at = make(1.0)
    write(at, 1.0)
    try:
        changed(run, lambda m: write(at, 2.0), layered(lambda layer, h: h * read(at)))
    finally:
        write(at, 1.0)


@hostile(over=HELD | ELSEWHERE | NAMED | UNTOLD, cases=9)
def test_a_number_that_the_front_reads_wherever_it_lies(run, make, read, write):
    written(run, make, read, write)


class Asking:
    @property
    def scale(self):
        return TABLE["scale"]


HOLDS = {
    "a class": (One, lambda: setattr(One, "scale", 2.0)),
    "its class": (One(), lambda: setattr(One, "scale", 2.0)),
    "the class of an item": ([One()], lambda: setattr(One, "scale", 2.0)),
    "in a list": ([Asking()], lambda: TABLE.update(scale=2.0)),
}


@hostile(over=HOLDS)
@pytest.mark.parametrize("of", ["the model", "its class"])
def test_a_number_that_code_of_what_the_model_holds_decides(run, held, change, of):
    read = lambda m: (m.held[0] if isinstance(m.held, list) else m.held).scale  # noqa: E731
    model = net(front=lambda m, x: Net.front(m, x * read(m)))
    holder = model if of == "the model" else type(model)
    holder.held = held
    try:
        changed(run, lambda m: change(), model)
    finally:
        One.scale = TABLE["scale"] = 1.0


@hostile(told="open")
def test_a_file_that_the_front_reads_by_its_path(run):
    path = run.directory.with_suffix(".scale")
    path.write_text("1.0")
    front = lambda m, x: Net.front(m, x * float(path.read_text()))  # noqa: E731
    changed(run, lambda m: path.write_text("2.0"), net(front=front))


@hostile
def test_an_attribute_that_is_not_read_does_no_harm(run):
    model = tuned("early", iter([1.0] * 9), lambda setting: 1.0)
    changed(run, put("early", setting=iter([])), model)


@hostile(served=True)
def test_an_attribute_that_is_set_to_what_it_was_is_served_on(run):
    model = tuned("early", {"a": 1.0}, lambda setting: setting["a"])
    changed(run, put("early", setting={"a": 1.0}), model, epochs=6)


# ---- settings of torch's own modules ----------------------------------------------------------


@hostile(over={"p": put("stem.3", p=0.7), "momentum": put("stem.1", momentum=0.5)}, silent=True)
def test_settings_that_decide_nothing_are_let_be(run, change):
    changed(run, change, ConvNet(), images(), boundary="body")


# ---- modes ------------------------------------------------------------------------------------


def asking(ask):
    """Return a model whose front asks for a mode."""
    return net(front=lambda m, x: m.middle(m.early(x) * (2.0 if ask(m) else 1.0)).float())


ASKED = {
    "training": (lambda m: m.training, True),
    "gradients": (lambda m: torch.is_grad_enabled(), False),
}


@hostile(over=ASKED)
def test_code_that_asks_for_a_mode_is_asked_again(run, ask, eval_):
    model = run.freeze(asking(ask))
    loader = run.loader(rows())

    def evaluate(epoch):
        model.train(not eval_)
        with torch.no_grad():
            for x, _ in loader:
                run.record(model(x).square().sum())

    run.fit(model, loader, 3, each_epoch=evaluate)


def autocast_in(run, epochs, parts=1, model=None):
    """Train in autocast in some epochs of four."""
    switch = [False]

    def each_epoch(model, epoch):
        if epoch == 2:
            run.turn()
        switch[0] = epoch in epochs

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=switch[0]):
            out = torch.cat([model(x) for x in batch[0].chunk(parts)])
        return F.cross_entropy(out.float(), batch[1])

    trained(run, loss, model=model, each_epoch=each_epoch, epochs=4)


@hostile
def test_a_front_that_asks_whether_autocast_is_on_is_asked_again(run):
    autocast_in(run, (2, 3), model=asking(lambda m: torch.is_autocast_enabled("cpu")))


@hostile(over={"whole": 1, "in parts": 2}, served=True)
def test_autocast_in_one_epoch_alone(run, parts):
    autocast_in(run, (1,), parts)


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


@hostile(over={str(kind): kind for kind in (torch.float32, torch.bfloat16)}, served=True)
def test_a_boundary_of_more_digits_than_what_leads_to_it(run, kind):

    def front(model, x):
        h = torch.tanh(model.early(x.to(kind))).double()
        return model.middle(h).float()

    model = net(front=front)
    model.early.to(kind), model.middle.double()
    trained(run, model=model)


# ---- counts and schedules ---------------------------------------------------------------------


WORDS, MARKED = {}, False


def mark(model, h):
    global MARKED
    MARKED = True


LEFT = {
    "its own count": lambda m, h: setattr(m.early, "calls", m.early.calls + 1),
    "the model's count": lambda m, h: setattr(m, "calls", m.calls + 1),
    "a flag": lambda m, h: setattr(m, "flag", True),
    "a word": lambda m, h: WORDS.update(mode="on"),
    "the head's tensor": lambda m, h: setattr(m.head, "aux", h.detach().mean()),
    "a name that it only writes": mark,
    "a count beside the head's": lambda m, h: WORDS.update(early=WORDS["early"] + 1),
}


def noticed(m):
    global MARKED
    flag, m.flag, MARKED = m.flag is True or MARKED, None, False
    count = m.calls + m.early.calls + WORDS["early"]
    return 1 + 0.1 * (count + flag + m.head.aux + len(WORDS.pop("mode", "")))


@hostile(over=LEFT, cases=7)
def test_what_the_front_leaves_to_others_is_there_for_them(run, leave):
    model = layered(lambda layer, h: leave(layer.of[0], h) or h, calls=0)
    model.early.of, model.calls, model.flag, model.head.aux = [model], 0, None, 0.0
    model.head.register_forward_hook(lambda *_: WORDS.update(head=WORDS["head"] + 1))
    WORDS.update(early=0, head=0)
    trained(run, lambda m, b: ce(m, *b) * noticed(m), model=model, epochs=4)


def counts(decide):
    """Return a model that counts its calls: `decide(h, calls)` is what the first layer gives."""

    def forward(self, x):
        self.calls += 1
        h = decide(self.early(x), self.calls)
        return self.back(self.middle(torch.tanh(h))) * (1 + 0.001 * self.calls)

    return net(forward=forward, calls=0)


LATE = {
    "mean": lambda h, calls: h - h.mean(0) if calls > 12 else h,
    "by and by": lambda h, calls: h * 0.9**calls,
    "in every 20th call": lambda h, calls: h if calls % 20 else -h,
    "in turns of 25 calls": lambda h, calls: -h if calls // 25 % 2 else h,
}


@hostile(over=LATE)
def test_a_counter_of_the_models_own_that_decides_of_the_front(run, decide):
    trained(run, model=counts(decide), epochs=10)


made_at_once = lambda m: setattr(m, "count", getattr(m, "count", 0) + 1) or m.count  # noqa: E731
made_besides = lambda m: made_at_once(m.held)  # noqa: E731
FLAG = {"a flag": (dict, lambda at: len(at) or at.update(is_set=True) or 0)}
KINDS = ("a list", "a proxy", "an object", "a list that grows", "a set", "a tensor in an object")
OUTSIDE = (
    "an array of Python's", "ctypes", "bytes", "bytes that grow", "a set", "an iterator",
    "a context", "the environment", "a table",
)  # fmt: skip


HELD_COUNTS = {
    **{
        kind: (COUNTERS[kind][0], lambda model, tick=COUNTERS[kind][1]: tick(model.held))
        for kind in KINDS
    },
    "an attribute that the first call makes": (lambda: None, made_at_once),
    "what a method is bound to": (lambda: [].append, lambda m: m.held(0) or len(m.held.__self__)),
    "what a table has besides": (type("Table", (dict,), {}), made_besides),
}


@hostile(over=HELD_COUNTS)
@pytest.mark.parametrize("decides", [True, False], ids=["deciding", "deciding nothing"])
def test_whatever_the_model_counts_its_calls_in(run, make, tick, decides):
    """It is put ahead: a call of this front that is too far off for a proof decides."""

    def front(model, x):
        return Net.front(model, x * (2.0 if tick(model) > 30 and decides else 1.0))

    trained(run, model=net(front=front, held=make()), epochs=12)


@hostile(over={kind: COUNTERS[kind] for kind in OUTSIDE} | FLAG)
def test_a_front_that_counts_outside_of_the_model_in_turns(run, make, tick):
    at = make()
    front = lambda m, x: m.middle(m.early(x) * (1 + tick(at) % 2))  # noqa: E731
    trained(run, model=net(front=front))


@hostile(over={"once": {11}, "at first": {1}, "thrice": {3, 12, 21}, "always": range(99)})
def test_a_flag_of_the_front_that_the_head_turns_over(run, turns):
    def back(model, h):
        model.calls, model.flag = model.calls + 1, model.flag ^ (model.calls in turns)
        return Net.back(model, h)

    model = net(front=lambda m, x: Net.front(m, x * (1 + m.flag)), back=back, flag=0, calls=1)
    model.middle.register_forward_hook(lambda m, *_: setattr(m, "seen", [m]))
    trained(run, model=model, epochs=6)


@hostile(served=True)
def test_a_setting_that_the_first_call_works_out_is_no_count(run):
    class Cached(Net):
        temperature = functools.cached_property(lambda model: 2.0)

        def front(self, x):
            return super().front(x * self.temperature)

    trained(run, model=Cached())


@hostile(served=True)
def test_a_counter_of_the_models_own_that_decides_nothing_of_the_front(run):
    run.see(trained(run, model=counts(lambda h, calls: h), epochs=4).calls)


@hostile
@pytest.mark.parametrize("part", ["early", ""], ids=["of a layer", "of the model"])
@pytest.mark.parametrize("when", ["each_step", "each_epoch"])
def test_a_temperature_that_the_loop_lowers_is_obeyed(run, part, when):
    lower = lambda model, number: put(part, setting=0.8**number)(model)  # noqa: E731
    trained(run, model=tuned(part, 1.0), epochs=4, **{when: lower})


@hostile(served=True)
def test_a_temperature_of_the_head_may_fall_each_step(run):
    lower = lambda model, step: put("late", setting=0.9**step)(model)  # noqa: E731
    trained(run, model=tuned("late", 1.0), epochs=4, each_step=lower)


# ---- arguments --------------------------------------------------------------------------------


def early(read=lambda given: given):
    return net(forward=lambda m, x, given: m.back(m.front(x * read(given))))


def late():
    return net(forward=lambda m, x, given: m.back(m.front(x) * given))


INSIDE = (
    "a closure", "an object", "an array", "a table", "a list", "a tensor",
    "a tensor past its version",
)  # fmt: skip


@hostile(over={kind: HELD[kind] for kind in INSIDE}, cases=3)
def test_an_argument_that_changes_inside_is_read_again(run, make, read, write):
    given = make(1.0)
    trained(
        run, lambda m, b: F.cross_entropy(m(b[0], given), b[1]), model=early(read), epochs=4,
        each_epoch=lambda _, epoch: epoch == 2 and (run.turn(), write(given, 2.0)),
    )  # fmt: skip


def given(values):
    """Return a loss that gives the model one value in each step."""
    return numbered(lambda m, x, y, step: cross_entropy(lambda x: m(x, values(step)), (x, y)))


CELLS, ONE, SYSTEM = (cell(1.0), cell(2.0)), One(), random.SystemRandom()
CONFIGS = [Config(one) for one in CELLS]
ANOTHER = {
    "a new object in the place of one that is gone": (
        scale, lambda step: Config(1.0 if step < 6 else 2.0),
    ),
    "a schedule": (float, lambda step: 1.0 + 0.1 * step),
    "a number that decides from a threshold on": (lambda k: 1.0 + (k > 6), lambda step: step),
    "there or not": (lambda t: 1.0 + (t is None), lambda step: torch.ones(1) if step > 8 else None),
    "code of one name": (call, lambda step: CELLS[step > 5]),
    "code in an object": (lambda at: at.scale(), lambda step: CONFIGS[step > 5]),
    "code of Python's": (lambda f: f(torch.ones(1)), lambda step: (torch.sin, torch.cos)[step > 5]),
    "a word that is asked for": (lambda task: 1.0 + (task == "b"), lambda step: "acb"[step % 3]),
}  # fmt: skip


@hostile(over=ANOTHER)
def test_another_argument_of_the_front_is_another(run, read, values):
    """Objects are told apart by what they hold: a new one may have the old one's address."""
    trained(run, given(values), model=early(read), epochs=4)


NO_OTHER_FRONT = {
    "a schedule of the head": (late, lambda step: 1.0 + 0.1 * step),
    "as a tensor": (late, lambda step: torch.tensor(1.0 + 0.1 * step)),
    "a flag of the front that alternates": (early, lambda step: float(1 + step % 2)),
    "a method that is bound anew": (lambda: early(call), lambda step: ONE.__call__),
    "the system's generator": (lambda: early(lambda r: 1.0 + r.random() // 1), lambda _: SYSTEM),
}


@hostile(over=NO_OTHER_FRONT, served=True)
def test_arguments_that_do_not_make_another_front_are_served(run, make, values):
    trained(run, given(values), model=make(), epochs=5)


CALLED = {
    "before": lambda m, x, tick: m.back(m.middle(tick(m.early(x)))),
    "behind": lambda m, x, tick: tick(m.back(m.front(x))),
}


@hostile(over=CALLED, served=True)
def test_what_a_call_is_given_is_called_once(run, forward):
    calls = 0

    def tick(h):
        nonlocal calls
        calls += 1
        return h

    trained(run, lambda m, b: F.cross_entropy(m(b[0], tick), b[1]), model=net(forward=forward))
    run.see(calls)
