"""Hooks, features that somebody keeps, attributes around the boundary, and plain arguments."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from egeria_cache.skip.serve.call import Invocation
from tests.helpers.skip_harness import assert_same, assert_same_run, freeze, step
from tests.helpers.skip_models import BATCHES, DATA, Base, call, harness_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Net(Base, early=Block, middle=Block, late=Block):
    def forward(self, x):
        return self.head(self.late(self.middle(self.early(x))).mean(1))


def plan_of(harness):
    (plan,) = harness.engine._plans.all()
    return plan


# ---- hooks that read features -----------------------------------------------------------------


HOOKS = {
    "forward": lambda m, keep: m.register_forward_hook(lambda m, a, out: keep(out)),
    "kwargs": lambda m, keep: m.register_forward_hook(
        lambda m, a, k, out: keep(out), with_kwargs=True
    ),
    "pre": lambda m, keep: m.register_forward_pre_hook(lambda m, a: keep(a[0])),
    "always": lambda m, keep: m.register_forward_hook(
        lambda m, a, out: keep(out.clone()), always_call=True
    ),
}


@pytest.mark.parametrize("where", ["early", "early.one", "middle.two", "middle", "late", "head"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_the_user_reads_the_real_feature_once_a_step(where, kind):
    harness = harness_of(Net)
    plain = copy.deepcopy(harness.model)
    seen, theirs = [], []
    HOOKS[kind](harness.model.get_submodule(where), seen.append)
    HOOKS[kind](plain.get_submodule(where), theirs.append)
    assert_same_run(harness, call, BATCHES * 2, plain=plain)
    assert len(seen) == 6
    assert all(map(torch.equal, seen, theirs))
    assert harness.host.refusals == []
    assert harness.host.num_loads == 3


def test_weight_norm_is_no_hook_of_the_user():
    harness = harness_of(Net)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(harness.model.early.one)
    freeze(harness.model, "early")
    call(harness.model, harness.batch(BATCHES[0]))
    assert harness.host.refusals == []
    assert not plan_of(harness).steps[0].run


# ---- attributes and arguments -----------------------------------------------------------------


class Reading(Net):
    def __init__(self):
        super().__init__()
        self.scale, self.bias, self.unused, self.steps = 2.0, [1.0], 3, 0

    def forward(self, x):
        self.steps += 1
        h = self.middle(self.early(x * self.scale + self.bias[0]))
        return self.head(self.late(h).mean(1)) * self.unused


def test_the_names_that_code_around_the_boundary_reads_before_it_are_known():
    harness = harness_of(Reading)
    call(harness.model, harness.batch(BATCHES[0]))
    names = {"scale", "bias", "early", "middle"}
    assert plan_of(harness).attributes == {(id(harness.model), name) for name in names}
    assert type(harness.model) is Reading


class Settings:
    def __init__(self):
        self.scale, self.saved_as = 1.0, None


class Configured(Net):
    def __init__(self):
        super().__init__()
        self.early.settings = Settings()
        self.early.register_forward_hook(lambda m, i, o: o * m.settings.scale)


@pytest.mark.parametrize(("key", "value", "is_served"), [("saved_as", "x", True),
                                                         ("scale", 2.0, False)])  # fmt: skip
def test_of_an_object_that_modules_hold_what_is_read_counts(key, value, is_served):
    harness = harness_of(Configured)
    assert_same_run(harness, call, BATCHES)
    assert plan_of(harness).objects[id(harness.model.early.settings)] == {"scale"}
    setattr(harness.model.early.settings, key, value)
    assert (harness.engine._plans.guards()[0].changed() is None) == is_served


class Scheduled(Net):
    def forward(self, x, tau, gain=1.0, names=()):
        h = self.middle(self.early(x * gain))
        return self.head(self.late(h).mean(1)) / tau


def test_plain_arguments_that_the_prefix_does_not_use_are_free():
    harness = harness_of(Scheduled)

    def scheduled(model, batch, tau, gain=2.0):
        out = model(batch["x"], tau, gain=gain, names=["a", "b"])
        return F.cross_entropy(out, batch["y"])

    scheduled(harness.model, harness.batch(BATCHES[0]), 1.0)
    plan = plan_of(harness)
    paths = Invocation.of((DATA["x"], 1.0), {"gain": 2.0, "names": ["a", "b"]}).paths()
    assert {paths[i] for i in plan.free} == {
        "args[1]",
        "kwargs['names'][0]",
        "kwargs['names'][1]",
    }
    plain = copy.deepcopy(harness.model)
    for n, tau in enumerate([0.9, 0.8, 0.7]):
        assert torch.equal(
            scheduled(harness.model, harness.batch(BATCHES[0]), tau),
            scheduled(plain, harness.plain(BATCHES[0]), tau),
        )
        assert harness.host.num_loads == n + 1
    scheduled(harness.model, harness.batch(BATCHES[0]), 0.7, gain=3.0)
    assert harness.engine._plans._num_dry_runs == 2


# ---- shapes changed in place, and checkpointing ------------------------------------------------


class Unsqueezing(Net):
    def forward(self, x):
        x.unsqueeze_(1)
        h = self.middle(self.early(x.squeeze_(1)))
        return self.head(self.late(h).mean(1))


class Transposing(Net):
    def forward(self, x):
        h = self.early(x)
        h.transpose_(1, 2)
        h = h.transpose(1, 2)
        return self.head(self.late(self.middle(h)).mean(1))


@pytest.mark.parametrize("cls", [Unsqueezing, Transposing])
def test_shapes_changed_in_place_as_statements_are_followed(cls):
    harness = harness_of(cls)
    assert_same_run(harness, call, BATCHES * 2)
    assert harness.host.num_loads == 3 or harness.host.refusals


# ---- tensors that are passed on -----------------------------------------------------------------


class Passing(Block):
    def forward(self, x, **kwargs):
        return super().forward(x)


class Gated(Block):
    def forward(self, x, **kwargs):
        return super().forward(x) * (kwargs["count"] > 10)


class PassesOn(Net):
    """Gives every block all that it was called with, as causal language models do."""

    def __init__(self, middle):
        super().__init__()
        self.early, self.middle, self.late = Passing(), middle(), Passing()

    def forward(self, x, **kwargs):
        x = self.late(self.middle(self.early(x, **kwargs), **kwargs), **kwargs)
        return self.head(x.mean(1)) / kwargs["count"]


@pytest.mark.parametrize("middle", [Passing, Gated])
def test_a_tensor_that_the_prefix_only_passes_on_may_change(middle):
    harness = harness_of(lambda: PassesOn(middle))
    plain = copy.deepcopy(harness.model)
    for n, ids in enumerate(BATCHES * 3):

        def counted(model, batch, count=9.0 + n):
            out = model(batch["x"], count=torch.tensor(count))
            return F.cross_entropy(out, batch["y"])

        assert_same(
            step(harness.model, counted, harness.batch(ids), n),
            step(plain, counted, harness.plain(ids), n),
        )
    assert (harness.host.num_loads > 0) is (middle is Passing)
    assert bool(harness.host.refusals) is (middle is Gated)
