"""Random orders of what people do to a training run: the losses stay those of the plain schedule.

The twin has the same weights, sees the same raw samples, and never had a cache. Whatever happens to
the model or to the data set happens to both; after every step losses and weights must be equal.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from egeria_cache.batch import unwrap
from egeria_cache.prefetch import View
from tests.helpers.runs import kill_writer
from tests.helpers.steps import take_step
from tests.hostile.harness import MEMORY, ForeignError, SilentlyWrong
from tests.hostile.nets import inputs, labels

FRONT = ("stem", "layer1", "layer2")


class Staged(nn.Module):
    """Three layers that can be frozen, and a head that draws; settings in every usual place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layer1 = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8))
        self.layer2 = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1))
        self.head = nn.Linear(8, 3)
        self.scale = 1.0
        self.config = {"bias": 0.0}

    def forward(self, x):
        h = self.layer1(self.stem(x) * self.scale) + self.config["bias"]
        return self.head(F.dropout(torch.tanh(self.layer2(h)), 0.2, self.training))


class Numbered(Dataset):
    """Rows with their own number, a transform and labels that change."""

    def __init__(self) -> None:
        self.x, self.y = inputs(), labels()
        self.factor, self.fails = 1.0, False

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        if self.fails and index % 5 == 0:
            raise OSError("not there for the moment")
        return self.x[index] * self.factor, self.y[index], index


