"""What the prefix is, changes: what is trained, its children."""

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from tests.hostile.harness import cross_entropy, hostile
from tests.hostile.loops import changed, trained
from tests.hostile.nets import Net, Residual, layered, net, rows

# ---- requires_grad ----------------------------------------------------------------------------


def thaw(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(True)

    return change


def bitfit(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


THAWED = {
    "early": thaw("early"), "middle": thaw("middle"), "every bias alone": bitfit,
    "nothing, but more is frozen": lambda m: m.late.requires_grad_(False),
}  # fmt: skip


@hostile(over=THAWED)
def test_a_part_of_the_front_that_is_thawed_by_hand_trains(run, change):
    changed(run, change)


SCHEDULES = {
    "for one step": {7: ("middle", True), 8: ("middle", False)},
    "layer by layer": {6: ("middle", True), 9: ("early", True)},
}


@hostile(over=SCHEDULES)
def test_a_part_trains_from_that_very_step_on(run, schedule):
    def each_step(model, step):
        if step in schedule:
            run.turn()
            name, wanted = schedule[step]
            model.get_submodule(name).requires_grad_(wanted).zero_grad(set_to_none=True)

    trained(run, each_step=each_step, epochs=4)


@hostile
def test_a_boundary_below_a_thawed_part_is_told_of_it(run):
    """The user unfreezes and says so, in this order."""

    def each_epoch(model, epoch):
        if epoch == 2:
            run.turn()
            model.middle.requires_grad_(True)
        if epoch == 3:
            run.move(model, "early")

    trained(run, each_epoch=each_epoch, epochs=6)


@hostile
def test_frozen_weights_that_decay_with_zero_gradients_move(run):
    """`zero_grad(set_to_none=False)` leaves zeros behind, and weight decay moves such a weight."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    x, y = rows()[:8]
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)
    run.freeze(model)
    for x, y in [*run.loader(rows())] * 3:
        loss = F.cross_entropy(model(x), y)
        run.record(loss)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    run.see(model)


# ---- children ---------------------------------------------------------------------------------


class Stacked(Net):
    """A front with containers, to which anything may be added."""

    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.middle = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 8)
        self.late, self.head = self._modules.pop("late"), self._modules.pop("head")

    def front(self, x):
        h = self.early(x)
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return self.last(h)


def frozen(*sizes):
    return nn.Linear(*sizes).requires_grad_(False)


CONTAINERS = {
    "append": lambda m: m.early.append(Residual()),
    "frozen layer": lambda m: m.middle.append(frozen(8, 8)),
    "trained layer": lambda m: m.middle.append(Residual()),
    "rebuilt": lambda m: setattr(m, "early", nn.Sequential(*m.early, nn.ReLU())),
    "pop a layer": lambda m: m.middle.pop(0),
    "boundary becomes identity": lambda m: setattr(m, "last", nn.Identity()),
}


class Counted(Net):
    """A list that reaches beyond the boundary, and of which the front asks how long it is."""

    def __init__(self):
        super().__init__()
        early, middle, late, _ = self.children()
        del self.early, self.middle, self.late
        self.layers, self.head = nn.ModuleList([early, middle, late]), self._modules.pop("head")

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x * len(self.layers)))
        return self.head(x)


def sequential():
    model = nn.Sequential(*Net().children())
    return model.insert(1, nn.Tanh())


INSERTED = {
    "frozen layer": (sequential, "2", lambda m: m.insert(2, frozen(8, 8))),
    "behind, in a sequence": (sequential, "2", lambda m: m.insert(3, nn.ReLU(inplace=True))),
    "a forward around them": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)), "0.0",
        lambda m: setattr(m[0], "forward", lambda x: nn.Sequential.forward(m[0], -x)),
    ),
    "into a list that is counted": (Counted, "layers.1", lambda m: m.layers.append(frozen(8, 8))),
}  # fmt: skip


@hostile(over=INSERTED)
def test_what_is_inserted_between_layers_counts(run, make, boundary, change):
    def each_step(model, step):
        if step == 7:  # not where the audit looks
            run.turn()
            change(model)

    trained(run, model=make(), boundary=boundary, each_step=each_step, epochs=6)


@hostile(silent=True)
def test_what_stands_behind_the_boundary_is_replaced(run):
    model = net(forward=lambda m, x: m.head(m.front(x)))
    changed(run, lambda m: setattr(m, "head", nn.Linear(8, 5)), model, epochs=4, at=2)


@hostile(over=CONTAINERS, cases=3)
def test_a_container_of_the_front_may_change(run, change):
    changed(run, change, Stacked(), boundary="last")


def listed():
    return net(
        front=lambda m, x: m.middle(torch.tanh(m.early(x) + sum(m.biases))),
        biases=nn.ParameterList([torch.zeros(8), torch.ones(8)]).requires_grad_(False),
    )


def branching():
    return net(
        front=lambda m, x: Net.front(m, x) if m.extra is None else Net.front(m, x) + m.extra(x),
        extra=None,
    )


def prompted():
    return net(
        front=lambda m, x: Net.front(m, x if m.prompt is None else x + m.prompt), prompt=None
    )


def hiding():
    """Has a module in a list: no child."""
    return net(
        front=lambda m, x: m.middle(m.extras[0](torch.tanh(m.early(x)))), extras=[frozen(8, 8)]
    )


def biased(value):
    return nn.Parameter(torch.full((8,), value), requires_grad=False)


CHILDREN = {
    "an adapter around middle": (Net, lambda m: setattr(m, "middle", Residual(m.middle))),
    "an equal copy": (Net, lambda m: setattr(m, "early", copy.deepcopy(m.early))),
    "another": (Net, lambda m: setattr(m, "early", frozen(6, 8))),
    "a branch": (branching, lambda m: setattr(m, "extra", nn.Linear(6, 8))),
    "a prompt": (prompted, lambda m: setattr(m, "prompt", nn.Parameter(torch.ones(6)))),
    "of a list of parameters": (listed, lambda m: m.biases.__setitem__(1, biased(-2.0))),
    "of a plain list": (hiding, lambda m: m.extras.__setitem__(0, nn.Identity())),
    "joined by compilation": (Net, lambda m: m.early.compile(backend="eager")),
}  # fmt: skip


@hostile(over=CHILDREN, cases=4)
def test_a_child_of_the_front_may_change(run, make, change):
    changed(run, change, make())


@hostile
def test_a_trained_module_hidden_in_the_front_trains(run):
    hidden = nn.Linear(8, 8)
    model = layered(lambda layer, h: layer.extras[0](h))
    model.early.extras = [hidden]
    trained(
        run, model=model,
        optimizer=lambda m: torch.optim.SGD([*m.late.parameters(), *hidden.parameters()], 0.2),
    )  # fmt: skip
    run.see(hidden)


@hostile
def test_a_front_put_into_another_model_goes_on(run):
    """The frozen trunk is taken over by a second model that replaces the first."""
    first = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(first, loader, 2)
    second = Net()
    second.early, second.middle = first.early, first.middle
    run.turn()
    run.fit(second, loader, 2)


# What the prefix is, changes: its forwards, its classes, its hooks, and code that it calls.

# ---- forwards and classes ---------------------------------------------------------------------


def doubled(name, wrap):
    """Put something in the place of a module's forward: `wrap` makes it of the plain one."""

    def change(model):
        module = model.get_submodule(name)
        module.forward = wrap(module, module.forward)

    return change


def relu_front(model, x):
    return model.middle(torch.relu(model.early(x)))


def relu_model(model, x):
    return model.back(relu_front(model, x))


def with_forward_of_its_own():
    doubled("early", lambda m, plain: lambda x: plain(x) * 3)(model := Net())
    return model


def of_a_class_of_its_own():
    return net(front=lambda m, x: m.middle(torch.tanh(m.early(x))))


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def at_the_class(of, name, value):
    """What sets an attribute of the class of the first layer, or of the model."""
    return lambda m: setattr(type(m.early if of == "early" else m), name, value)


def helped(kind):
    def forward(self, x):
        return self.adjust(nn.Linear.forward(self, x))

    adjust = staticmethod(lambda x: x) if kind == "static" else lambda self, x: x
    return net(early=type("Helped", (nn.Linear,), {"forward": forward, "adjust": adjust})(6, 8))


class Base(nn.Linear):
    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def derived():
    Base.factor = 1.0
    return net(early=type("Derived", (Base,), {})(6, 8))


FORWARDS = {
    "another class": (Net, lambda m: setattr(m.early, "__class__", Negative)),
    "other bases": (derived, lambda m: setattr(type(m.early), "__bases__", (Negative,))),
    "another class of the model": (
        Net, lambda m: setattr(m, "__class__", type("Relu", (Net,), {"front": relu_front})),
    ),
    "function": (Net, doubled("early", lambda m, plain: lambda x: 2 * plain(x))),
    "taken back": (with_forward_of_its_own, lambda m: m.early.__dict__.pop("forward")),
    "at the class": (of_a_class_of_its_own, at_the_class("model", "front", relu_front)),
    "at the model's class": (of_a_class_of_its_own, at_the_class("model", "forward", relu_model)),
    "of the model's instance": (  # before what its class has
        Net, lambda m: setattr(m, "front", functools.partial(relu_front, m)),
    ),
    "of a layer at its class": (
        lambda: layered(lambda layer, h: h),
        at_the_class("early", "forward", lambda self, x: -F.linear(x, self.weight)),
    ),
    "of the model, replaced": (Net, doubled("", lambda m, _: functools.partial(relu_model, m))),
    "code swapped in place": (  # as live reloading (IPython's autoreload) does it
        of_a_class_of_its_own, lambda m: setattr(type(m).front, "__code__", relu_front.__code__),
    ),
    "a helper at the class": (
        lambda: helped("bound"), at_the_class("early", "adjust", lambda self, x: -2 * x),
    ),
    "a property": (
        lambda: layered(lambda layer, h: h * layer.by, by=property(lambda self: 1.0)),
        at_the_class("early", "by", property(lambda self: 3.0)),
    ),
    "a call operator": (
        lambda: layered(lambda layer, h: h, __call__=lambda m, x: nn.Linear.__call__(m, x)),
        at_the_class("early", "__call__", lambda m, x: -nn.Linear.__call__(m, x)),
    ),
    "an attribute of a base class": (derived, lambda m: setattr(Base, "factor", 2.0)),
}  # fmt: skip


@hostile(over=FORWARDS, cases=8)
def test_code_that_is_patched_runs(run, make, change):
    changed(run, change, make())


# ---- code that it calls -----------------------------------------------------------------------


def global_function():
    return torch.tanh


@hostile
def test_a_global_function_replaced_is_called(run, monkeypatch):
    model = net(front=lambda m, x: m.middle(global_function()(m.early(x))))
    with monkeypatch.context() as patched:
        changed(run, lambda m: patched.setitem(globals(), "global_function", lambda: F.relu), model)


# ---- hooks ------------------------------------------------------------------------------------

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, a, out: out * 2),
    "pre": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "with kwargs": lambda m: m.register_forward_hook(
        lambda m, a, k, out: out * 2, with_kwargs=True
    ),
}


