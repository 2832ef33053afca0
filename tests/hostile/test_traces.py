"""The rehearsal runs the model several times more than the user did: it must leave no trace."""

from __future__ import annotations

import collections
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.hostile.harness import hostile
from tests.hostile.nets import ConvNet, Net, images, rows


def trained(run, model, look=None, *, epochs=3, data=None, **options):
    """Train, and look at something after every step."""
    model = run.freeze(model, **options)

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        if look is not None:
            run.see(look(model))
        return value

    run.fit(model, run.loader(data if data is not None else rows()), epochs, loss=loss)
    if look is not None:
        run.see(look(model))


class Headed(Net):
    """A net whose head does something besides."""

    def __init__(self, act, **state):
        super().__init__()
        self.act = act
        for name, value in state.items():
            setattr(self, name, value)

    def back(self, h):
        return super().back(self.act(self, h))


def noise_of(kind):
    def act(model, h):
        noise = {
            "torch": lambda: torch.rand((), generator=model.own),
            "numpy": lambda: model.own.random(),
            "python": lambda: model.own.random(),
            "iterator": lambda: next(model.own),
        }[kind]()
        return h * (1 + float(noise))

    return act


@hostile(served=True)
@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "iterator"])
def test_a_generator_of_the_heads_own_draws_once_a_step(run, kind):
    own = {
        "torch": lambda: torch.Generator().manual_seed(5),
        "numpy": lambda: np.random.default_rng(5),
        "python": lambda: random.Random(5),
        "iterator": lambda: itertools.count(0.0, 0.01),
    }[kind]()
    trained(run, Headed(noise_of(kind), own=own))


@hostile(served=True)
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_the_global_generators_are_drawn_from_once_a_step(run, kind):
    draw = {
        "torch": lambda: float(torch.rand(())),
        "numpy": lambda: np.random.random(),
        "python": lambda: random.random(),
    }[kind]
    trained(run, Headed(lambda model, h: h * (1 + draw())))


def appended(model, h):
    model.kept.append(h.detach().mean().item())
    return h + sum(model.kept) / len(model.kept)


@hostile(served=True)
@pytest.mark.parametrize("kind", ["list", "queue", "dict"])
def test_what_the_head_remembers_it_remembers_once(run, kind):
    def act(model, h):
        if kind == "dict":
            model.kept[len(model.kept)] = h.detach().mean().item()
            return h + 0.1 * len(model.kept)
        return appended(model, h)

    kept = {"list": list, "queue": lambda: collections.deque(maxlen=4), "dict": dict}[kind]()
    trained(run, Headed(act, kept=kept), lambda model: len(model.kept))


@hostile(served=True)
def test_a_counter_of_the_head_counts_calls(run):
    def act(model, h):
        model.calls += 1
        return h * min(1.0, model.calls / 6)

    trained(run, Headed(act, calls=0), lambda model: model.calls)


@hostile(served=True)
@pytest.mark.parametrize("kind", ["buffer", "tensor", "in place", "array"])
def test_a_bank_of_the_head_moves_once_a_step(run, kind):
    def act(model, h):
        mean = h.detach().mean(0)
        if kind == "array":
            model.bank *= 0.9
            model.bank += 0.1 * mean.numpy()
            return h - torch.from_numpy(model.bank.copy())
        if kind == "in place":
            model.bank.lerp_(mean, 0.1)
            return h - model.bank.clone()
        model.bank = 0.9 * model.bank + 0.1 * mean
        return h - model.bank

    bank = np.zeros(8, np.float32) if kind == "array" else torch.zeros(8)
    model = Headed(act)
    if kind == "buffer":
        model.register_buffer("bank", bank)
    else:
        model.bank = bank
    trained(run, model, lambda model: torch.as_tensor(model.bank).clone())


@hostile(served=True)
def test_a_codebook_of_the_head_moves_once_a_step(run):
    """Vector quantisation with averages, in buffers."""

    def act(model, h):
        nearest = torch.cdist(h, model.codes).argmin(1)
        if model.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 4).float()
                model.sizes.lerp_(hot.sum(0), 0.1)
                model.codes.lerp_((hot.T @ h) / model.sizes[:, None].clamp(min=0.5), 0.1)
        return h + (model.codes[nearest] - h).detach()

    model = Headed(act)
    model.register_buffer("codes", torch.randn(4, 8))
    model.register_buffer("sizes", torch.ones(4))
    trained(run, model)


@hostile(served=True)
def test_a_queue_of_keys_with_a_pointer_moves_once_a_step(run):
    """As in momentum contrast."""

    def act(model, h):
        at = int(model.pointer)
        scores = F.normalize(h) @ model.queue.clone().T
        model.queue[at : at + len(h)] = F.normalize(h.detach())
        model.pointer[0] = (at + len(h)) % len(model.queue)
        return h + scores.mean(1, keepdim=True)

    model = Headed(act)
    model.register_buffer("queue", F.normalize(torch.randn(16, 8)))
    model.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
    trained(run, model)


@hostile(served=True)
def test_spectral_norm_of_the_head_iterates_once_a_step(run):
    model = Net()
    parametrizations.spectral_norm(model.late)
    trained(run, model)


@hostile(served=True)
def test_norms_of_the_head_learn_once_a_step(run):
    trained(run, ConvNet(), boundary="body", data=images())