class Training(RuleBasedStateMachine):
    """A cached run beside the plain one."""

    gate = "always"

    @initialize(
        seed=st.integers(0, 3), shuffle=st.booleans(), size=st.sampled_from([6, 7]),
        ring=st.booleans(),
    )  # fmt: skip
    def start(self, seed, shuffle, size, ring):
        self.has_ring, View.has_ring = View.has_ring, ring
        self.root = Path(tempfile.mkdtemp(prefix="egeria-hostile-", dir=MEMORY))
        self.num_directories, self.num_steps = 0, 0
        self.shuffle, self.batch_size = shuffle, size
        torch.manual_seed(seed)
        self.model = Staged()
        self.twin = copy.deepcopy(self.model)
        self.hooks: list[list[object]] = []
        self.boundary: str | None = None
        self.data = Numbered()
        self.optimize()
        self.directory = self.root / "0"
        self.open()

    def optimize(self):
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.both]

    @property
    def both(self):
        return self.model, self.twin

    def open(self):
        self.cache = ActivationCache(
            self.model, self.directory, self.boundary, gate=self.gate, audit_rate=0
        )
        self.loader = EgeriaLoader(
            self.data, self.batch_size, shuffle=self.shuffle, cache=self.cache
        )
        self.iterator, self.was_called = None, False

    # ---- training -----------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            try:
                batch = self.next_batch()
                if batch is not None:
                    self.train_on(batch)
            except (SilentlyWrong, OSError):
                raise
            except Exception as error:
                if not self.is_refused(error):
                    raise ForeignError(repr(error)) from error

    @rule()
    def epoch(self):
        self.iterator = None
        self.step(5)
        self.cache.flush()

    def is_refused(self, error):
        """A boundary set by hand may be refused by the first call under it; then it is taken back.

        Neither model was trained on that batch.
        """
        if not isinstance(error, BoundaryError) or self.was_called:
            return False
        self.boundary = self.iterator = None
        self.cache.set_boundary(None)
        return True

    def next_batch(self):
        if self.iterator is None:
            self.iterator = iter(self.loader)
        batch = next(self.iterator, None)
        if batch is None:
            self.iterator = None
        return batch

    def train_on(self, batch):
        x, y, numbers = batch
        rows = [self.data[i] for i in unwrap(numbers).tolist()]
        raw, targets = (torch.stack([row[k] for row in rows]) for k in range(2))
        losses, self.num_steps = [], self.num_steps + 1
        for model, optimizer, x_, y_ in zip(
            self.both, self.optimizers, (x, raw), (y, targets), strict=True
        ):
            model.train()
            torch.manual_seed(self.num_steps)
            losses.append(take_step(F.cross_entropy(model(x_), y_), optimizer).item())
        self.was_called = True
        if abs(losses[0] - losses[1]) > 1e-4:
            raise SilentlyWrong(f"step {self.num_steps}: {losses[0]}, not {losses[1]}")

    @invariant()
    def the_weights_are_those_of_the_twin(self):
        if not hasattr(self, "twin"):
            return
        pairs = zip(self.model.named_parameters(), self.twin.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
                raise SilentlyWrong(f"{name} went apart from the twin's")

    # ---- what is frozen -----------------------------------------------------------------------

    @rule(boundary=st.sampled_from((None, *FRONT)))
    def move(self, boundary):
        self.was_called &= boundary == self.boundary
        self.boundary = boundary
        frozen = FRONT[: FRONT.index(boundary) + 1] if boundary else ()
        for model in self.both:
            for name in FRONT:
                model.get_submodule(name).requires_grad_(name not in frozen)
                model.get_submodule(name).zero_grad(set_to_none=True)
        self.cache.set_boundary(boundary)

    @precondition(lambda self: self.boundary is not None)
    @rule(name=st.sampled_from(FRONT), wanted=st.booleans())
    def toggle(self, name, wanted):
        """`requires_grad_` by hand, of the front or behind it; the cache is not told."""
        for model in self.both:
            model.get_submodule(name).requires_grad_(wanted)
            model.get_submodule(name).zero_grad(set_to_none=True)

    # ---- what the model is --------------------------------------------------------------------

    @rule(scale=st.sampled_from([1.0, 0.5, 2.0]))
    def scale(self, scale):
        for model in self.both:
            model.scale = scale

    @rule(bias=st.sampled_from([0.0, 1.0]))
    def configure(self, bias):
        for model in self.both:
            model.config["bias"] = bias

    @rule(slope=st.sampled_from([0.1, 0.9]))
    def tilt(self, slope):
        for model in self.both:
            model.layer2[1].negative_slope = slope

    @rule(name=st.sampled_from((*FRONT, "head")), factor=st.sampled_from([0.5, 2.0]))
    def hook(self, name, factor):
        hooked = (model.get_submodule(name) for model in self.both)
        scaled = lambda m, a, out: out * factor  # noqa: E731
        self.hooks.append([module.register_forward_hook(scaled) for module in hooked])

    @precondition(lambda self: self.hooks)
    @rule()
    def unhook(self):
        for handle in self.hooks.pop():
            handle.remove()

    @rule(how=st.sampled_from(["add", "data", "load", "equal", "replace"]))
    def write(self, how):
        for model, optimizer in zip(self.both, self.optimizers, strict=True):
            with torch.no_grad():
                if how == "add":
                    model.stem.weight.add_(0.1)
                elif how == "data":
                    model.stem.weight.data.mul_(1.1)
                elif how == "replace":
                    old = model.stem.bias
                    model.stem.bias = nn.Parameter(old * 0.5, requires_grad=old.requires_grad)
                    optimizer.param_groups[0]["params"] = list(model.parameters())
                else:
                    state = {key: value.clone() for key, value in model.state_dict().items()}
                    state["stem.bias"] += 0.1 if how == "load" else 0.0
                    model.load_state_dict(state)

    # ---- what the data set is -----------------------------------------------------------------

    @rule(how=st.sampled_from(["labels", "labels in place", "inputs", "factor"]))
    def edit(self, how):
        """Between two epochs: what is on its way is not asked again."""
        self.iterator = None
        if how == "labels":
            self.data.y = (self.data.y + 1) % 3
        elif how == "labels in place":
            self.data.y[::2] = (self.data.y[::2] + 1) % 3
        elif how == "inputs":
            self.data.x = self.data.x.flip(0)
        else:
            self.data.factor = 3.0 - self.data.factor

    # ---- what goes wrong ----------------------------------------------------------------------

    @rule()
    def abandon(self):
        self.iterator = None

    @rule()
    def fail_to_load(self):
        self.data.fails = True
        try:
            self.step(2)
        except OSError:
            self.iterator = None
        finally:
            self.data.fails = False

    @rule()
    def fail_in_the_head(self):
        batch = self.next_batch()
        if batch is None:
            return
        handle = self.model.head.register_forward_pre_hook(_fail)
        try:
            self.model(batch[0])
        except ZeroDivisionError:
            pass
        except Exception as error:
            if not self.is_refused(error):
                raise ForeignError(repr(error)) from error
        finally:
            handle.remove()

    @rule()
    def evaluate(self):
        with torch.no_grad():
            outputs = [model.eval()(self.data.x) for model in self.both]
        if not torch.allclose(*outputs, rtol=1e-3, atol=1e-4):
            raise SilentlyWrong("the evaluation went apart from the twin's")

    @rule()
    def kill_the_writer(self):
        kill_writer(self.cache)

    @rule()
    def remove_the_directory(self):
        shutil.rmtree(self.directory, ignore_errors=True)

    # ---- ends ---------------------------------------------------------------------------------

    @rule()
    def resume(self):
        """Close, and open again with the same model."""
        self.cache.close()
        self.reopen()

    @rule()
    def kill(self):
        """Take the files as they lie, with a copy of the model, and never close the old cache."""
        self.cache.flush()
        self.num_directories += 1
        copied = self.root / str(self.num_directories)
        if self.directory.exists():
            shutil.copytree(self.directory, copied)
        old, self.directory = self.cache, copied
        self.model, self.hooks = copy.deepcopy(self.model), []
        for model in self.both:
            for module in model.modules():
                module._forward_hooks.clear()
                module._forward_hooks_with_kwargs.clear()
        self.optimize()
        self.reopen()
        old.close()  # its threads, at least, must not outlive the test

    def reopen(self):
        frozen = FRONT[: FRONT.index(self.boundary) + 1] if self.boundary else ()
        for model in self.both:
            for name in frozen:
                model.get_submodule(name).requires_grad_(False)
        self.open()

    def teardown(self):
        if hasattr(self, "cache"):
            self.iterator = None
            self.cache.close()
            shutil.rmtree(self.root, ignore_errors=True)
            View.has_ring = self.has_ring


def _fail(module, args):
    raise ZeroDivisionError


def run(**options):
    chosen = settings(
        deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), **options,
    )  # fmt: skip
    run_state_machine_as_test(Training, settings=chosen)


def test_any_order_of_events_gives_the_plain_losses():
    phases = [Phase.generate]  # a failure is told at once, as found
    run(max_examples=15, stateful_step_count=20, derandomize=True, phases=phases)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_hundred_thousand_events_give_the_plain_losses():
    run(max_examples=1000, stateful_step_count=100)