JOINING = {
    **{kind: (hook, "early") for kind, hook in HOOKS.items()},
    "at the boundary": (HOOKS["forward"], "middle"),
    "pre, of the model": (HOOKS["pre"], ""),
}


@hostile(over=JOINING)
def test_a_hook_that_joins_the_front_is_called(run, hook, name):
    changed(run, lambda model: hook(model.get_submodule(name)))


@hostile(over={kind: HOOKS[kind] for kind in ("forward", "pre")})
def test_a_hook_that_leaves_the_front_is_gone(run, hook):
    model = Net()
    handle = hook(model.early)
    changed(run, lambda model: handle.remove(), model)


def double(module, args, out=None):
    if not isinstance(module, nn.Linear) or module.in_features != 6:
        return None
    return out * 2 if out is not None else (args[0] * 2,)


class Scaling:
    """What a hook is, or is a method of."""

    calls, by = 0, 1.0

    def __init__(self):
        self.factor = [1.0]

    def __call__(self, module, args, out):
        self.calls += 1
        return out * self.by

    def scaled(self, module, args, out):
        return out * self.factor[0]


SCALING = {
    "an object": (lambda own: own, lambda own: setattr(own, "by", 2.0)),
    "a method": (lambda own: own.scaled, lambda own: own.factor.__setitem__(0, 2.0)),
}


