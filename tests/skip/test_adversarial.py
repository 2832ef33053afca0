"""Models made to be skipped wrongly: each gives the plain numbers, or is refused by name."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.skip_harness import assert_same_run
from tests.helpers.skip_models import BATCHES, DATA, Base, call, harness_of


def run(cls, *, call=call):
    harness = harness_of(cls)
    for p in ("scale", "token"):
        if hasattr(harness.model, p) and cls is not FrozenToken:
            assert getattr(harness.model, p).requires_grad
    assert_same_run(harness, call, BATCHES * 3)
    return harness


def skipped(cls, **kwargs):
    harness = run(cls, **kwargs)
    assert harness.host.refusals == []
    assert harness.host.num_loads == 6
    return harness


def refused(cls, *words, **kwargs):
    harness = run(cls, **kwargs)
    assert harness.host.num_loads == 0
    (error,) = harness.host.refusals
    for word in words:
        assert word in str(error)
    return harness


# ---- the prefix is not a function of the sample -----------------------------------------------


class InBatchNegatives(Base):
    def forward(self, x):
        h = self.middle(self.early(x)).mean(1)
        return self.finish((h @ h.T).softmax(0)[:, :, None].expand(-1, -1, 6))


class InBatchPrefix(Base):
    def forward(self, x):
        h = self.early(x)
        flat = h.flatten(1)
        mixed = (flat @ flat.T).softmax(1) @ flat
        return self.finish(self.middle(mixed.view_as(h)))


class Noise(Base):
    def forward(self, x):
        h = self.early(x)
        return self.finish(self.middle(h + torch.randn_like(h)))


class PythonNoise(Base):
    def forward(self, x):
        return self.finish(self.middle(self.early(x) * random.random()))


class Recurrent(Base):
    hidden = 0.0

    def forward(self, x):
        h = self.early(x) + self.hidden
        self.hidden = h.mean().detach()
        return self.finish(self.middle(h))


class Counter(Base):
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return self.finish(self.middle(self.early(x) / self.num_calls))


class BranchOnBatch(Base):
    def forward(self, x):
        h = self.early(x)
        if x.mean() > 0:
            h = -h
        return self.finish(self.middle(h))


@pytest.mark.parametrize(
    "cls", [InBatchPrefix, Noise, PythonNoise, Recurrent, Counter, BranchOnBatch]
)
def test_a_prefix_that_is_no_function_of_the_sample_is_refused(cls):
    refused(cls, "middle")


def test_samples_may_mix_after_the_boundary():
    skipped(InBatchNegatives)


# ---- something goes around the boundary -------------------------------------------------------


class Stash(Base):
    def forward(self, x):
        h = self.early(x)
        self.late.stash = h
        return self.finish(self.middle(h)) + self.late.stash.mean(1)[:, :3]


GLOBAL = []
STASHES = {  # how a frozen module keeps what it has computed, and how the head finds it
    "attribute": (lambda m, h: setattr(m, "aux", h), lambda m: m.aux),
    "container": (lambda m, h: m.kept.update(aux=h), lambda m: m.kept["aux"]),
    "global": (lambda m, h: GLOBAL.append(h), lambda m: GLOBAL[-1]),
}


class Stashing(nn.Linear):
    keep = None

    def __init__(self):
        super().__init__(6, 6)
        self.kept = {}

    def forward(self, x):
        h = super().forward(x)
        self.keep(h)
        return h


def stash_in(place):
    keep, find = STASHES[place]

    class StashInside(Base, early=type("Stashing", (Stashing,), {"keep": keep})):
        def forward(self, x):
            h = self.middle(self.early(x))
            return self.finish(h) + find(self.early).mean(1)[:, :3]

    return StashInside


class Mutating(nn.Linear):
    def forward(self, x, scale):
        scale.mul_(3)
        return super().forward(x)


class MutatedInput(Base, middle=lambda: Mutating(6, 6)):
    def forward(self, x):
        scale = torch.ones(6)
        h = self.middle(self.early(x), scale)
        return self.finish(h * scale)


@pytest.mark.parametrize("cls", [*map(stash_in, STASHES), MutatedInput])
def test_a_way_around_the_boundary_is_refused(cls):
    refused(cls, "middle")


def test_glue_code_may_hand_things_around_the_boundary():
    harness = skipped(Stash)
    assert set(harness.engine.cut.tensors) == {"early", "middle"}


# ---- in-place operations ----------------------------------------------------------------------


class InPlaceAfter(Base):
    def forward(self, x):
        h = self.middle(self.early(x))
        h.mul_(2)
        h += 1
        return self.finish(F.relu_(h))


class InPlaceEarly(Base):
    """The skip connection is overwritten before the boundary returns."""

    def forward(self, x):
        skip = self.early(x)
        h = self.middle(F.relu_(skip))
        return self.finish(h + skip)


class InPlaceInput(Base):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = 0
        return self.finish(self.middle(self.early(x)) + x)


class InPlaceBuffer(Base):
    def forward(self, x):
        canvas = x.new_zeros(len(x), 4, 6)
        canvas[:, 1:] = self.early(x)[:, 1:]
        return self.finish(self.middle(canvas))


def test_writing_into_the_cached_tensor_does_no_harm():
    harness = skipped(InPlaceAfter)
    rows = harness.host.stored[harness.engine.cut]
    with torch.no_grad():
        fresh = harness.model.middle(harness.model.early(DATA["x"]))
    for i in range(24):
        assert torch.equal(rows[i]["middle"], fresh[i])


@pytest.mark.parametrize("cls", [InPlaceEarly, InPlaceInput, InPlaceBuffer])
def test_writes_before_the_boundary_are_right_or_refused(cls):
    run(cls)


# ---- parameters -------------------------------------------------------------------------------


class Token(Base, token=lambda: nn.Parameter(torch.randn(1, 1, 6))):
    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), self.early(x)], 1)
        return self.finish(self.middle(h))


class FrozenToken(Token, token=lambda: nn.Parameter(torch.randn(1, 1, 6), False)):
    pass


class SideToken(Token):
    """Trained, computed before the boundary, used only after it."""

    def forward(self, x):
        token = torch.tanh(self.token)
        return self.finish(self.middle(self.early(x)) * token)


class Tied(Base):
    def forward(self, x):
        h = self.middle(self.early(x))
        return self.finish(h @ self.early.weight.T)


class Functional(Base):
    """Uses a frozen module's weights without calling it."""

    def forward(self, x):
        return self.finish(self.middle(F.linear(x, self.early.weight, self.early.bias)))


