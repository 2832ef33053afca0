"""Architectures written by others: each is skipped with the plain numbers, or refused."""

import copy
import re

import pytest
import torch

from tests.helpers.skip_harness import Harness, step

pytest.importorskip("transformers", minversion="5")

from egeria_cache.skip.model.calls import Recorder, intercept
from egeria_cache.skip.model.frozen import FrozenPrefix
from egeria_cache.skip.prove.dry_run import patchable
from tests.helpers import zoo

pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = [range(0, 3), range(3, 6)]
FIRST = [(name, zoo.BOUNDARIES[name][0]) for name in zoo.FAMILIES]
OTHERS = [
    (name, boundary)
    for name, boundaries in sorted(zoo.BOUNDARIES.items())
    for boundary in boundaries
    if (name, boundary) not in FIRST
]


def call(model, batch):
    output = model(**batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    parts = [x for x in output.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return sum(part.float().pow(2).mean() for part in parts)


def freeze_prefix(model, boundary, data):
    """Freeze all that runs before `boundary` returns; return the names of those around it."""
    recorder = Recorder()
    with intercept(patchable(model), recorder), torch.no_grad():
        torch.manual_seed(0)
        call(model, data)
    module = model.get_submodule(boundary)
    last = max(i for i, record in enumerate(recorder.calls) if record.module is module)
    steps, around = recorder.before(last)
    for record in steps:
        record.module.requires_grad_(False)
    FrozenPrefix(record.module for record in steps)
    names = {id(module): name for name, module in model.named_modules()}
    return ["", *(names[id(record.module)] for record in around)]


def hold_by_hooks(model, boundary, around):
    """The same as the engine does with code around the boundary, written with hooks."""
    held = []

    def enter(module, *args):
        held.append((module, module.training))
        module.training = False

    def leave(*args):
        while held:
            module, module.training = held.pop()

    for module in around:
        module.register_forward_pre_hook(enter)
    model.get_submodule(boundary).register_forward_hook(leave)


def freeze_named(model, boundary, data):
    """Freeze what a refusal names: parameters that are used without calling their module."""
    while True:
        harness = Harness(copy.deepcopy(model), data)
        harness.engine.set_boundary(boundary)
        call(harness.model, harness.batch(BATCHES[0]))
        reasons = [re.match(r"parameter '(.*?)' lies", str(e)) for e in harness.host.refusals]
        if not any(reasons):
            return
        model.get_parameter(reasons[0].group(1)).requires_grad_(False)


def run(name, boundary):
    """Train an epoch of misses and two of hits beside a plain copy; return the harness."""
    model, data = zoo.build(name)
    around = freeze_prefix(model, boundary, data)
    freeze_named(model, boundary, data)
    assert any(p.requires_grad for p in model.parameters())
    plain = copy.deepcopy(model)
    hold_by_hooks(plain, boundary, [plain.get_submodule(key) for key in around])
    harness = Harness(model, data)
    harness.engine.set_boundary(boundary)
    for n, ids in enumerate(BATCHES * 3):
        ours = step(model, call, harness.batch(ids), seed=n)
        theirs = step(plain, call, harness.plain(ids), seed=n)
        assert torch.equal(ours[2], theirs[2]), "the random generators went apart"
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        # Some gradients are zero in exact arithmetic: compare with the largest of all.
        scale = max(float(g.abs().max()) for g in theirs[1].values() if g is not None)
        for parameter, gradient in theirs[1].items():
            assert (gradient is None) == (ours[1][parameter] is None), parameter
            if gradient is not None:
                worst = float((gradient - ours[1][parameter]).abs().max())
                assert worst <= 1e-5 * scale, (parameter, worst, scale)
    return harness


@pytest.mark.cases(len(FIRST))
@pytest.mark.parametrize(
    ("name", "boundary"), [*FIRST, *(pytest.param(*one, marks=pytest.mark.long) for one in OTHERS)]
)
def test_losses_and_gradients_are_those_of_the_frozen_model(name, boundary):
    harness = run(name, boundary)
    assert harness.host.refusals == []
    assert harness.host.changes == []
    assert harness.host.num_loads == 4
    assert harness.reloaded == 0


def test_the_zoo_is_large_enough():
    assert set(zoo.BOUNDARIES) == set(zoo.BUILDERS)
    assert len(zoo.BUILDERS) >= 24