@hostile
@pytest.mark.parametrize("name", ["early", "middle", "late", "whole"])
def test_hooks_of_the_user_are_called_once_a_step(run, name):
    model = Net()
    calls = []
    module = model if name == "whole" else model.get_submodule(name)
    module.register_forward_hook(lambda m, a, out: calls.append(out.shape) or None)
    run.freeze(model)
    run.fit(model, run.loader(rows()), 3, each_step=lambda step: run.see(len(calls)))
    run.see(len(calls))


@hostile
def test_a_module_that_collects_its_inputs_collects_each_once(run):
    class Collecting(nn.Linear):
        def forward(self, x):
            self.seen.append(len(x))
            return super().forward(x)

    model = Net()
    model.early = Collecting(6, 8)
    model.early.seen = []
    run.freeze(model)
    run.fit(model, run.loader(rows()), 3, each_step=lambda step: run.see(len(model.early.seen)))


CALLS = []


@hostile
def test_a_log_in_a_global_has_one_line_a_step(run):
    CALLS.clear()

    def act(model, h):
        CALLS.append(len(h))
        return h

    trained(run, Headed(act), lambda model: len(CALLS))


@hostile
def test_a_count_that_the_front_shares_with_the_head_goes_on(run):
    steps = itertools.count()

    class Stepping(Net):
        def front(self, x):
            self.step = next(steps)
            return super().front(x)

        def back(self, h):
            return super().back(h) * (1 + 0.01 * self.step)

    trained(run, Stepping(), epochs=4)


@hostile
def test_inputs_normalised_in_place_are_normalised_once(run):
    class Normalising(Net):
        def front(self, x):
            x.sub_(1.0).mul_(0.5)
            return super().front(x)

    model = run.freeze(Normalising())

    def loss(model, batch):
        x, y = batch
        value = F.cross_entropy(model(x), y)
        run.see(x.clone())
        return value

    run.fit(model, run.loader(rows()), 3, loss=loss)


@hostile
@pytest.mark.parametrize("who", ["front", "head"])
def test_a_list_that_is_given_to_the_model_is_filled_once(run, who):
    class Filling(Net):
        def forward(self, x, out):
            h = self.front(x)
            logits = self.back(h)
            out.append((h if who == "front" else logits).detach().sum())
            return logits

    model = run.freeze(Filling())

    def loss(model, batch):
        filled = []
        value = F.cross_entropy(model(batch[0], filled), batch[1])
        run.see(len(filled))
        run.see(filled[0])
        return value

    run.fit(model, run.loader(rows()), 3, loss=loss)


@hostile
def test_a_dict_that_is_given_to_the_model_is_filled_once(run):
    class Filling(Net):
        def forward(self, batch):
            batch["calls"] = batch.get("calls", 0) + 1
            batch["feature"] = self.front(batch["x"])
            return self.back(batch["feature"])

    model = run.freeze(Filling())

    def loss(model, batch):
        batch = {"x": batch[0], "y": batch[1]}
        value = F.cross_entropy(model(batch), batch["y"])
        run.see(batch["calls"])
        return value + batch["feature"].square().mean()

    run.fit(model, run.loader(rows()), 3, loss=loss)


@hostile(served=True)
def test_modes_are_where_the_user_left_them(run):
    def modes(model):
        return [module.training for module in model.modules()], torch.is_grad_enabled()

    trained(run, ConvNet(), modes, boundary="body", data=images())


@hostile(served=True)
def test_no_gradient_is_left_behind(run):
    def gradients(model):
        return [name for name, p in model.named_parameters() if p.grad is not None]

    trained(run, Net(), gradients)


@hostile(served=True)
def test_no_attribute_is_left_behind_on_modules_of_the_head(run):
    def attributes(model):
        return sorted(model.late.__dict__), sorted(model.head.__dict__)

    trained(run, Net(), attributes)


@hostile(served=True)
def test_a_gradient_hook_fires_once_a_step(run):
    fired = []
    model = Net()
    model.late.weight.register_hook(lambda grad: fired.append(1))
    trained(run, model, lambda model: len(fired))


@hostile
def test_memoised_functions_of_the_front_stay_right(run):
    @functools.cache
    def positions(n):
        return torch.arange(n)[:, None] * 0.0 + 1.0

    class Memoised(Net):
        def front(self, x):
            return super().front(x * positions(len(x)))

    trained(run, Memoised())


@hostile
def test_a_lazy_head_is_made_by_the_first_call(run):
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.LazyLinear(3)

    model = run.freeze(Lazy())
    loader = run.loader(rows())
    with torch.no_grad():
        run.see(model(next(iter(loader))[0]))
    run.fit(model, loader)


@hostile
def test_a_front_with_randomness_to_no_effect_leaves_the_generators_alone(run):
    class Idle(Net):
        def front(self, x):
            torch.rand(3)
            np.random.rand(2)
            random.random()
            return super().front(x)

    trained(run, Idle(), lambda model: torch.rand(()))


@hostile
def test_a_front_that_queues_its_features_queues_each_once(run):
    class Queueing(Net):
        def __init__(self):
            super().__init__()
            self.recent = collections.deque(maxlen=3)

        def front(self, x):
            h = super().front(x)
            self.recent.append(h.detach().mean().item())
            return h

    model = run.freeze(Queueing())

    def loss(model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) * (1 + sum(model.recent) / 3)

    run.fit(model, run.loader(rows()), 3, loss=loss)
