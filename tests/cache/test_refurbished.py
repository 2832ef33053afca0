"""Random samples under a boundary: used some times, drawn anew in turns, and never silently."""

import gc
import json
import logging
from functools import partial
from itertools import islice
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from egeria_cache import ActivationCache, EgeriaLoader, sample_seed
from egeria_cache.batch import Missing
from egeria_cache.cache import loader_api
from egeria_cache.gate.policy import AuditPlan
from egeria_cache.inspect import main
from egeria_cache.samples import Clock, Draws
from egeria_cache.skip.serve import replay
from tests.helpers.gloo import run_ranks
from tests.helpers.nets import Images, frozen_net, sgd, train_steps
from tests.helpers.runs import assert_same, both, cached, resumable, run
from tests.helpers.steps import take_step


class Scheduled(Dataset):
    """What a loader should give: each sample seeded by hand with the draw that its epoch uses."""

    def __init__(self, draws, since):
        self.data, self.draws, self.since, self.epoch = Images(), draws, since, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        since = self.epoch if self.since is None else min(self.since, self.epoch)
        (draw,) = self.draws.at([index], Clock(self.epoch, since)).tolist()
        with torch.random.fork_rng([]):
            torch.manual_seed(sample_seed(self.draws.seed, index, draw))
            return self.data[index]


def scheduled(draws, *, epochs, boundary="layer1", since=0, shuffle=True, loop=iter):
    """Train as `run` does, without anything of a cache: the loss of every step."""
    model = frozen_net(boundary)
    data, optimizer, losses = Scheduled(draws, since), sgd(model), []
    front = [module for name, module in model.named_children() if name in ("stem", "layer1")]
    for data.epoch in range(epochs):
        model.train()
        for module in front if boundary else ():
            module.eval()
        for images, targets in loop(iter(DataLoader(data, 8, shuffle=shuffle))):
            loss = take_step(F.cross_entropy(model(images), targets), optimizer)
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("reuse", "kept", "workers"), [(4, 1, 0), (4, 1, 2), (2, 1, 0), (3, 2, 0), (None, 2, 0)]
)
def test_losses_are_those_of_the_same_schedule_without_a_cache(tmp_path, reuse, kept, workers):
    served = run(
        tmp_path, gate="always", epochs=7, reuse=reuse, augmentation_variants=kept,
        num_workers=workers,
    )  # fmt: skip
    torch.manual_seed(0)
    expected = scheduled(Draws(3, reuse, kept), epochs=7)
    torch.testing.assert_close(served[0], expected, rtol=1e-5, atol=1e-6)
    assert served[3].hits + served[3].misses == 7 * 48
    made = 48 * (1 + 6 / reuse) if reuse else 48 * kept
    assert served[3].misses == pytest.approx(made, rel=0.25)


def by_threes(batches, *, writes=False):
    while some := list(islice(batches, 3)):
        for images, _ in some if writes else ():
            images.mul_(2)
        yield from some


LOOPS = {
    "as_they_come": (iter, 0.6),
    "by_threes": (by_threes, 0.6),
    "written_to": (partial(by_threes, writes=True), 0.6),
    "some_left_out": (lambda batches: (b for n, b in enumerate(batches) if n % 3), 0.9),
    "twice": (lambda batches: (b for b in batches for _ in range(2)), 0.6),
    "in_turns": (lambda batches: ((x * (1 + n % 2), y) for n, (x, y) in enumerate(batches)), 1.1),
}