@hostile(over=SCALING)
def test_what_a_hook_of_the_front_holds_is_obeyed(run, hook, change):
    model, own = Net(), Scaling()
    model.early.register_forward_hook(hook(own))
    changed(run, lambda model: change(own), model)


REGISTERS = {
    "forward": torch_module.register_module_forward_hook,
    "pre": torch_module.register_module_forward_pre_hook,
    "partial": lambda hook: torch_module.register_module_forward_hook(functools.partial(hook)),
}


@hostile(over=REGISTERS)
def test_a_global_hook_that_joins_is_called(run, register):
    handles = []
    try:
        changed(run, lambda model: handles.append(register(double)))
    finally:
        for handle in handles:
            handle.remove()


def hooked_to_count(model):
    kept = []
    for part in (model.early, model.head):
        part.register_full_backward_hook(lambda *_: kept.append(1))


BESIDE = {
    "forward hook behind": lambda m: m.late.register_forward_hook(lambda m, a, out: out * 2),
    "backward hook behind": lambda m: m.head.register_full_backward_hook(lambda m, gi, go: None),
    "backward hook": lambda m: m.early.register_full_backward_hook(lambda m, gi, go: None),
    "backward hooks that count": hooked_to_count,
    "state dict hook": lambda m: m.early.register_state_dict_pre_hook(lambda *a: None),
    "gradient hook": lambda m: m.late.weight.register_hook(lambda grad: grad * 0.5),
}


