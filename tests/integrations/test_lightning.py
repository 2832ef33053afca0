"""Under Lightning's Trainer: the losses of the same training without a cache, and hits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.integrations.lightning import EgeriaCallback
from tests.helpers.lightning_loop import BATCH, Lit, controlled, data, make, trainer
from tests.helpers.steps import Notes

pytestmark = pytest.mark.filterwarnings(
    "ignore::Warning:lightning.*", "ignore:.*eval mode at the start of training",
    "ignore:.*does not have many workers", "ignore:.*LeafSpec",
)  # fmt: skip


class Flush(Callback):
    """Waits for the writer, so that the next epoch's hits are certain."""

    def __init__(self, cache):
        self.cache = cache

    def on_train_epoch_end(self, trainer, pl_module):
        self.cache.flush()


def loader(cache, **kwargs):
    return EgeriaLoader(data(), BATCH, cache=cache, **({"shuffle": True} | kwargs))


def plain_losses(*callbacks, frozen=True, **kwargs):
    model = make(frozen=frozen)
    trainer(*callbacks, **kwargs).fit(model, DataLoader(data(), BATCH, shuffle=True))
    return model.losses


@pytest.mark.parametrize("options", [
    {}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"},
], ids=lambda options: next(iter(options), "plain"))  # fmt: skip
def test_losses_are_those_without_a_cache(tmp_path, options):
    model = make()
    with ActivationCache(model, tmp_path, gate="always") as cache:
        run = trainer(EgeriaCallback(cache, boundary="backbone"), Flush(cache), **options)
        run.fit(model, loader(cache))
        hits = cache.stats().hits
    assert hits == 2 * 48
    assert model.losses == pytest.approx(plain_losses(**options), rel=1e-5)


def test_validation_and_prediction_are_those_without_a_cache(tmp_path):
    plain, validation = make(), DataLoader(data(), BATCH)
    run = trainer()
    run.fit(plain, DataLoader(data(), BATCH, shuffle=True), validation)
    expected = run.predict(plain, validation)

    model = make()
    with ActivationCache(model, tmp_path, gate="always") as cache:
        run = trainer(EgeriaCallback(cache, boundary="backbone"), Flush(cache))
        val = loader(cache, shuffle=False, name="val")
        run.fit(model, loader(cache), val)
        before = cache.stats().hits
        found = run.predict(model, val)
        assert before > 2 * 48
        assert cache.stats().hits > before
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)
    assert model.val_losses == pytest.approx(plain.val_losses, rel=1e-5)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


def test_a_controller_gets_the_mean_loss_of_the_batches_of_a_step(tmp_path):
    model = make()
    with ActivationCache(model, tmp_path, "backbone") as cache:
        controller = Notes()
        trainer(EgeriaCallback(cache, controller), accumulate_grad_batches=3).fit(
            model, loader(cache)
        )
    means = [sum(model.losses[i : i + 3]) / 3 for i in range(0, 18, 3)]
    assert controller.losses == pytest.approx(means, rel=1e-6)
    assert controller.num_closed == 0  # it is its maker's


def resumed(directory, make_callbacks, frozen, stop, epochs=4):
    """Train to step `stop`, in mid-epoch; go on from the checkpoint with everything made anew."""
    checkpoints = directory / "checkpoints"
    torch.manual_seed(5)
    first = make(frozen=frozen)
    with ActivationCache(first, directory / "cache", gate="always") as cache:
        when = {"every_n_train_steps": stop} if type(stop) is int else {"every_n_epochs": 2}
        saver = ModelCheckpoint(checkpoints, **when, save_top_k=-1)
        callbacks = [*make_callbacks(cache), saver, Flush(cache)]
        steps = stop if type(stop) is int else 12
        run = trainer(*callbacks, enable_checkpointing=True, max_steps=steps, max_epochs=epochs)
        run.fit(first, loader(cache, seed=3))
    [path] = checkpoints.glob("*.ckpt")
    torch.manual_seed(99)
    second = Lit(frozen=frozen)
    with ActivationCache(second, directory / "cache", gate="always") as cache:
        run = trainer(*make_callbacks(cache), Flush(cache), max_epochs=epochs)
        run.fit(second, loader(cache, seed=3), ckpt_path=path, weights_only=False)
        assert cache.boundary == "backbone"
        return first.losses + second.losses, cache.stats().hits