@pytest.mark.parametrize(("loop", "most"), LOOPS.values(), ids=list(LOOPS))
@pytest.mark.parametrize("workers", [0, 4])
def test_what_hits_leave_out_is_computed_for_batches_in_a_row(
    tmp_path, monkeypatch, loop, most, workers
):
    prefix, sizes, losses = replay.prefix, [], []
    monkeypatch.setattr(AuditPlan, "choose", lambda *_: None)
    monkeypatch.setattr(replay, "prefix", lambda *args: (sizes.append(args[-1]), prefix(*args))[1])
    with cached(tmp_path, audit_rate=0) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, seed=3, num_workers=workers)
        optimizer = sgd(model)
        for _ in range(8):
            losses += train_steps(model, loop(iter(loader)), optimizer)[0]
            cache.flush()
        stats = cache.stats()
    expected = scheduled(Draws(3, 4), epochs=8, shuffle=False, loop=loop)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert stats.hits > 48
    assert len(sizes) < most * stats.partial_batches
    if loop in {iter, by_threes}:
        assert sum(sizes) == stats.misses - 8 * stats.miss_batches, "each row once"


def given_in(batches, model, errors):
    """The first target of every batch of a pass; None where it raised one of the errors."""
    given = []
    while True:
        try:
            images, targets = next(batches)
            given.append(targets[0].item())
            model(images)
        except errors:
            given.append(None)
        except StopIteration:
            return given


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_sample_raises_that_is_loaded_ahead_comes_in_its_turn(tmp_path, workers):
    class Torn(Images):
        def __getitem__(self, index):
            if index == 32:
                raise ValueError("torn")
            return super().__getitem__(index)

    order = [None if n == 4 else one for n, one in enumerate(Images().targets[::8].tolist())]
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Torn(), 8, cache=cache, seed=3, num_workers=workers)
        for _ in range(5):
            assert given_in(iter(loader), model, ValueError) == order
            cache.flush()


@pytest.mark.parametrize("at", [2, 3])
def test_a_pass_goes_on_after_ctrl_c_in_what_is_loaded_ahead(tmp_path, monkeypatch, at):
    count = []

    def load(task):
        count.append(task)
        if len(count) == at:
            raise KeyboardInterrupt
        return load_task(task)

    with cached(tmp_path, audit_rate=0) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, seed=3)
        train_steps(model, loader, sgd(model), 5, lambda _: cache.flush())
        batches, load_task = iter(loader), loader.source.samples.load_task
        monkeypatch.setattr(loader.source.samples, "load_task", load)
        given = given_in(batches, model, KeyboardInterrupt)
    assert [one for one in given if one is not None] == Images().targets[::8].tolist()


def test_passes_that_share_persistent_workers_share_what_was_loaded_ahead(tmp_path):
    with cached(tmp_path, audit_rate=0) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, num_workers=2, persistent_workers=True)
        train_steps(model, loader, sgd(model), 5, lambda _: cache.flush())
        first = iter(loader)
        model(next(first)[0])
        second = iter(loader)  # DataLoader's shared iterator starts again
        given = [next(batches)[1][0].item() for batches in (second, first, second)]
        assert given + given_in(first, model, ()) == Images().targets[::8].tolist()


@pytest.mark.parametrize("pins", [False, True])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_collate_function_may_use_its_memory_again(tmp_path, pins):
    memory = torch.empty(8, 1, 10, 10), torch.empty(8, dtype=torch.long)

    def collate(samples):
        images, targets = default_collate(samples)
        return memory[0][: len(images)].copy_(images), memory[1][: len(images)].copy_(targets)

    served, computed = both(tmp_path, epochs=6, reuse=4, collate_fn=collate, pin_memory=pins)
    assert served[3].hits > 0
    assert_same(served, computed)


def test_what_is_computed_together_is_noted_together_or_not_at_all(tmp_path, monkeypatch):
    """No step is cheap for having left its misses to one that somebody has validated after."""
    prefix, note, noted, ran = replay.prefix, loader_api.LoaderApi.note_step, [], []

    noting = lambda *a, **options: (noted.append(a[2::2]), note(*a, **options))[1]  # noqa: E731
    monkeypatch.setattr(replay, "prefix", lambda *args: (ran.append(sleep(0.05)), prefix(*args))[1])
    monkeypatch.setattr(loader_api.LoaderApi, "note_step", noting)
    with cached(tmp_path, audit_rate=0) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, seed=3)
        for _ in range(7):
            for number, (images, _) in enumerate(loader):
                ran.clear()
                model(images)
                if ran and number:
                    model(images)
            cache.flush()
    assert min(spent for spent, entry in noted if entry and entry.num_misses) > 0.05 / 8