@hostile(over=BESIDE, served=True)
def test_a_hook_that_does_not_concern_the_front_is_served_on(run, register):
    changed(run, register)


@hostile(silent=True)
def test_a_hook_that_looks_on_and_is_made_again_for_each_batch_is_the_same(run):
    means = []

    def loss(model, batch):
        handle = model.middle.register_forward_hook(lambda m, a, out: means.append(out.mean()))
        value = cross_entropy(model, batch)
        handle.remove()
        return value

    trained(run, loss)
    run.see(torch.stack(means))


@hostile(served=True)
def test_what_a_librarys_hooks_inside_collect_for_the_output_is_there(run):
    """As attentions and routers' logits of Hugging Face's."""
    found, front = [], nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    front[0].register_forward_hook(hook := lambda m, a, out: found.append(out))
    hook.__module__ = "transformers"
    both = lambda m, x: (found.clear(), m.back(m.front(x)), *found)[1:]  # noqa: E731
    loss = lambda m, b: sum(F.cross_entropy(out, b[1]) for out in m(b[0]))  # noqa: E731
    trained(run, loss, model=net(forward=both, middle=front))


KEPT = {"some": torch.relu, "all": torch.neg, "places": lambda out: out.argmax(-1)}


@hostile(over=KEPT, served=True, silent=True)
def test_features_that_hooks_keep_are_no_change_of_the_front(run, kept):
    model, found = run.freeze(Net()), {}
    for part in ("early", "middle", "late"):
        keep = lambda m, a, out, part=part: found.setdefault(part, []).append(kept(out))  # noqa: E731
        model.get_submodule(part).register_forward_hook(keep)
    model.early.register_forward_hook(Scaling())
    run.fit(model, run.loader(rows()), 3, each_epoch=lambda _: found.clear())