class SideNetwork(Base, side=lambda: nn.Linear(6, 6)):
    """A trained branch that runs before the boundary and joins after it (ladder tuning)."""

    def forward(self, x):
        h = self.early(x)
        side = self.side(h)
        return self.finish(self.middle(h) + side)


class SideIntoPrefix(SideNetwork):
    def forward(self, x):
        h = self.early(x)
        return self.finish(self.middle(h + self.side(h)))


class SideIntoPrefixUnseen(SideNetwork):
    def forward(self, x):
        h = self.early(x)
        with torch.no_grad():
            h = h + self.side(h)
        return self.finish(self.middle(h) + self.side(h))


@pytest.mark.parametrize("cls", [Token, SideIntoPrefix, SideIntoPrefixUnseen])
def test_a_trained_tensor_in_the_prefix_is_named(cls):
    refused(cls, "token" if "Token" in cls.__name__ else "side", "trainable")


@pytest.mark.parametrize("cls", [FrozenToken, SideToken, Tied, Functional, SideNetwork])
def test_what_does_not_reach_the_cut_may_be_trained(cls):
    harness = skipped(cls)
    if cls is FrozenToken:
        with torch.no_grad():
            harness.model.token.add_(1)
        assert_same_run(harness, call, BATCHES)
        assert len(harness.host.changes) == 1


# ---- shapes of calls --------------------------------------------------------------------------


class CalledTwice(Base):
    def forward(self, x):
        return self.finish(self.middle(self.early(self.middle(self.early(x)))))


class SharedAcross(Base):
    """The same frozen module runs before and after the boundary."""

    def forward(self, x):
        return self.finish(self.early(self.middle(self.early(x))))


