"""Mixed batches, guards, resume, kinds of models and numbers: equal to the bit."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from tests.device.simulated.runs import DEVICE, assert_same, moved, plain, run
from tests.helpers.core_nets import FAMILIES, family_batch
from tests.helpers.nets import Images, freeze, make_net, sgd
from tests.helpers.sentences import Encoder, Sentences, pad_left, pad_right
from tests.helpers.steps import take_step

FRONTS = {
    "resnet": ("stem", "layer1"),
    "mobilenet": ("features",),
    "bert": ("embeddings", "position", "encoder.0", "encoder.1"),
    "vit": ("patches", "token", "blocks.0", "blocks.1"),
    "encoder_decoder": ("shared", "encoder.0", "encoder.1", "encoder.2"),
    "mlp": ("0", "2"),
}
CUTS = {
    "mobilenet": "features.3", "bert": "encoder.1", "vit": "blocks.1",
    "encoder_decoder": "encoder.1", "mlp": "2",
}  # fmt: skip


def freeze_front(*names):
    def freezes(model, boundary):
        for name, parameter in model.named_parameters():
            frozen = any(name == n or name.startswith(n + ".") for n in names)
            parameter.requires_grad_(not frozen)

    return freezes


def rows_of(kind, n=32):
    parts = [family_batch(kind, step) for step in range(n // 8)]
    return TensorDataset(*(torch.cat(part) for part in zip(*parts, strict=True)))


@pytest.mark.parametrize("family", sorted(CUTS))
def test_families_of_models(tmp_path, family):
    make, kind = FAMILIES[family]
    names = FRONTS[family] if family != "mobilenet" else [f"features.{i}" for i in range(4)]
    settings = {
        "make": make, "data": rows_of(kind), "boundary": CUTS[family],
        "freezes": freeze_front(*names),
    }  # fmt: skip
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].why_not is None
    assert cached[2].hits == 32 * 2


def test_mixed_batches(tmp_path):
    settings = {"moves": {3: "layer1", 8: "layer2"}, "epochs": 4, "boundary": "stem"}
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].partial_batches > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_other_numbers(tmp_path, dtype):
    settings = {
        "make": lambda: make_net().to(dtype),
        "to": lambda batch: [batch[0].to(DEVICE, dtype), batch[1].to(DEVICE)],
    }
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].hits == 48 * 2


def test_a_gradient_scaler(tmp_path):
    """Scaled losses in fp16, as a loop with mixed precision has them."""

    def scaled(directory, gate):
        torch.manual_seed(0)
        model = make_net().to(DEVICE)
        freeze(model, "layer1")
        optimizer, losses = sgd(model), []
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
        with ActivationCache(model, directory, "layer1", gate=gate, audit_rate=0) as cache:
            loader = EgeriaLoader(Images(), 8, shuffle=True, cache=cache, reuse=None, seed=3)
            for _ in range(3):
                model.train()
                for batch in loader:
                    images, targets = moved(batch)
                    with torch.autocast(DEVICE, torch.float16):
                        loss = F.cross_entropy(model(images), targets)
                    optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    losses.append(loss.item())
                    cache.flush()
            return losses, model.state_dict(), cache.stats()

    cached = scaled(tmp_path / "a", "always")
    assert_same(cached, scaled(tmp_path / "b", "never"))
    assert cached[2].hits == 48 * 2


def test_channels_last_and_arithmetic_in_the_loop(tmp_path):
    def to(batch):
        images, targets = moved(batch)
        images = images.to(memory_format=torch.channels_last)
        return [(images - 0.1) / 0.7, targets]

    make = lambda: make_net().to(memory_format=torch.channels_last)  # noqa: E731
    cached = run(tmp_path / "a", gate="always", to=to, make=make)
    assert_same(cached, plain(to=to, make=make))
    assert cached[2].hits == 48 * 2


def test_arithmetic_with_tensors_of_the_device(tmp_path):
    mean, std = torch.tensor([0.1], device=DEVICE), torch.tensor([0.7], device=DEVICE)

    def to(batch):
        images, targets = moved(batch)
        return [(images - mean[:, None, None]) / std[:, None, None], targets]

    cached = run(tmp_path / "a", gate="always", to=to)
    assert_same(cached, plain(to=to))
    assert cached[2].hits == 48 * 2


@pytest.mark.parametrize(
    "to",
    [
        lambda batch: [part.to(DEVICE) for part in batch],
        lambda batch: [part.to(f"{DEVICE}:0") for part in batch],
        lambda batch: [part.to(torch.device(DEVICE, 0), non_blocking=True) for part in batch],
        lambda batch: [getattr(part, DEVICE)() for part in batch],
        lambda batch: [getattr(part, DEVICE)(0, non_blocking=True) for part in batch],
        lambda batch: [part.to(torch.empty(0, dtype=part.dtype, device=DEVICE)) for part in batch],
    ],
    ids=["kind", "index", "non_blocking", "method", "method with index", "like"],
)
def test_every_way_to_move_a_batch(tmp_path, to):
    cached = run(tmp_path / "a", gate="always", to=to)
    assert_same(cached, plain(to=to))
    assert cached[2].hits == 48 * 2
    assert cached[2].refetched == cached[2].audited


def test_a_write_past_the_counters_is_seen_on_the_device(tmp_path, caplog):
    """`p.data` moves no version counter: the guard compares elements without waiting for them."""

    def on_step(step, model, cache):
        if step == 13:
            model.stem[0].weight.data.add_(1.0)

    with caplog.at_level(logging.WARNING, "egeria"):
        cached = run(tmp_path / "a", gate="always", epochs=5, on_step=on_step)
    computed = plain(epochs=5, on_step=on_step)
    assert "the content of a parameter or buffer of the prefix was changed" in caplog.text
    # Seen one batch later; from then on all is computed with the new weights.
    assert cached[0][:13] == computed[0][:13]
    assert 12 < cached[2].hits < 48 * 4
    assert cached[2].voided > 0


@pytest.mark.parametrize("changes_at", [15, 30])
def test_a_sample_that_was_changed_is_found_by_an_audit_that_nobody_waits_for(
    tmp_path, caplog, changes_at
):
    """One call later, or at the end; unless a look at the data set has come first."""
    data = Images(noise=0)

    def on_step(step, model, cache):
        if step == changes_at - 1:
            data.images += 1.0

    def voided(model, cache):
        cache.close()

    cached = run(
        tmp_path / "a", gate="always", epochs=5, on_step=on_step, data=data, finish=voided,
        cache_kwargs={"audit_rate": 1.0},
    )  # fmt: skip
    assert [caplog.text.count(told) for told in ("AUDIT FAILED", "is another one")] in (
        [1, 0], [0, 1]
    )  # fmt: skip
    assert cached[2].hits <= 48 * 5


def test_a_step_of_the_optimizer_on_the_prefix_voids_it_at_once(tmp_path):
    def on_step(step, model, cache):
        if step == 13:
            with torch.no_grad():
                model.stem[0].weight.add_(1.0)

    cached = run(tmp_path / "a", gate="always", epochs=5, on_step=on_step)
    computed = plain(epochs=5, on_step=on_step)
    assert_same(cached, computed)
    assert cached[2].voided > 0


def test_dropout_behind_the_boundary_draws_the_same_numbers_of_the_device(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 4, 3)
            self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.3))
            self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 5), nn.Dropout(0.1))

        def forward(self, x):
            return self.head(F.relu(self.layer1(self.stem(x))).mean((2, 3)))

    def make():
        getattr(torch, DEVICE).manual_seed_all(11)
        return Net()

    freezes = freeze_front("stem", "layer1")
    cached = run(tmp_path / "a", gate="always", make=make, freezes=freezes)
    computed = plain(make=make, freezes=freezes)
    assert_same(cached, computed)
    assert cached[2].hits == 48 * 2
    assert len(set(computed[0])) == len(computed[0])


def _resumable(directory, gate, *, until=None, state=None, num_steps=24):
    torch.manual_seed(5)
    model = make_net().to(DEVICE)
    freeze(model, "layer1")
    optimizer, losses, step = sgd(model), [], 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        step = state["step"]
    with ActivationCache(model, directory, "layer1", gate=gate, audit_rate=0) as cache:
        loader = EgeriaLoader(Images(), 8, shuffle=True, cache=cache, reuse=None, seed=3)
        if state is not None:
            loader.load_state_dict(state["loader"])
        while step < num_steps:
            model.train()
            for batch in loader:
                images, targets = moved(batch)
                loss = take_step(F.cross_entropy(model(images), targets), optimizer)
                losses.append(loss.item())
                step += 1
                cache.flush()
                if step == until:
                    things = {"model": model, "optimizer": optimizer, "loader": loader}
                    saved = {k: copy.deepcopy(v.state_dict()) for k, v in things.items()}
                    return losses, saved | {"step": step}
                if step == num_steps:
                    break
        return losses, cache.stats()


@pytest.mark.parametrize("cut", [3, 9, 18])
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path, cut):
    whole, _ = _resumable(tmp_path / "whole", "never")
    first, state = _resumable(tmp_path / "parts", "always", until=cut)
    second, stats = _resumable(tmp_path / "parts", "always", state=state)
    torch.testing.assert_close(first + second, whole, rtol=1e-5, atol=1e-6)
    assert stats.hits > 0


@pytest.mark.parametrize("collate", [pad_right, pad_left])
def test_padded_batches(tmp_path, collate):
    """Rows lose their padding in one copy to the host, and get it back in page-locked memory."""

    def freezes(model, boundary):
        for name in ("embed", "layers.0"):
            model.get_submodule(name).requires_grad_(False)

    settings = {
        "make": Encoder, "boundary": "layers.0", "freezes": freezes, "data": Sentences(48),
        "collate_fn": collate, "epochs": 4,
    }  # fmt: skip
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings), exact=False)
    assert cached[2].why_not is None
    assert cached[2].hits >= 48 * 2
