"""Short runs: nothing is proved that would not be won back."""

import logging
import time

import pytest
import torch
from torch import nn

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.gate import ServingPolicy, schedule
from egeria_cache.gate.schedule import Schedule
from tests.helpers.nets import Images, frozen_net, sgd, train_steps
from tests.helpers.runs import cached


@pytest.fixture(autouse=True)
def short_runs_are_postponed(monkeypatch):
    monkeypatch.delenv("EGERIA_POSTPONE")


def timed(num_batches, front_s, forward_s, epoch=0, load_s=0.0, **known):
    return Schedule(num_batches, epoch, [front_s], [forward_s], [load_s], **known)


@pytest.mark.parametrize(
    ("known", "is_proved"),
    [
        (timed(12, 0.020, 0.030, epoch=8), False),  # 24 hits save 0.46 s, of 0.48 for the proof
        (timed(13, 0.020, 0.030), True),
        (timed(8, 0.020, 0.030, num_epochs=5), True),  # the last run in this directory had so many
        (timed(17, 0.020, 0.030, padded=True), False),
        (timed(17, 0.020, 0.030, padded=True, is_stored=True), True),  # hits in this epoch, too
        (timed(63, 0.020, 0.030, padded=True), True),
        (timed(8, 0.020, 0.030, epoch=16), True),  # who ran so long goes on
        (timed(17, 0.001, 0.030, load_s=0.05), True),  # samples that are slow to load
        (timed(9, 0.020, 0.030, hits=0.5), False),  # only what is not drawn anew wins it back
        (timed(16, 0.020, 0.030, hits=0.75), True),  # who draws at random trains for longer
        (timed(10**6, 0.0008, 0.003), False),  # a hit itself takes as long
    ],
)
def test_a_proof_is_made_where_as_many_epochs_as_may_be_expected_win_it_back(known, is_proved):
    assert (known.why_not() is None) is is_proved


def test_loaders_that_are_made_anew_for_every_epoch_are_one_run():
    policy = ServingPolicy("auto", 1.0)
    policy.begins("train#0", 0, 8)
    schedule = policy.schedules["train#0"]
    schedule.fronts, schedule.forwards = [0.020], [0.030]
    assert schedule.why_not() is not None
    for number in range(1, 17):
        policy.begins(f"train#{number}", 0, 8)
    assert policy.schedules["train#16"].why_not() is None


def test_two_batches_are_timed_and_the_lesser_counts():
    known = Schedule(63)
    for front_s in (1.0, 0.020):
        assert known.wants_timing
        known.fronts.append(front_s)
        known.forwards.append(1.5 * front_s)
    assert not known.wants_timing
    assert known.why_not() is None
    assert "takes 20.0 ms" in timed(2, 0.020, 0.030, padded=True).why_not()


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_short_run_is_computed_says_so_once_and_trains_as_without_a_cache(
    tmp_path, caplog, workers
):
    caplog.set_level(logging.INFO, "egeria")
    losses = []
    for gate in ("auto", "never"):
        with cached(tmp_path / gate, gate=gate) as (model, cache):
            loader = EgeriaLoader(
                Images(), 8, shuffle=True, cache=cache, seed=3, num_workers=workers
            )
            losses.append(train_steps(model, loader, sgd(model), 4)[0])
            stats = cache.stats()
            assert (stats.hits, stats.misses, stats.why_not) == (0, 4 * 48, None)
            if gate == "auto":
                assert stats.gate.startswith("postponed: 6 batches an epoch")
                assert stats.num_samples == 0
    with cached(tmp_path / "auto") as (_, cache):  # the next run knows how long this one was, and
        # looks at no data for that note
        assert (cache.api.policy.num_epochs["train, 6"], cache.api.next_pass_of(None)) == (4, None)
    assert losses[0] == losses[1]
    assert sum("would hardly win back" in r.getMessage() for r in caplog.records) == 1
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_a_front_that_training_mode_does_not_change_is_left_to_itself_until_a_pass_begins(tmp_path):
    losses, data = {}, [(torch.ones(4) * number, number % 3) for number in range(24)]
    for boundary in ("0", "auto", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        model[0].requires_grad_(False)
        with ActivationCache(model, tmp_path / str(boundary), boundary) as cache:
            loader, steps, forward = EgeriaLoader(data, 4, cache=cache), [], model.forward

            def change(step, model=model, steps=steps, forward=forward):
                model[0].requires_grad_(step in (8, 9))
                steps.append(model.__dict__.get("forward"))
                if step == 15:
                    model.forward = lambda x: forward(x) / 2

            losses[boundary] = train_steps(model, loader, sgd(model), 4, on_step=change)[0]
            assert set(steps[3:6]) == {forward if boundary is None else None}
            assert steps[-1] is not None
    assert losses["0"] == losses["auto"] == losses[None]


class SlowImages(Images):
    """Samples that take a while to load."""

    def __getitem__(self, index):
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_loading_takes_counts_whoever_loads(tmp_path, workers):
    with cached(tmp_path, gate="auto") as (model, cache):
        loader = EgeriaLoader(SlowImages(), 8, cache=cache, num_workers=workers)
        train_steps(model, loader, sgd(model), 2, on_step=lambda _: cache.flush())
        assert cache.stats().hits > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_boundary_that_is_found_by_the_first_call_and_one_that_moves_are_timed_anew(
    tmp_path, workers
):
    losses = []
    for gate in ("auto", "never"):
        model = frozen_net()
        with ActivationCache(model, tmp_path / gate, "auto", gate=gate) as cache:
            loader = EgeriaLoader(
                Images(), 8, shuffle=True, cache=cache, seed=3, num_workers=workers
            )

            def move(step, cache=cache):
                if step == 8:  # in the middle of the second epoch
                    cache.set_boundary("layer1.0")

            losses.append(train_steps(model, loader, sgd(model), 4, on_step=move)[0])
            if gate == "auto":
                assert cache.stats().gate.startswith("postponed: 6 batches an epoch")
    assert losses[0] == losses[1]


def test_what_was_postponed_is_proved_when_it_is_seen_to_pay(tmp_path, monkeypatch):
    with cached(tmp_path, gate="auto") as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache)
        train_steps(model, loader, sgd(model), 2)
        assert cache.stats().num_samples == 0
        monkeypatch.setattr(schedule, "_MIXED_S", -1.0)
        train_steps(model, loader, sgd(model), 3, on_step=lambda _: cache.flush())
        assert cache.stats().hits > 0