def test_what_was_computed_is_let_go_of_where_the_loop_holds_its_batches(tmp_path):
    with cached(tmp_path, audit_rate=0) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, seed=3)
        train_steps(model, loader, sgd(model), 4, lambda _: cache.flush())
        held = [(images, model(images)) for images, _ in loader]
        found = [one for one in gc.get_objects() if type(one) is Missing and one.known is not None]
    assert sum(bool(one.known[1]) for one in found) <= 1 < len(found) <= len(held)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_boundary_set_in_mid_run_goes_on_with_what_was_stored(tmp_path, workers):
    """From the step on, samples of that epoch are stored; the next one asks for most of them."""
    moves, settings = {8: "layer1", 20: "layer2", 27: None}, {"epochs": 7, "reuse": 3}
    settings |= {"boundary": None, "moves": moves, "num_workers": workers}
    served = run(tmp_path / "a", gate="always", **settings)
    computed = run(tmp_path / "b", gate="never", **settings)
    torch.testing.assert_close(served[0], computed[0], rtol=1e-5, atol=1e-6)
    assert served[3].hits > 0


def ranked(rank, directory, gate):
    """Losses of one of two ranks that share a directory, and how many batches were mixed."""
    model = frozen_net()
    wrapped = DistributedDataParallel(model)
    data, optimizer, losses = Images(), sgd(model), []
    with ActivationCache(wrapped, directory / gate, "layer1", gate=gate, audit_rate=0) as cache:
        sampler = DistributedSampler(data, seed=1)
        loader = EgeriaLoader(data, 8, sampler=sampler, cache=cache, seed=3, reuse=3)
        for epoch in range(6):
            sampler.set_epoch(epoch)
            wrapped.train()
            for images, targets in loader:
                loss = take_step(F.cross_entropy(wrapped(images), targets), optimizer)
                losses.append(loss.item())
            cache.flush()
            dist.barrier()
        return losses, cache.stats().partial_batches


def test_ranks_that_share_a_directory_train_as_if_all_were_computed(tmp_path):
    served = run_ranks(ranked, 2, tmp_path / "a", tmp_path, "always")
    computed = run_ranks(ranked, 2, tmp_path / "b", tmp_path, "never")
    for ours, theirs in zip(served, computed, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        assert ours[1] > 6
        assert theirs[1] == 0


interrupted = partial(resumable, reuse=3)


@pytest.mark.parametrize(("cut", "workers"), [(15, (0, 0)), (18, (0, 0)), (26, (0, 2))])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "another_machine"])
def test_a_run_resumed_in_mid_epoch_has_the_draws_it_would_have_had(
    tmp_path, cut, workers, elsewhere
):
    whole, *_ = interrupted(tmp_path / "whole", epochs=6)
    before, _, state = interrupted(tmp_path / "cut", epochs=6, until=cut, num_workers=workers[0])
    there = tmp_path / ("other" if elsewhere else "cut")
    after, *_ = interrupted(there, epochs=6, state=state, num_workers=workers[1])
    torch.testing.assert_close(before + after, whole, rtol=1e-5, atol=1e-6)


def test_a_later_run_goes_on_with_the_draws_that_are_stored(tmp_path):
    first = run(tmp_path, gate="always", epochs=5, reuse=4)
    second = run(tmp_path, gate="always", epochs=2, reuse=4)
    assert first[3].hits < 5 * 48
    assert second[3].hits >= 2 * 48 * 0.5, "served from its first epoch on"
    assert second[0][0] != pytest.approx(first[0][0]), "it has draws of its own"
    other = run(tmp_path, gate="always", epochs=1, reuse=8)
    assert other[0][0] == pytest.approx(first[0][0]), "another schedule begins with its first draws"


