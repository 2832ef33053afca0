"""Models made to be skipped wrongly: each gives the plain numbers, or is refused by name.

Those that are no function of the sample: `hostile/test_proof.py`.
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from egeria_cache import BoundaryError
from tests.helpers.skip_harness import assert_same_run
from tests.helpers.skip_models import BATCHES, DATA, Base, call, harness_of


def of(forward, **parts):
    """Return a class of models: `forward(model, x)` is its code, beside other parts or more."""
    return type("Own", (Base,), {"forward": forward}, **parts)


def run(cls, *, call=call):
    harness = harness_of(cls)
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
    assert all(word in str(error) for word in words)


def plain(m, x):
    return m.middle(m.early(x))


def test_samples_may_mix_after_the_boundary():
    def negatives(m, x):
        h = plain(m, x).mean(1)
        return m.finish((h @ h.T).softmax(0)[:, :, None].expand(-1, -1, 6))

    skipped(of(negatives))


# ---- something goes around the boundary -------------------------------------------------------

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

    def forward(m, x):
        return m.finish(plain(m, x)) + find(m.early).mean(1)[:, :3]

    return of(forward, early=type("Stashing", (Stashing,), {"keep": keep}))


class Mutating(nn.Linear):
    def forward(self, x, scale):
        scale.mul_(3)
        return super().forward(x)


def mutated(m, x):
    return m.finish(m.middle(m.early(x), scale := torch.ones(6)) * scale)


WINDOWS = type("", (nn.Linear,), {"forward": lambda m, x: nn.Linear.forward(m, x).unfold(-1, 4, 2)})
MUTATED = of(mutated, middle=lambda: Mutating(6, 6))
SEEN = of(lambda m, x: m.finish(plain(m, x).flatten(2)[..., :6]), middle=lambda: WINDOWS(6, 6))


@pytest.mark.parametrize("cls", [*map(stash_in, STASHES), MUTATED, SEEN])
def test_a_way_around_the_boundary_is_refused(cls):
    refused(cls, "middle")


# ---- in-place operations ----------------------------------------------------------------------


def test_writing_into_the_cached_tensor_does_no_harm():
    def after(m, x):
        h = plain(m, x)
        h.mul_(2)
        h += 1
        return m.finish(F.relu_(h))

    harness = skipped(of(after))
    rows = harness.host.stored[harness.engine.cut]
    with torch.no_grad():
        fresh = plain(harness.model, DATA["x"])
    assert all(torch.equal(rows[i]["middle"], fresh[i]) for i in range(24))


# ---- parameters -------------------------------------------------------------------------------

SIDE = {"side": lambda: nn.Linear(6, 6)}


def token(trains=True):
    return {"token": lambda: nn.Parameter(torch.randn(1, 1, 6), trains)}


EVEN = {"token": lambda: nn.Parameter(torch.ones(1, 1, 6))}
"""As it begins it prefers none; larger or smaller as a whole, it would not either."""


def with_a_token(m, x):
    return m.finish(m.middle(torch.cat([m.token.expand(len(x), -1, -1), m.early(x)], 1)))


def side_into_the_prefix(m, x, seen=True):
    h = m.early(x)
    with torch.set_grad_enabled(seen):
        h = h + m.side(h)
    return m.finish(m.middle(h) + (0 if seen else m.side(h)))


def chosen_by_a_token(m, x):
    """Trained by the head; before the boundary it moves an index, which has no gradient."""
    h = m.early(x)
    h = m.middle(h * (1 + (h * m.token[0]).argmax(-1, keepdim=True)))
    return m.finish(h) * m.token.sum()


def side_network(m, x):
    """A trained branch that runs before the boundary and joins after it (ladder tuning)."""
    side = m.side(h := m.early(x))
    return m.finish(m.middle(h) + side)


def side_token(m, x):
    """Trained, computed before the boundary, used only after it."""
    side = torch.tanh(m.token)
    return m.finish(plain(m, x) * side)


def compared_with_a_token(m, x):
    h = m.early(x)
    return m.finish(m.middle(h * (1 + (h * m.token > 0.3)))) * m.token.sum()


TRAINED = {
    "compared": (compared_with_a_token, token(), "token"),
    "token": (with_a_token, token(), "token"),
    "side": (side_into_the_prefix, SIDE, "side"),
    "side, unseen": (lambda m, x: side_into_the_prefix(m, x, False), SIDE, "side"),
    "an index": (chosen_by_a_token, EVEN, "token"),
    "a number": (
        lambda m, x: m.finish(m.middle(m.early(x) * m.token.sum().item())), token(), "token"
    ),
}  # fmt: skip


@pytest.mark.cases(6)
@pytest.mark.parametrize(("forward", "parts", "name"), TRAINED.values(), ids=TRAINED)
def test_a_trained_tensor_in_the_prefix_is_named(forward, parts, name):
    refused(of(forward, **parts), name, "trainable")


NOT_IN_THE_CUT = {
    "a frozen token": (with_a_token, token(trains=False)),
    "a token of the head": (side_token, token()),
    "tied": (lambda m, x: m.finish(plain(m, x) @ m.early.weight.T), {}),
    # Uses a frozen module's weights without calling it.
    "functional": (lambda m, x: m.finish(m.middle(F.linear(x, m.early.weight, m.early.bias))), {}),
    "a side network": (side_network, SIDE),
}


@pytest.mark.parametrize("what", NOT_IN_THE_CUT)
def test_what_does_not_reach_the_cut_may_be_trained(what):
    forward, parts = NOT_IN_THE_CUT[what]
    harness = skipped(of(forward, **parts))
    if what == "a frozen token":
        with torch.no_grad():
            harness.model.token.add_(1)
        assert_same_run(harness, call, BATCHES)
        assert len(harness.host.changes) == 1


# ---- shapes of calls --------------------------------------------------------------------------


def swallowing(m, x):
    try:
        h = plain(m, x)
    except Exception:
        h = x
    return m.finish(h)


class Many(nn.Linear):
    def forward(self, x, *, scale):
        h = super().forward(x) * scale
        return {"a": h, "nested": (h.sigmoid(), None), "mask": h > 0, "count": 3, "unused": h * 2}


def several(m, x):
    out = m.middle(m.early(x), scale=2.0)
    return m.finish(out["a"] * out["mask"] + out["nested"][0] + out["count"])


class Positions(nn.Linear):
    def forward(self, x):
        return super().forward(torch.arange(x.shape[1], dtype=x.dtype)[:, None])


class Angles(nn.Module):
    def forward(self, x):
        return torch.arange(x.shape[1], device=x.device).to(x.dtype)[:, None].cos()


def with_positions(m, x):
    """Positions go around the boundary, and do not depend on the samples."""
    bias = m.positions(x)
    return m.finish(m.middle(m.early(x) + bias) * bias)


def of_complex_numbers(m, x):
    h = torch.fft.fft(plain(m, x))
    return m.finish(h.real + h.imag)


SEVERAL = {"middle": lambda: Many(6, 6)}
CALLS = {
    "called twice": (lambda m, x: m.finish(plain(m, plain(m, x))), {}),
    "shared across": (lambda m, x: m.finish(m.early(plain(m, x))), {}),
    "swallowing": (swallowing, {}),
    # Folds a second dimension into the batch, as video and window attention do.
    "frames": (lambda m, x: m.finish(plain(m, x.flatten(0, 1)).view(len(x), 4, 6)), {}),
    "the batch second": (lambda m, x: m.finish(plain(m, x.transpose(0, 1)).transpose(0, 1)), {}),
    "several": (several, SEVERAL),
    "constant": (with_positions, {"positions": lambda: Positions(1, 6).requires_grad_(False)}),
    "rotary": (with_positions, {"positions": Angles}),
    "complex": (of_complex_numbers, {}),
}


@pytest.mark.parametrize(("forward", "parts"), CALLS.values(), ids=CALLS)
def test_any_shape_of_call_is_skipped_rightly(forward, parts):
    skipped(of(forward, **parts))


def test_only_what_is_read_of_the_boundarys_output_is_cached():
    harness = skipped(of(several, **SEVERAL))
    assert set(harness.engine.cut.tensors) == {"middle:0", "middle:1", "middle:3"}


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    early: torch.Tensor


@pytest.mark.parametrize(
    "make", [lambda out, h, x: Output(out, h), lambda out, h, x: (out, [h, x])]
)
def test_what_the_model_returns_of_its_prefix_is_cached_with_it(make):
    def everything(model, batch):
        out = model(batch["x"])
        if isinstance(out, Output):
            return F.cross_entropy(out.logits, batch["y"]) + out.early.mean()
        return F.cross_entropy(out[0], batch["y"]) + out[1][0].mean() + out[1][1].std()

    def forward(m, x):
        h = m.early(x)
        return make(m.finish(m.middle(h)), h, x)

    skipped(of(forward), call=everything)


class Kept:
    """What a layer of the front leaves in it is not there on a hit."""


def keeping(m, x):
    return m.finish(m.middle(m.early(x, kept := Kept()))), kept


class Keeping(nn.Linear):
    def forward(self, x, kept):
        kept.value = super().forward(x)
        return kept.value


def test_what_only_a_skipped_layer_could_have_filled_raises_when_it_is_read():
    harness = harness_of(of(keeping, early=lambda: Keeping(6, 6)))
    for ids in (BATCHES[0], BATCHES[0]):
        _, kept = harness.model(harness.batch(ids)["x"])
    assert harness.host.num_loads == 1
    with pytest.raises(BoundaryError, match="a skipped module"):
        kept.value  # noqa: B018


def moved_by_the_head(m, x):
    out = m.finish(plain(m, x))
    with torch.no_grad():
        m.early.weight.mul_(0.99)
    return out


def test_a_weight_of_the_front_that_the_head_moves_is_named():
    refused(of(moved_by_the_head), "writes to the parameter 'early.weight'")


def test_rows_of_a_training_that_the_front_asks_for_are_none_of_an_evaluation():
    harness = harness_of(of(lambda m, x: m.finish(plain(m, x * (1 + m.training)))))
    for mode in (True, False):
        harness.model.train(mode)
        assert_same_run(harness, call, [BATCHES[0]] * 2)
    assert harness.host.num_loads == 2


SCALES = {}


def test_a_model_that_is_another_than_its_copies_is_refused():
    harness = harness_of(of(lambda m, x: m.finish(plain(m, x * SCALES.get(id(m), 1.0)))))
    SCALES[id(harness.model)] = 2.0
    call(harness.model, harness.batch(BATCHES[0]))
    (error,) = harness.host.refusals
    assert "other results than a copy" in str(error)


# ---- arguments that no loader vouches for -----------------------------------------------------


def conditioned(m, x, t):
    return m.finish(m.middle(m.early(x) + t))


def with_argument(make):
    return lambda m, b: F.cross_entropy(m(b["x"], make(len(b["y"]))), b["y"])


def test_a_random_argument_of_the_prefix_is_not_mistaken_for_the_samples():
    refused(of(conditioned), call=with_argument(lambda n: torch.randn(n, 1, 1)))


def test_a_random_argument_of_the_active_part_is_fine():
    late = of(lambda m, x, t: m.finish(plain(m, x) + t))
    skipped(late, call=with_argument(lambda n: torch.randn(n, 1, 1)))


def test_a_number_that_is_none_now_or_a_word_is_another():
    kind = of(lambda m, x, t: m.finish(plain(m, x if t is None else 2 * x)))
    run(kind, call=with_argument(lambda n: [3, 4, "t", None][torch.randint(4, ())]))


def test_a_constant_argument_of_the_prefix_is_fine():
    skipped(of(conditioned), call=with_argument(lambda n: torch.ones(6)))
