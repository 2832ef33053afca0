"""Hooks, features that somebody keeps, attributes around the boundary, and plain arguments."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.skip_harness import assert_same, assert_same_run, step
from tests.helpers.skip_models import BATCHES, Base, call, harness_of


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


# ---- attributes and arguments -----------------------------------------------------------------


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
    setattr(harness.model.early.settings, key, value)
    assert (harness.engine._plans.guards[0].changed() is None) == is_served


# ---- shapes changed in place, and checkpointing ------------------------------------------------


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