def test_show_tells_for_how_long_draws_are_used(tmp_path, capsys):
    run(tmp_path, gate="always", epochs=3, reuse=4)
    (generation,) = tmp_path.glob("gen-*")
    assert main([str(tmp_path), "show", generation.name]) == 0
    assert "used for 4 epochs each; 3 epochs were passed" in capsys.readouterr().out
    assert main([str(tmp_path), "show", generation.name, "--json"]) == 0
    random_draws = json.loads(capsys.readouterr().out)["random_draws"]
    assert random_draws == [{"reuse": 4, "kept": 1, "epochs": 3}]


@pytest.mark.parametrize(("reuse", "kept"), [(4, 1), (2, 1), (3, 2)])
def test_disk_holds_the_draws_in_use_and_no_others(tmp_path, reuse, kept):
    settings = {"gate": "always", "reuse": reuse, "augmentation_variants": kept}
    first = run(tmp_path / "first", epochs=1, **settings)[3]
    whole = run(tmp_path / "whole", epochs=12, **settings)[3]
    assert whole.misses > 2 * 48, "most draws were superseded"
    assert whole.num_samples == 48 * kept
    assert whole.bytes_on_disk <= 2 * kept * first.bytes_on_disk


def test_an_epoch_that_was_broken_off_is_begun_again_by_the_next_run(tmp_path):
    interrupted(tmp_path, epochs=6, until=9)
    losses, *_ = interrupted(tmp_path, epochs=1)
    assert losses != interrupted(tmp_path / "other", epochs=1)[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["(torch)", "used for 4 epochs", "75%", "0.1 MB", "reuse="]),
        ({"reuse": None}, ["for ever", "100%"]),
        ({"reuse": 1}, ["not cached", "reuse=1 every epoch draws anew"]),
        ({"reuse": 2, "augmentation_variants": 3}, ["3 draws of each", "50%", "0.2 MB"]),
    ],
    ids=["default", "for_ever", "fresh", "several"],
)
def test_what_is_done_with_random_samples_is_said_once(tmp_path, caplog, settings, words):
    caplog.set_level(logging.INFO)
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, **settings)
        train_steps(model, loader, sgd(model), 2)
    told = [r for r in caplog.records if r.getMessage().startswith("loader")]
    (line,) = [r for r in told if "draw random numbers" in r.getMessage()]
    assert all(word in line.getMessage() for word in words), line
    was_chosen = settings.get("reuse", 4) != 1 and bool(settings)
    assert line.levelno == (logging.INFO if was_chosen else logging.WARNING)


def test_draws_go_on_where_no_note_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_api, "write_json", lambda *_: (tmp_path / "no" / "folder").mkdir())
    with cached(tmp_path) as (model, cache):
        for _ in range(6):
            loader = EgeriaLoader(Images(), 8, cache=cache, reuse=2)
            train_steps(model, loader, sgd(model), on_step=lambda _: cache.flush())
        assert cache.stats().fresh_samples > 2 * 48


@pytest.mark.parametrize("moves", [False, True], ids=["modes", "weights"])
def test_states_in_turns_are_both_served_and_each_sample_is_counted(tmp_path, moves):
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Images(), 2, cache=cache)
        for epoch in range(8):
            model.train(moves or epoch % 2 == 0)
            next(model.parameters()).mul_((2.0 if epoch % 2 else 0.5) if moves else 1.0)
            for images, _ in loader:
                model(images)
                cache.flush()
        assert 48 < cache.stats().hits == 8 * 48 - cache.stats().misses


def test_what_is_refused_draws_anew_in_every_epoch(tmp_path):
    class Growing(Images):
        def __getitem__(self, index):
            return *super().__getitem__(index), torch.zeros(()) + self.num_loaded

    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Growing(), 8, cache=cache)
        seen = []
        for _ in range(3):
            for images, _targets, _ in loader:
                model(images)
                seen.append(images[0].sum().item())
        assert cache.stats().why_not is not None
    assert len({round(one, 5) for one in seen[:: len(loader)]}) == 3
