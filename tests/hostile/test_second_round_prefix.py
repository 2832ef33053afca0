"""What the prefix is, changes: further ways, by code, by classes, by torch's own utilities."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import types

import pytest
import torch
from torch import nn
from torch.ao.quantization import DeQuantStub, QuantStub
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune, stateless
from torch.optim import swa_utils

from tests.hostile.harness import AT_RUN_TIME, hostile, sgd
from tests.hostile.loops import changed, trained
from tests.hostile.nets import ConvNet, Net, Residual, Tokens, images, rows, saved, sentences


class Reading(nn.Linear):
    """A frozen layer whose output hangs on what a function returns."""

    def __init__(self, read):
        super().__init__(6, 8)
        self.read = read

    def forward(self, x):
        return super().forward(x) * self.read()


def reading(read):
    model = Net()
    model.early = Reading(read)
    return model


# ---- code that is reached in other ways -------------------------------------------------------


@hostile
def test_a_helper_method_replaced_at_the_class_is_called(run):
    class Helped(nn.Linear):
        def scale(self, x):
            return x

        def forward(self, x):
            return self.scale(super().forward(x))

    model = Net()
    model.early = Helped(6, 8)
    changed(run, lambda m: setattr(Helped, "scale", lambda self, x: -2 * x), model, rows())


@hostile
def test_a_static_method_replaced_at_the_class_is_called(run):
    class Helped(nn.Linear):
        @staticmethod
        def scale(x):
            return x

        def forward(self, x):
            return self.scale(super().forward(x))

    model = Net()
    model.early = Helped(6, 8)
    change = lambda m: setattr(Helped, "scale", staticmethod(lambda x: -2 * x))  # noqa: E731
    changed(run, change, model, rows())


@hostile
def test_a_property_replaced_at_the_class_is_read(run):
    class Helped(nn.Linear):
        @property
        def scale(self):
            return 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Net()
    model.early = Helped(6, 8)
    changed(run, lambda m: setattr(Helped, "scale", property(lambda self: 3.0)), model, rows())


@hostile
def test_an_attribute_of_a_base_class_is_obeyed(run):
    class Base(nn.Linear):
        factor = 1.0

    class Derived(Base):
        def forward(self, x):
            return super().forward(x) * self.factor

    model = Net()
    model.early = Derived(6, 8)
    changed(run, lambda m: setattr(Base, "factor", 2.0), model, rows())


@hostile(limit=AT_RUN_TIME)
def test_an_attribute_of_the_class_read_by_its_name_is_obeyed(run):
    class Settings:
        factor = 1.0

    changed(
        run, lambda m: setattr(Settings, "factor", 2.0), reading(lambda: Settings.factor), rows()
    )


@hostile(limit=AT_RUN_TIME)
def test_an_attribute_of_the_class_of_a_setting_is_obeyed(run):
    class Settings:
        factor = 1.0

    settings = Settings()
    changed(
        run, lambda m: setattr(Settings, "factor", 2.0), reading(lambda: settings.factor), rows()
    )


@hostile(limit=AT_RUN_TIME)
def test_a_descriptor_that_reads_elsewhere_is_obeyed(run):
    store = {"factor": 1.0}

    class Elsewhere:
        def __get__(self, instance, owner):
            return store["factor"]

    class Described(nn.Linear):
        factor = Elsewhere()

        def forward(self, x):
            return super().forward(x) * self.factor

    model = Net()
    model.early = Described(6, 8)
    changed(run, lambda m: store.update(factor=2.0), model, rows())


@hostile(limit=AT_RUN_TIME)
def test_a_getattr_that_reads_elsewhere_is_obeyed(run):
    store = {"factor": 1.0}

    class Dynamic(nn.Linear):
        def __getattr__(self, name):
            return store["factor"] if name == "factor" else super().__getattr__(name)

        def forward(self, x):
            return super().forward(x) * self.factor

    model = Net()
    model.early = Dynamic(6, 8)
    changed(run, lambda m: store.update(factor=2.0), model, rows())


MODULE = types.ModuleType("user_settings")


@hostile(limit=AT_RUN_TIME)
def test_a_number_in_a_module_of_the_users_is_obeyed(run):
    MODULE.factor = 1.0
    changed(run, lambda m: setattr(MODULE, "factor", 2.0), reading(lambda: MODULE.factor), rows())


@hostile(limit=AT_RUN_TIME)
def test_a_function_in_a_module_of_the_users_is_obeyed(run):
    MODULE.factor = lambda: 1.0
    change = lambda m: setattr(MODULE, "factor", lambda: 2.0)  # noqa: E731
    changed(run, change, reading(lambda: MODULE.factor()), rows())


class Machine:
    def __init__(self):
        self.factor = 1.0

    def __call__(self):
        return self.factor


MACHINE = Machine()


@hostile(limit=AT_RUN_TIME)
def test_an_object_in_a_global_is_obeyed(run):
    MACHINE.factor = 1.0
    changed(run, lambda m: setattr(MACHINE, "factor", 2.0), reading(lambda: MACHINE()), rows())


def global_scale():
    return 1.0


@hostile
def test_a_global_function_replaced_is_called(run, monkeypatch):
    with monkeypatch.context() as patched:
        changed(
            run, lambda m: patched.setitem(globals(), "global_scale", lambda: 2.0),
            reading(lambda: global_scale()), rows(),
        )  # fmt: skip


@hostile
def test_the_defaults_of_a_function_are_obeyed(run):
    def read(factor=1.0):
        return factor

    changed(run, lambda m: setattr(read, "__defaults__", (2.0,)), reading(read), rows())


@hostile(limit=AT_RUN_TIME)
def test_an_attribute_of_a_function_is_obeyed(run):
    def read():
        return read.factor

    read.factor = 1.0
    changed(run, lambda m: setattr(read, "factor", 2.0), reading(read), rows())


@hostile
def test_a_partial_as_a_setting_that_is_replaced_is_called(run):
    def read(factor):
        return factor

    changed(
        run, lambda m: setattr(m.early, "read", functools.partial(read, 2.0)),
        reading(functools.partial(read, 1.0)), rows(),
    )  # fmt: skip


@hostile(limit=AT_RUN_TIME)
def test_a_list_in_a_partial_is_obeyed(run):
    factors = [1.0]
    read = functools.partial(lambda f: f[0], factors)
    changed(run, lambda m: factors.__setitem__(0, 2.0), reading(read), rows())


@hostile
def test_a_bound_method_of_an_object_is_obeyed(run):
    machine = Machine()
    changed(run, lambda m: setattr(machine, "factor", 2.0), reading(machine.__call__), rows())


@hostile
def test_a_callable_object_as_a_setting_is_obeyed(run):
    machine = Machine()
    changed(run, lambda m: setattr(machine, "factor", 2.0), reading(machine), rows())


@hostile
def test_a_closure_in_a_closure_is_obeyed(run):
    factor = 1.0

    def inner():
        return factor

    def outer():
        return inner()

    def change(model):
        nonlocal factor
        factor = 2.0

    changed(run, change, reading(outer), rows())


@hostile(limit=AT_RUN_TIME)
def test_an_object_in_a_closure_is_obeyed(run):
    config = types.SimpleNamespace(deep=types.SimpleNamespace(factor=1.0))
    changed(
        run, lambda m: setattr(config.deep, "factor", 2.0), reading(lambda: config.deep.factor),
        rows(),
    )  # fmt: skip


@hostile
def test_a_frozen_dataclass_replaced_is_obeyed(run):
    @dataclasses.dataclass(frozen=True)
    class Config:
        factor: float = 1.0

    model = reading(None)
    model.early.config = Config()
    model.early.read = lambda: model.early.config.factor
    changed(run, lambda m: setattr(m.early, "config", Config(2.0)), model, rows())


@hostile(limit=AT_RUN_TIME)
def test_the_class_of_a_setting_swapped_is_obeyed(run):
    class One:
        def __call__(self):
            return 1.0

    class Two(One):
        def __call__(self):
            return 2.0

    one = One()
    changed(run, lambda m: setattr(one, "__class__", Two), reading(one), rows())


@hostile(limit=AT_RUN_TIME)
def test_an_operator_of_a_class_replaced_is_called(run):
    class One:
        def __call__(self):
            return 1.0

    changed(run, lambda m: setattr(One, "__call__", lambda self: 2.0), reading(One()), rows())


@hostile
def test_a_table_keyed_by_name_is_obeyed(run):
    table = {"tanh": torch.tanh, "relu": torch.relu}

    class Named(Net):
        act = "tanh"

        def front(self, x):
            return self.middle(table[self.act](self.early(x)))

    changed(run, lambda m: setattr(m, "act", "relu"), Named(), rows())


@hostile
def test_a_function_in_a_table_replaced_is_called(run):
    table = {"act": torch.tanh}

    class Named(Net):
        def front(self, x):
            return self.middle(table["act"](self.early(x)))

    changed(run, lambda m: table.update(act=torch.relu), Named(), rows())


@hostile
def test_an_activation_kept_as_an_attribute_of_the_model_replaced_is_called(run):
    class Acting(Net):
        def __init__(self):
            super().__init__()
            self.act = torch.tanh

        def front(self, x):
            return self.middle(self.act(self.early(x)))

    changed(run, lambda m: setattr(m, "act", torch.relu), Acting(), rows())


@hostile
def test_the_code_of_a_method_swapped_in_place_is_run(run):
    class Own(Net):
        def front(self, x):
            return self.middle(torch.tanh(self.early(x)))

    def other(self, x):
        return self.middle(torch.relu(self.early(x)))

    # `__code__` as live reloading (IPython's autoreload) does it.
    changed(run, lambda m: setattr(Own.front, "__code__", other.__code__), Own(), rows())


@hostile
def test_a_class_reloaded_is_another(run):
    class One(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    class Two(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    One.__qualname__ = Two.__qualname__ = "One"
    model = Net()
    model.early = One(6, 8)
    changed(run, lambda m: setattr(m.early, "__class__", Two), model, rows())


@hostile
def test_a_module_that_is_no_child_but_in_a_list_may_change(run):
    hidden = nn.Linear(8, 8).requires_grad_(False)

    class Hiding(Net):
        def __init__(self):
            super().__init__()
            self.extras = [hidden]

        def front(self, x):
            return self.middle(self.extras[0](torch.tanh(self.early(x))))

    changed(run, lambda m: m.extras.__setitem__(0, nn.Identity()), Hiding(), rows())


@hostile(limit=AT_RUN_TIME)
def test_weights_of_a_module_that_is_no_child_are_used(run):
    hidden = nn.Linear(8, 8).requires_grad_(False)

    class Hiding(Net):
        def __init__(self):
            super().__init__()
            self.early.extras = [hidden]

        def front(self, x):
            return self.middle(self.early.extras[0](torch.tanh(self.early(x))))

    def change(model):
        with torch.no_grad():
            model.early.extras[0].weight.mul_(-1)

    changed(run, change, Hiding(), rows())


@hostile(limit=AT_RUN_TIME)
def test_a_module_hidden_in_a_lambda_is_used(run):
    hidden = nn.Linear(8, 8).requires_grad_(False)
    model = reading(lambda: hidden.weight.sum())

    def change(model):
        with torch.no_grad():
            hidden.weight.mul_(-1)

    changed(run, change, model, rows())


@hostile(limit=AT_RUN_TIME)
def test_an_attribute_of_a_module_hidden_in_a_lambda_is_used(run):
    hidden = nn.Linear(8, 8)
    hidden.factor = 1.0
    changed(run, lambda m: setattr(hidden, "factor", 2.0), reading(lambda: hidden.factor), rows())


@hostile(limit=AT_RUN_TIME)
def test_a_trained_module_hidden_in_the_front_trains(run):
    model = Net()
    model.early.extras = [nn.Linear(8, 8)]
    plain = model.early.forward
    model.early.forward = lambda x: model.early.extras[0](plain(x))
    model = run.freeze(model)
    optimizer = torch.optim.SGD(
        [*model.late.parameters(), *model.head.parameters(), *model.early.extras[0].parameters()],
        0.2,
    )
    run.fit(model, run.loader(rows()), 3, optimizer=optimizer)
    run.see(model.early.extras[0])


# ---- containers -------------------------------------------------------------------------------


class Contained(Net):
    def __init__(self, container):
        super().__init__()
        self.early = nn.Linear(6, 8)
        self.middle = container


class ListFront(Net):
    def __init__(self):
        super().__init__()
        self.middle = nn.Identity()
        self.early = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)])

    def front(self, x):
        for layer in self.early:
            x = torch.tanh(layer(x))
        return self.middle(x)


LISTS = {
    "replaced": lambda ls: ls.__setitem__(1, nn.Linear(8, 8).requires_grad_(False)),
    "deleted": lambda ls: ls.__delitem__(1),
    "appended": lambda ls: ls.append(nn.Linear(8, 8).requires_grad_(False)),
    "inserted": lambda ls: ls.insert(1, nn.Linear(8, 8).requires_grad_(False)),
    "extended": lambda ls: ls.extend([nn.Linear(8, 8).requires_grad_(False)]),
    "popped": lambda ls: ls.pop(2),
    "replaced by a trained one": lambda ls: ls.__setitem__(1, nn.Linear(8, 8)),
    "swapped": lambda ls: ls._modules.update({"1": ls[2], "2": ls[1]}),
}


@hostile
@pytest.mark.parametrize("how", LISTS)
def test_a_list_of_layers_that_the_model_walks_may_change(run, how):
    changed(run, lambda m: LISTS[how](m.early), ListFront(), rows())


@hostile
@pytest.mark.parametrize("key", ["b", "a"])
def test_a_dict_of_layers_chosen_by_an_attribute(run, key):
    class Chosen(Net):
        def __init__(self):
            super().__init__()
            self.early = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(6, 8)})
            self.chosen = "a"

        def front(self, x):
            return self.middle(torch.tanh(self.early[self.chosen](x)))

    changed(run, lambda m: setattr(m, "chosen", key), Chosen(), rows())


@hostile
def test_a_parameter_list_of_the_front_may_change(run):
    class Listed(Net):
        def __init__(self):
            super().__init__()
            self.biases = nn.ParameterList([torch.zeros(8), torch.ones(8)]).requires_grad_(False)

        def front(self, x):
            return self.middle(torch.tanh(self.early(x) + sum(self.biases)))

    def change(model):
        model.biases[1] = nn.Parameter(torch.full((8,), -2.0), requires_grad=False)

    changed(run, change, Listed(), rows())


@hostile
def test_a_parameter_dict_of_the_front_that_grows(run):
    class Listed(Net):
        def __init__(self):
            super().__init__()
            self.biases = nn.ParameterDict({"a": torch.ones(8)}).requires_grad_(False)

        def front(self, x):
            return self.middle(torch.tanh(self.early(x) + sum(self.biases.values())))

    def change(model):
        model.biases["b"] = nn.Parameter(torch.full((8,), -2.0), requires_grad=False)

    changed(run, change, Listed(), rows())


# ---- ties, buffers, utilities of torch --------------------------------------------------------


@hostile
def test_weights_of_the_front_tied_to_the_head_in_mid_run(run):
    def change(model):
        model.middle.weight = model.late.weight

    changed(run, change, Net(), rows())


@hostile
def test_weights_of_the_head_untied_in_mid_run(run):
    model = Net()
    model.late.weight = model.middle.weight

    def change(model):
        model.late.weight = nn.Parameter(model.late.weight.detach().clone())

    changed(run, change, model, rows())


@hostile
def test_a_buffer_that_joins_later_and_is_read_by_the_model(run):
    class Shifted(Net):
        def front(self, x):
            h = self.early(x)
            shift = getattr(self, "shift", None)
            return self.middle(h if shift is None else h + shift)

    changed(run, lambda m: m.register_buffer("shift", torch.full((8,), 2.0)), Shifted(), rows())


@hostile
def test_a_none_buffer_that_is_filled(run):
    class Shifted(Net):
        def __init__(self):
            super().__init__()
            self.early.register_buffer("shift", None)

        def front(self, x):
            h = self.early(x)
            return self.middle(h if self.early.shift is None else h + self.early.shift)

    changed(run, lambda m: setattr(m.early, "shift", torch.full((8,), 2.0)), Shifted(), rows())


@hostile
def test_a_bias_set_to_none_is_gone(run):
    model = Net()
    with torch.no_grad():
        model.early.bias.add_(2)
    changed(run, lambda m: setattr(m.early, "bias", None), model, rows())


@hostile
def test_a_masked_weight_by_prune_made_permanent(run):
    model = Net()
    prune.l1_unstructured(model.early, "weight", 0.5)
    changed(run, lambda m: prune.remove(m.early, "weight"), model, rows())


@hostile
def test_a_lora_merged_into_the_front(run):
    model = Net()
    model.early.requires_grad_(False)
    delta = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))

    class Merge(nn.Module):
        def forward(self, weight):
            return weight + delta

    def change(model):
        parametrize.register_parametrization(model.early, "weight", Merge())
        parametrize.remove_parametrizations(model.early, "weight")

    changed(run, change, model, rows())


@hostile
def test_spectral_norm_joins_the_front(run):
    change = lambda m: nn.utils.parametrizations.spectral_norm(m.early)  # noqa: E731
    changed(run, change, Net(), rows())


@hostile
def test_weight_norm_trained_in_the_front_after_thawing_its_gain(run):
    model = Net()
    nn.utils.parametrizations.weight_norm(model.early)

    def change(model):
        model.early.parametrizations.weight.original0.requires_grad_(True)

    changed(run, change, model, rows())


@hostile
def test_an_averaged_model_beside_it_is_right(run):
    model = run.freeze(Net())
    averaged = swa_utils.AveragedModel(model)
    loader, optimizer = run.loader(rows()), sgd(model)
    schedule = swa_utils.SWALR(optimizer, 0.05)
    for _ in range(3):
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y), optimizer)
        averaged.update_parameters(model)
        schedule.step()
        with torch.no_grad():
            for x, _ in loader:
                run.see(averaged(x).sum())
    run.see(averaged)


@hostile
def test_update_bn_of_an_averaged_model(run):
    model = run.freeze(ConvNet(), "body")
    loader = run.loader(images())
    run.fit(model, loader, 2)
    averaged = swa_utils.AveragedModel(model)
    swa_utils.update_bn(loader, averaged)
    run.see(averaged)
    run.fit(model, loader, 1)


@hostile
def test_averages_copied_into_the_model(run):
    model = run.freeze(Net())
    averaged = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )

    def each_epoch(epoch):
        averaged.update_parameters(model)
        if epoch == 2:
            model.load_state_dict(averaged.module.state_dict())

    run.fit(model, run.loader(rows()), 4, each_epoch=each_epoch)


@hostile
def test_stubs_of_quantisation_are_served_or_told(run):
    class Stubbed(Net):
        def __init__(self):
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x):
            return self.dequant(self.back(self.front(self.quant(x))))

    trained(run, model=Stubbed())


@hostile
def test_functional_call_with_the_models_own_weights(run):
    def loss(model, batch):
        own = dict(model.named_parameters())
        return F.cross_entropy(torch.func.functional_call(model, own, (batch[0],)), batch[1])

    trained(run, loss)


@hostile
def test_functional_call_with_a_front_that_drifts(run):
    steps = iter(range(1000))

    def loss(model, batch):
        scale = 1 + 0.1 * (next(steps) // 3)
        own = {name: p * scale for name, p in model.named_parameters() if "early" in name}
        return F.cross_entropy(torch.func.functional_call(model, own, (batch[0],)), batch[1])

    trained(run, loss)


@hostile
def test_stateless_call_with_another_front(run):
    def loss(model, batch):
        own = {name: p + 0.5 for name, p in model.named_parameters() if "early" in name}
        other = torch.func.functional_call(model, own, (batch[0],))
        return F.cross_entropy(other + model(batch[0]), batch[1])

    trained(run, loss)
    assert stateless


@hostile
def test_parameters_swapped_as_vector(run):
    def change(model):
        vector = nn.utils.parameters_to_vector(model.early.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.early.parameters())

    changed(run, change, Net(), rows())


@hostile
def test_weights_written_through_storage(run):
    def change(model):
        model.early.weight.untyped_storage().copy_((model.early.weight * 3).untyped_storage())

    with torch.no_grad():
        changed_later = change
    changed(run, lambda m: torch.no_grad()(changed_later)(m), Net(), rows())


@hostile
def test_weights_set_to_another_storage(run):
    def change(model):
        with torch.no_grad():
            model.early.weight.set_((model.early.weight * 3).clone())

    changed(run, change, Net(), rows())


@hostile
def test_weights_swapped_by_swap_tensors(run):
    def change(model):
        other = nn.Parameter(model.early.weight.detach() * 3, requires_grad=False)
        torch.utils.swap_tensors(model.early.weight, other)

    changed(run, change, Net(), rows())


@hostile
def test_loading_with_assign_is_used(run):
    def change(model):
        state = {k: v.clone() * (2 if "early" in k else 1) for k, v in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            state[name] = nn.Parameter(state[name], parameter.requires_grad)
        model.load_state_dict(state, assign=True)

    changed(run, change, Net(), rows())


@hostile
def test_loading_with_assign_a_front_that_trains(run):
    """`assign=True` keeps `requires_grad` of what it finds."""

    def change(model):
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)

    changed(run, change, Net(), rows())


# ---- modes and defaults -----------------------------------------------------------------------


@hostile(served=True)
def test_another_default_dtype_for_what_the_front_makes(run):
    class Making(Net):
        def front(self, x):
            ones = torch.full((8,), 1 / 3).double() * 3e7
            return self.middle(torch.tanh(self.early(x)) * (ones - 1e7 + 1).float())

    model = run.freeze(Making())
    try:
        run.fit(
            model, run.loader(rows()), 4,
            each_epoch=lambda epoch: torch.set_default_dtype(
                torch.float64 if epoch == 1 else torch.float32
            ),
        )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)


@hostile
def test_autocast_nested_in_the_front(run):
    class Mixed(Net):
        def front(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.early(x)
                with torch.autocast("cpu", enabled=False):
                    return self.middle(torch.tanh(h.float()))

    trained(run, model=Mixed())


@hostile(served=True)
def test_autocast_in_one_epoch_alone_with_slices(run):
    model, switch = run.freeze(Net()), [False]

    def loss(model, batch):
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=switch[0]):
            out = torch.cat([model(x[:4]), model(x[4:])])
        return F.cross_entropy(out.float(), y)

    def each_epoch(epoch):
        switch[0] = epoch == 1

    run.fit(model, run.loader(rows()), 4, loss=loss, each_epoch=each_epoch)


@hostile(served=True)
def test_autocast_in_one_epoch_alone(run):
    model, switch = run.freeze(Net()), [False]

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=switch[0]):
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    def each_epoch(epoch):
        switch[0] = epoch == 1

    run.fit(model, run.loader(rows()), 4, loss=loss, each_epoch=each_epoch)


@hostile
def test_autocast_of_another_kind_every_epoch(run):
    model = run.freeze(Net())
    kind = [torch.float32]

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind[0] is not torch.float32):
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    def each_epoch(epoch):
        kind[0] = (torch.float32, torch.bfloat16)[epoch % 2]

    run.fit(model, run.loader(rows()), 4, loss=loss, each_epoch=each_epoch)


@hostile(limit=AT_RUN_TIME)
def test_a_flag_of_torch_that_the_front_asks_for(run):
    class Asking(Net):
        def front(self, x):
            factor = 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0
            return self.middle(torch.tanh(self.early(x)) * factor)

    try:
        changed(run, lambda m: torch.use_deterministic_algorithms(True), Asking(), rows())
    finally:
        torch.use_deterministic_algorithms(False)


@hostile(limit=AT_RUN_TIME)
def test_an_environment_variable_that_the_front_asks_for(run, monkeypatch):
    import os

    class Asking(Net):
        def front(self, x):
            return self.middle(self.early(x) * float(os.environ.get("SCALE", "1")))

    with monkeypatch.context() as patched:
        changed(run, lambda m: patched.setenv("SCALE", "3"), Asking(), rows())
        patched.delenv("SCALE", raising=False)


@hostile
def test_a_front_with_a_no_grad_decorator_is_served(run):
    class Decorated(Net):
        @torch.no_grad()
        def front(self, x):
            return self.middle(torch.tanh(self.early(x)))

    trained(run, model=Decorated())


@hostile
def test_a_front_with_a_no_grad_decorator_that_is_taken_off(run):
    class Decorated(Net):
        @torch.no_grad()
        def front(self, x):
            return self.middle(torch.tanh(self.early(x)))

    def change(model):
        Decorated.front = Net.front
        model.early.requires_grad_(True)

    changed(run, change, Decorated(), rows())


@hostile
def test_half_then_float_again(run):
    def each_epoch(epoch):
        model.early.to(torch.bfloat16 if epoch == 1 else torch.float32)

    class Casting(Net):
        def front(self, x):
            return self.middle(self.early(x.to(self.early.weight.dtype)).float())

    model = run.freeze(Casting())
    run.fit(model, run.loader(rows()), 4, each_epoch=each_epoch)


@hostile
def test_a_front_put_to_another_model_goes_on(run):
    """The frozen trunk is taken over by a second model that replaces the first."""
    first = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(first, loader, 2)
    second = Net()
    second.early, second.middle = first.early, first.middle
    run.turn()
    run.fit(second, loader, 2)


@hostile
def test_a_model_pickled_and_loaded_takes_its_place(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    other = pickle.loads(pickle.dumps(model))
    run.see(other)
    other = run.freeze(other)
    run.turn()
    run.fit(other, run.loader(rows()), 2)


@hostile
def test_a_model_saved_whole_and_loaded_takes_its_place(run):
    model = run.freeze(Net())
    run.fit(model, run.loader(rows()), 2)
    other = run.freeze(torch.load(saved(model), weights_only=False))
    run.turn()
    run.fit(other, run.loader(rows()), 2)


@hostile
def test_a_deep_copy_whose_front_is_written_leaves_the_model_alone(run):
    model = run.freeze(Net())
    loader, optimizer = run.loader(rows()), sgd(model)
    for epoch in range(3):
        if epoch == 1:
            other = copy.deepcopy(model)
            with torch.no_grad():
                other.early.weight.zero_()
            other.requires_grad_(True)
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y), optimizer)
            if epoch >= 1:
                run.see(other(x).sum())


@hostile
def test_an_adapter_wraps_the_whole_model_in_mid_run(run):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.extra = inner, nn.Linear(3, 3)

        def forward(self, x):
            return self.extra(self.inner(x))

    model = run.freeze(Net())
    loader = run.loader(rows())
    run.fit(model, loader, 2)
    run.turn()
    run.fit(Wrapped(model), loader, 2)


@hostile
def test_an_adapter_in_a_transformer_block_trains(run):
    def change(model):
        model.block.dropout2 = nn.Sequential(model.block.dropout2, Residual())

    changed(run, change, Tokens(), sentences(), boundary="block")


@hostile
def test_compiled_blocks_joined_in_mid_run(run):
    def change(model):
        model.early.compile(backend="eager")

    changed(run, change, Net(), rows())


@hostile
def test_a_compiled_head_is_right(run):
    model = Net()
    model.late.compile(backend="eager")
    trained(run, model=model)
