"""Training on padded batches, served, is the same as computed: in any loop, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.samples import LoaderSource
from egeria_cache.skip.prove.dry_run import DryRun
from tests.helpers.sentences import (
    ByTokens,
    Encoder,
    Listener,
    Sentences,
    Waves,
    classify,
    freeze_front,
    masked_mean,
    pad_by_eights,
    pad_left,
    pad_right,
    pad_waves,
)

FRONT = ("embed", "layers.0")


class Run:
    """One training run, cached if it has a directory; `losses` and `hits` per epoch."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: Any,
        collate: Callable[..., Any],
        directory: Path | None = None,
        *,
        front: tuple[str, ...] = FRONT,
        step: Callable[..., Any] = classify,
        options: dict[str, Any] | None = None,
        cached: dict[str, Any] | None = None,
        batches: dict[str, Any] | None = None,
        workers: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.model = model().train()
        freeze_front(self.model, *front)
        self.front = front
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.step, self.data = step, data
        generator = torch.Generator().manual_seed(1)
        how = batches or {"batch_size": 8, "shuffle": True, "generator": generator}
        how = {**how, "collate_fn": collate, "num_workers": workers}
        self.cache = None
        if directory is not None:
            self.cache = ActivationCache(
                self.model, directory, front[-1], **{"gate": "always", **(options or {})}
            )
            how |= {"cache": self.cache, **(cached or {})}
            self.loader: Any = EgeriaLoader(data, **how)
        else:
            self.loader = DataLoader(data, **how)
        self.losses: list[float] = []
        self.hits: list[int] = []

    def epochs(self, number: int) -> Run:
        torch.manual_seed(9)  # for collate functions that draw
        for _ in range(number):
            for name in self.front if self.cache is None else ():
                self.model.get_submodule(name).eval()  # as a cache holds what is frozen
            before = 0 if self.cache is None else self.cache.stats().hits
            for batch in self.loader:
                self.train(batch)
            if self.cache is not None:
                self.cache.flush()
                self.hits.append(self.cache.stats().hits - before)
        return self

    def train(self, batch: Any) -> None:
        loss = self.step(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def move(self, *front: str) -> None:
        freeze_front(self.model, *front)
        self.model.train()
        self.front = front
        if self.cache is not None:
            self.cache.set_boundary(front[-1] if front else None)


def both(directory: Path, *args: Any, **kwargs: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    plain = Run(*args, **{k: v for k, v in kwargs.items() if k not in ("options", "cached")})
    served = Run(*args, directory, **kwargs)  # type: ignore[misc]
    assert served.cache is not None
    stack.enter_context(served.cache)
    stack.runs = plain, served  # type: ignore[attr-defined]
    return stack


def assert_same(plain: Run, served: Run) -> None:
    assert len(plain.losses) == len(served.losses)
    torch.testing.assert_close(served.losses, plain.losses, rtol=1e-5, atol=1e-5)


def compared(directory: Path, *args: Any, epochs: int = 3, **kwargs: Any) -> Run:
    """Train both ways; return the served run, its cache closed, when its losses are the same."""
    with both(directory, *args, **kwargs) as stack:
        plain, served = (run.epochs(epochs) for run in stack.runs)  # type: ignore[attr-defined]
        assert_same(plain, served)
        served.stats = served.cache.stats()
    return served  # type: ignore[no-any-return]


def test_a_hit_batch_is_what_the_collate_function_would_have_given(directory):
    """Same length, side, values and dtypes: of tokens without data, and of what is kept."""

    def collate(samples):
        tokens, labels = pad_left(samples)
        return {"tokens": tokens, "mask": tokens != 0, "weights": (tokens != 0) * 2.5 - 1,
                "tags": torch.where(tokens == 0, -100, tokens % 3), "labels": labels}  # fmt: skip

    def step(model, batch):
        kept = [batch["mask"].float().sum(), batch["weights"].sum(), batch["tags"].sum()]
        seen.append([*map(float, kept), *batch["tokens"].shape])
        return F.cross_entropy(model(batch["tokens"]), batch["labels"])

    seen: list[list[float]] = []
    with both(directory, Encoder, Sentences(40), collate, step=step) as stack:
        plain, served = stack.runs
        plain.epochs(3)
        expected, seen[:] = list(seen), []
        served.epochs(3)
        assert seen == expected
        assert_same(plain, served)
        assert served.hits == [0, 40, 40]
        batch = next(iter(served.loader))
        assert [batch[key].dtype for key in ("tokens", "mask", "weights", "tags")] == [
            torch.int64, torch.bool, torch.float32, torch.int64,
        ]  # fmt: skip


def test_batches_of_the_same_samples_are_equal_to_the_bit(directory):
    batches = {"batch_size": 8}
    with both(directory, Encoder, Sentences(40), pad_right, batches=batches) as stack:
        plain, served = (run.epochs(3) for run in stack.runs)
        assert served.losses == plain.losses
        assert served.hits == [0, 40, 40]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_filled_up_to_a_number_of_tokens(directory, workers):
    data = Sentences(60)
    runs = []
    for place in (None, directory):
        batches = {"batch_sampler": ByTokens([len(row) for row in data.tokens], 120)}
        runs.append(Run(Encoder, data, pad_right, place, batches=batches, workers=workers))
    plain, served = (run.epochs(3) for run in runs)
    assert_same(plain, served)
    assert served.hits == [0, 60, 60]
    served.cache.close()


def test_a_second_run_starts_with_hits(directory):
    Run(Encoder, Sentences(40), pad_right, directory).epochs(1).cache.close()
    served = compared(directory, Encoder, Sentences(40), pad_right, epochs=2)
    assert served.hits[0] >= 40 - 4 * 8
    assert served.hits[1] == 40


def test_audits_compare_samples_without_their_padding(directory):
    served = compared(
        directory, Encoder, Sentences(40), pad_right, options={"audit_rate": 0.5}, epochs=4
    )
    stats = served.stats
    assert stats.audited >= 30
    assert stats.audit_failures == 0
    assert served.hits[1:] == [40, 40, 40]


def test_a_sample_that_changed_is_found_by_an_audit(directory):
    data = Sentences(40)
    run = Run(Encoder, data, pad_right, directory, options={"audit_rate": 1.0})
    run.epochs(1)
    for row in data.tokens:
        row.data[0] = (row[0] + 1) % 49 + 1
    run.epochs(2)
    assert run.cache.stats().voided >= 1
    run.cache.close()


@pytest.mark.parametrize(
    "draws", [{"augmentation_variants": 2, "reuse": None}, {"reuse": 3}], ids=["kept", "in_turns"]
)
def test_samples_that_are_augmented_at_random(directory, draws, monkeypatch):
    measured, measure = [], LoaderSource.measure
    monkeypatch.setattr(LoaderSource, "measure", lambda *a: measured.append(a) or measure(*a))

    class Noisy(Sentences):
        def __getitem__(self, index):
            tokens, label = super().__getitem__(index)
            return tokens.roll(int(torch.randint(3, ()))), label

    losses = []
    for gate in ("always", "never"):
        run = Run(
            Encoder, Noisy(40), pad_right, directory / gate, options={"gate": gate}, cached=draws,
        )  # fmt: skip
        run.epochs(6)
        losses.append(run.losses)
        if gate == "always" and draws["reuse"] is None:
            assert run.hits == [0, 0, 40, 40, 40, 40]
        elif gate == "always":
            assert run.cache.stats().partial_batches > 10 > len(measured)
            assert sum(run.hits[1:]) == pytest.approx(5 * 40 * 2 / 3, abs=25)
        run.cache.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


def loop_pools(how: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: nn.Module, batch: Any) -> Any:
        tokens, labels = batch
        return F.cross_entropy(how(model(tokens), tokens)[:, :3], labels)

    return step


def micro_batches(model: nn.Module, batch: Any) -> Any:
    parts = zip(*(leaf.chunk(2) for leaf in batch), strict=True)
    return sum(F.cross_entropy(model(rows), targets) for rows, targets in parts)


def of_slices(take: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, batch: F.cross_entropy(model(take(batch[0]).clamp(min=1)), batch[1])


RIGHT = (Encoder, Sentences(40), pad_right)
SERVED = {
    "right": (*RIGHT, {}),
    "left": (Encoder, Sentences(40), pad_left, {}),
    "by eights": (Encoder, Sentences(40), pad_by_eights, {}),
    "by workers": (*RIGHT, {"workers": 2}),
    "left, by workers": (Encoder, Sentences(40), pad_left, {"workers": 2}),
    # None of them shows padding; two samples together do.
    "one by one": (*RIGHT, {"batches": {"batch_sampler": [[i] for i in range(40)]}}),
    "in micro-batches": (*RIGHT, {"step": micro_batches}),
    "behind strided convolutions": (Listener, Waves(40), pad_waves, {"front": ("convs",)}),
    "cut at one length": (*RIGHT, {"step": lambda model, batch: F.cross_entropy(
        model(batch[0][:, :8]), batch[1])}),
    "a masked loss of the loop": (
        lambda: Encoder(pool="none"), Sentences(40), pad_right, {"step": loop_pools(masked_mean)},
    ),
}  # fmt: skip


@pytest.mark.cases(7)
@pytest.mark.parametrize("what", SERVED)
def test_padded_batches_are_served(directory, what):
    model, data, collate, kwargs = SERVED[what]
    served = compared(directory, model, data, collate, **kwargs)
    assert served.hits[2] == 40
    if what != "one by one":
        assert served.hits == [0, 40, 40]


def over_tokens(form: str, *, padding: bool) -> Callable[..., Any]:
    """Predict each token, from an output of another form; with or without what is padded."""

    def step(model: nn.Module, batch: Any) -> Any:
        scores, tokens = model(batch[0])[..., :3], batch[0]
        if form == "time first":
            scores = scores.transpose(0, 1)
        targets = torch.where(tokens == 0, 0 if padding else -100, tokens % 3)
        return F.cross_entropy(scores.reshape(-1, 3), targets.flatten(), ignore_index=-100)

    return step


@pytest.mark.parametrize("form", ["none", "folded", "time first"])
def test_what_stands_in_padded_scores_is_not_served_to_a_loss_that_reads_it(directory, form):
    """Where samples do not stand first in the model's output, nothing is known of its padding."""
    for padding in (False, True):
        kwargs = {"step": over_tokens(form, padding=padding)}
        place, data = directory / str(padding), Sentences(40)
        served = compared(place, lambda: Encoder(pool=form), data, pad_right, **kwargs)
        assert served.hits == ([0, 40, 40] if form == "none" and not padding else [0, 0, 0])


NO_POOL = lambda: Encoder(pool="none")  # noqa: E731
REFUSED = {
    "attention without a mask": (
        lambda: Encoder(masked=False), pad_right, classify, "'layers.0' depends",
    ),
    "a mean over all positions": (
        lambda: Encoder(pool="mean"), pad_right, classify, "output depends",
    ),
    "a statistic over time": (lambda: Encoder(norm=True), pad_right, classify, "output depends"),
    "a small term of the loss": (
        lambda: Encoder(pool="small term"), pad_right,
        lambda m, b: (out := m(b[0]))["term"] + F.cross_entropy(out["scores"], b[1]),
        "loss depends",
    ),
    "a mean over all positions in the loop": (
        NO_POOL, pad_right, loop_pools(lambda h, _: h.mean(1)), "the loss depends",
    ),
    "a maximum over all positions in the loop": (
        NO_POOL, pad_right, loop_pools(lambda h, _: h.amax(1)), "the loss depends",
    ),
    # Slices that move with the length of the batch.
    "every second from the left": (
        Encoder, pad_left, of_slices(lambda tokens: tokens[:, ::2]), "",
    ),
    "the last eight": (Encoder, pad_right, of_slices(lambda tokens: tokens[:, -8:]), ""),
    "the first eight of what is padded there": (
        Encoder, pad_left, of_slices(lambda tokens: tokens[:, :8]), "",
    ),
}  # fmt: skip


@pytest.mark.cases(6)
@pytest.mark.parametrize("what", REFUSED)
def test_what_reads_padding_is_refused_by_name(directory, what, caplog):
    model, collate, step, told = REFUSED[what]
    served = compared(directory, model, Sentences(40), collate, step=step)
    assert served.hits == [0, 0, 0]
    assert told in served.stats.why_not
    assert caplog.text.count("padded batches are not cached") == 1


class Detector(Encoder):
    """Is given its targets as well, of which each batch has another number."""

    def forward(self, tokens, targets):
        return super().forward(tokens)


def test_a_front_that_reads_padding_is_tried_once_at_each_place(directory, caplog, monkeypatch):
    tried, of_now = [], DryRun.run
    monkeypatch.setattr(DryRun, "run", lambda self: (tried.append(self.boundary), of_now(self))[1])
    model = Detector(masked=False)
    freeze_front(model, "embed", "layers.0", "layers.1")
    with ActivationCache(model, directory, boundary="auto", gate="always") as cache:
        loader = EgeriaLoader(Sentences(40), 8, collate_fn=pad_right, cache=cache)
        for number, (tokens, labels) in enumerate(loader):
            targets = [torch.zeros(number + 1, 4) for _ in labels]
            F.cross_entropy(model(tokens, targets), labels).backward()
    assert tried == ["layers.1", "layers.0", "embed"]
    assert caplog.text.count("padded batches are not cached") == 1


SORTED = {
    "longest first": lambda samples: pad_right(sorted(samples, key=lambda s: -len(s[0]))),
    "shortest first": lambda samples: pad_right(sorted(samples, key=lambda s: len(s[0]))),
    "by another number": lambda samples: pad_right(sorted(samples, key=lambda s: int(s[0].sum()))),
    "beginnings of others": lambda samples: pad_right(samples[::-1]),
}


@pytest.mark.parametrize("how", SORTED)
def test_samples_that_a_collate_function_sorts_are_found_in_their_batch(directory, how):
    """The first batches are in order by chance; many samples are the beginning of another. Hits may
    be shorter than the misses of their batch."""
    data = Sentences(40)
    for i in range(16):
        data.tokens[i] = torch.arange(1, 24 - i)
    whole = [list(range(i, i + 4)) for i in range(0, 40, 4)]
    ids = [batch[:2] for batch in whole]
    with both(directory, Encoder, data, SORTED[how], batches={"batch_sampler": ids}) as stack:
        for _ in range(4):
            plain, served = (run.epochs(1) for run in stack.runs)
            ids[:] = whole
        assert_same(plain, served)
        assert (served.hits[-1], served.cache.stats().why_not) == (40, None)


def test_rows_that_are_cut_after_they_were_padded_are_told_as_such(directory):
    def cut_twice(samples):
        tokens, labels = pad_right(samples)
        return tokens[:, :-1], tokens[:, 1:], labels

    def step(model, batch):
        return F.cross_entropy(model(batch[0]), batch[2])

    served = compared(directory, Encoder, Sentences(40), cut_twice, step=step)
    assert served.hits == [0, 0, 0]
    assert "cuts only the longest" in served.stats.why_not


@pytest.mark.parametrize("how", ["detached", "without gradients", "for nothing"])
def test_an_output_that_no_gradient_comes_back_through_waits_for_a_word(directory, how, caplog):
    """Nothing shows whether its padding is read."""

    def step(model, batch):
        with torch.set_grad_enabled(how != "without gradients"):
            given = model(batch[0])
        hidden = given.detach()
        assert hidden.numpy().shape == hidden.shape
        if how == "for nothing" and given.requires_grad:
            (0 * given).sum().backward()
        head = torch.zeros(3, 16, requires_grad=True)
        return F.cross_entropy(F.linear(masked_mean(hidden, batch[0]), head), batch[1])

    for padding, hits in (("proved", [0, 0, 0]), ("unread", [0, 40, 40])):
        kwargs = {"step": step, "front": ("embed", "layers", "head", "layers.2"),
                  "options": {"padding": padding}}  # fmt: skip
        place = directory / padding
        served = compared(place, lambda: Encoder(pool="none"), Sentences(40), pad_right, **kwargs)
        assert served.hits == hits
        told = served.stats.why_not or ""
        assert ("padding='unread'" in told) is (padding == "proved")
    assert caplog.text.count("are not served at 'layers.2' yet") == 1


def shortest(samples):
    tokens, labels = zip(*samples, strict=True)
    size = min(map(len, tokens))
    return torch.stack([row[:size] for row in tokens]), torch.tensor(labels)


def packed(samples):
    tokens, labels = zip(*samples, strict=True)
    return torch.cat(tokens)[None], torch.tensor(labels)


def masked_at_random(samples):
    tokens, labels = pad_right(samples)
    return torch.where(torch.rand(tokens.shape) < 0.2, 1, tokens), labels


def padded_beyond(samples):
    tokens, labels = pad_right(samples)
    return F.pad(tokens, (0, len(samples) % 2)), labels


def padded_with_noise(samples):
    tokens, labels = pad_right(samples)
    return torch.where(tokens == 0, torch.arange(tokens.shape[1])[None] + 1, tokens), labels


@pytest.mark.parametrize(
    "collate", [shortest, packed, masked_at_random, padded_beyond, padded_with_noise]
)
def test_a_collate_function_that_cannot_be_undone_is_refused_by_name(directory, collate, caplog):
    def step(model, batch):
        torch.manual_seed(len(losses))  # what the collate function draws must be the same
        losses.append(0)
        return F.cross_entropy(model(batch[0])[:1].expand(len(batch[1]), -1), batch[1])

    losses: list[int] = []
    kwargs = {"step": step, "batches": {"batch_size": 8}}
    with both(directory, Encoder, Sentences(40), collate, **kwargs) as stack:
        plain, served = stack.runs
        plain.epochs(3)
        losses.clear()
        served.epochs(3)
        assert_same(plain, served)
        assert served.hits == [0, 0, 0]
        assert "is not cached: " in caplog.text
        assert "leaf '[0]'" in served.cache.stats().why_not or "long where" in caplog.text


class Switching(Encoder):
    """Does something else to long batches."""

    def forward(self, tokens):
        if tokens.shape[1] > 100:
            tokens = torch.where(tokens == 0, 0, (tokens + 7) % 49 + 1)
        return super().forward(tokens)


def test_a_front_that_does_otherwise_in_longer_batches(directory, caplog):
    """One long sample comes after the proof, with short ones in its batch."""
    data = Sentences(40)
    data.tokens[30] = torch.arange(150) % 49 + 1
    batches = {"batch_sampler": [list(range(i, i + 8)) for i in range(0, 40, 8)]}
    with both(directory, Switching, data, pad_right, batches=batches) as stack:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
        for run in stack.runs:
            run.epochs(1)
            again = [order[i : i + 8] for i in range(0, 40, 8)]
            run.loader = (
                run.loader._around(again)
                if run.cache is not None
                else DataLoader(data, batch_sampler=again, collate_fn=pad_right)
            )
            run.epochs(2)
        plain, served = stack.runs
        assert_same(plain, served)
        assert served.hits[2] == 32, "all but the batch with the long one"


def test_padding_that_shows_late_voids_what_was_stored_with_it(directory):
    """The first batches are of samples of one length, and look as if nothing were padded."""
    data = Sentences(48)
    data.tokens[:16] = [row[:1].expand(12).clone() for row in data.tokens[:16]]
    batches = {"batch_sampler": [list(range(i, i + 8)) for i in range(0, 48, 8)]}
    served = compared(directory, Encoder, data, pad_right, batches=batches, epochs=4)
    assert served.hits[-1] == 48


def test_disk_holds_no_padding(directory):
    data = Sentences(64, longest=200)
    run = Run(Encoder, data, pad_right, directory, options={"codec": "raw"}).epochs(1)
    tokens = sum(map(len, data.tokens))
    stored = run.cache.stats().raw_bytes
    assert tokens * 16 * 4 <= stored <= tokens * 16 * 4 * 1.1 + 64 * 400
    run.cache.close()