class Swallowing(Base):
    def forward(self, x):
        try:
            h = self.middle(self.early(x))
        except Exception:
            h = x
        return self.finish(h)


class Frames(Base):
    """Folds a second dimension into the batch, as video and window attention do."""

    def forward(self, x):
        h = self.middle(self.early(x.flatten(0, 1)))
        return self.finish(h.view(len(x), 4, 6))


class BatchSecond(Base):
    def forward(self, x):
        return self.finish(self.middle(self.early(x.transpose(0, 1))).transpose(0, 1))


class Many(nn.Linear):
    def forward(self, x, *, scale):
        h = super().forward(x) * scale
        return {"a": h, "nested": (h.sigmoid(), None), "mask": h > 0, "count": 3, "unused": h * 2}


class Several(Base, middle=lambda: Many(6, 6)):
    def forward(self, x):
        out = self.middle(self.early(x), scale=2.0)
        h = out["a"] * out["mask"] + out["nested"][0] + out["count"]
        return self.finish(h)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    early: torch.Tensor


class ReturnsObject(Base):
    def forward(self, x):
        h = self.early(x)
        return Output(self.finish(self.middle(h)), h)


class ReturnsEarly(Base):
    def forward(self, x):
        h = self.early(x)
        return self.finish(self.middle(h)), [h, x]


class Positions(nn.Linear):
    def forward(self, x):
        return super().forward(torch.arange(x.shape[1], dtype=x.dtype)[:, None])


class Angles(nn.Module):
    def forward(self, x):
        return torch.arange(x.shape[1], device=x.device).to(x.dtype)[:, None].cos()


class Constant(Base, positions=lambda: Positions(1, 6).requires_grad_(False)):
    """Positions go around the boundary, and do not depend on the samples."""

    def forward(self, x):
        bias = self.positions(x)
        return self.finish(self.middle(self.early(x) + bias) * bias)


class Rotary(Constant, positions=Angles):
    pass


class Complex(Base):
    def forward(self, x):
        h = torch.fft.fft(self.middle(self.early(x)))
        return self.finish(h.real + h.imag)


@pytest.mark.parametrize(
    "cls",
    [CalledTwice, SharedAcross, Swallowing, Frames, BatchSecond, Several, Constant,
     Rotary, Complex],
)  # fmt: skip
def test_any_shape_of_call_is_skipped_rightly(cls):
    skipped(cls)


def test_only_what_is_read_of_the_boundarys_output_is_cached():
    harness = skipped(Several)
    assert set(harness.engine.cut.tensors) == {"middle:0", "middle:1", "middle:3"}


@pytest.mark.parametrize("cls", [ReturnsObject, ReturnsEarly])
def test_what_the_model_returns_of_its_prefix_is_cached_with_it(cls):
    def everything(model, batch):
        out = model(batch["x"])
        if isinstance(out, Output):
            return F.cross_entropy(out.logits, batch["y"]) + out.early.mean()
        return F.cross_entropy(out[0], batch["y"]) + out[1][0].mean() + out[1][1].std()

    skipped(cls, call=everything)


# ---- arguments that no loader vouches for -----------------------------------------------------


class Conditioned(Base):
    def forward(self, x, t):
        return self.finish(self.middle(self.early(x) + t))


class LateConditioned(Base):
    def forward(self, x, t):
        return self.finish(self.middle(self.early(x)) + t)


def with_argument(make):
    return lambda m, b: F.cross_entropy(m(b["x"], make(len(b["y"]))), b["y"])


def test_a_random_argument_of_the_prefix_is_not_mistaken_for_the_samples():
    harness = run(Conditioned, call=with_argument(lambda n: torch.randn(n, 1, 1)))
    assert harness.host.num_loads == 0
    assert harness.host.refusals


def test_a_random_argument_of_the_active_part_is_fine():
    skipped(LateConditioned, call=with_argument(lambda n: torch.randn(n, 1, 1)))


def test_a_constant_argument_of_the_prefix_is_fine():
    skipped(Conditioned, call=with_argument(lambda n: torch.ones(6)))