@pytest.mark.parametrize("stop", [8, 12, 15, "the end of an epoch"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, stop):
    model = make(frozen=False)
    torch.manual_seed(5)
    make(frozen=False)
    with ActivationCache(model, tmp_path / "whole", gate="always") as cache:
        run = trainer(controlled(cache), Flush(cache), max_epochs=4)
        run.fit(model, loader(cache, seed=3))
    losses, hits = resumed(tmp_path, lambda cache: [controlled(cache)], frozen=False, stop=stop)
    assert losses == pytest.approx(model.losses, rel=1e-5)
    assert hits > 0


@pytest.mark.parametrize(
    ("boundary", "frozen_epochs"), [("backbone", 2), ("auto", 2), ("backbone", 1)]
)
def test_what_backbone_finetuning_unfreezes_is_trained(tmp_path, boundary, frozen_epochs):
    def finetuning():
        return BackboneFinetuning(frozen_epochs, lambda epoch: 1.0, train_bn=False)

    model = make(frozen=False)
    with ActivationCache(model, tmp_path, gate="always") as cache:
        callback = EgeriaCallback(cache, boundary=boundary)
        run = trainer(finetuning(), callback, Flush(cache), max_epochs=4)
        run.fit(model, loader(cache))
        assert cache.stats().hits == 48 * (frozen_epochs - 1)
        assert boundary != "auto" or cache.boundary is None
    assert model.backbone[0].weight.requires_grad
    expected = plain_losses(finetuning(), frozen=False, max_epochs=4)
    assert model.losses == pytest.approx(expected, rel=1e-5)


class Recorder(DummyLogger):
    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, dict(metrics)))


def test_hits_boundary_and_saved_seconds_are_logged(tmp_path):
    model, logger = make(), Recorder()
    with ActivationCache(model, tmp_path, gate="always") as cache:
        callback = EgeriaCallback(cache, boundary="backbone")
        trainer(callback, Flush(cache), logger=logger, log_every_n_steps=5).fit(
            model, loader(cache)
        )
    steps = [step for step, _ in logger.seen]
    assert steps == [5, 6, 10, 12, 15, 18]
    assert [figures["egeria/hits"] for _, figures in logger.seen] == [0, 0, 32, 48, 72, 96]
    last = logger.seen[-1][1]
    assert last["egeria/hit_rate"] == pytest.approx(96 / 144)
    assert "egeria/saved_s" in last
    assert last["egeria/boundary"] == [n for n, _ in model.named_modules()].index("backbone")


def run_on_two_processes(directory, strategy, what):
    directory.mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.lightning_loop", strategy, str(directory), what],
        check=True, timeout=150, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def plain_ranks(tmp_path_factory):
    return run_on_two_processes(tmp_path_factory.mktemp("plain") / "run", "ddp_fork", "plain")


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn"])
def test_two_processes_have_the_losses_of_two_without_a_cache(tmp_path, strategy, plain_ranks):
    ranks = run_on_two_processes(tmp_path / "run", strategy, "cached")
    for rank, plain in zip(ranks, plain_ranks, strict=True):
        assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert rank["sampler"] == plain["sampler"] == "DistributedSampler"
        assert rank["sample_id"] == "stable_id"
        assert rank["hits"] > 0


class Direct(Lit):
    """Calls a part of itself, and never its own forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.backbone, self.middle, self.head)

    def training_step(self, batch, number):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("part", ["net", None])
def test_a_part_that_the_step_calls_has_the_cache(tmp_path, part):
    torch.manual_seed(0)
    model = Direct()
    cached = getattr(model, part) if part else model
    with ActivationCache(cached, tmp_path, gate="always") as cache:
        callback = EgeriaCallback(cache, boundary="0" if part else "auto")
        trainer(callback, Flush(cache)).fit(model, loader(cache))
        stats = cache.stats()
    assert model.losses == pytest.approx(plain_losses(), rel=1e-5)
    if part:
        assert stats.hits == 2 * 48
    else:  # it is found by itself, with the first batch
        assert stats.hits > 48
        assert stats.why_not is None
