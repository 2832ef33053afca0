"""Rows of different sizes, the rules that sizes follow, and what collate functions do."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from egeria_cache import EgeriaLoader
from egeria_cache.batch import Axis, Lengths, Padding, flatten
from egeria_cache.ragged import PaddedRows, blank, pad_rows, widen
from egeria_cache.samples.collation import find_padding
from egeria_cache.skip.serve.call import Invocation
from egeria_cache.skip.serve.dynamic_shapes import DynamicShapes, OutputAxis, watched
from egeria_cache.skip.serve.padded import Rule
from egeria_cache.store.records.record import Rows
from tests.helpers.sentences import Encoder, Sentences, pad_by_eights, pad_left, pad_right
from tests.padded.test_loops import Run, assert_same

SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=5)


@given(SIZES, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_rows_come_back_from_padding_as_they_were(sizes, above, left, more, wider):
    rows = [torch.arange(1, h * w * 2 + 1).view(h, 2, w) for h, w in sizes]
    dims = ((0, above), (2, left))
    whole = [max(h for h, _ in sizes) + more, max(w for _, w in sizes)]
    padded = pad_rows(rows, dims, whole, -7)
    assert padded.shape == (len(rows), whole[0], 2, whole[1])
    assert int((padded != -7).sum()) == sum(row.numel() for row in rows)
    broad = widen(padded, dims, [whole[0] + wider, whole[1] + 1], -7)
    for one in (padded, broad):
        found = PaddedRows(one, dims, np.array(sizes))
        assert all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))
        assert torch.equal(blank(one, dims, np.array(sizes), -7), one)
        filled = blank(one, dims, np.array(sizes), 0)
        assert int((filled != 0).sum()) == sum(row.numel() for row in rows)
    assert widen(padded, dims, whole, 0) is padded


@given(
    st.integers(1, 40), st.integers(-20, 40), st.integers(1, 6),
    st.lists(st.integers(60, 400), min_size=1, max_size=12),
    st.lists(st.integers(60, 400), min_size=1, max_size=12),
)  # fmt: skip
@example(stride=2, offset=1, multiple=1, seen=[94, 95], asked=[100])
@example(stride=3, offset=0, multiple=1, seen=[61, 63, 60], asked=[200])
@settings(max_examples=150, deadline=None)
def test_a_rule_is_certain_only_where_it_is_right(stride, offset, multiple, seen, asked):
    def size(length):
        return (length - offset) // stride if stride > 1 else multiple * length + offset

    if len({size(length) for length in seen}) == 1:
        return
    rule = Rule({(7, length): size(length) for length in seen})
    assert rule.explains
    for length in asked:
        certain = rule.at((7, length))
        assert certain is None or certain == size(length)
        assert rule.least((7, length)) <= size(length) <= rule.most((7, length))
        before = rule.most((7, length)) - rule.least((7, length))
        assert rule.add((7, length), size(length))
        assert before >= rule.most((7, length)) - rule.least((7, length)) == 0


def test_a_rule_that_may_follow_either_of_two_lengths_waits_until_they_differ():
    rule = Rule({(length, length): length + 1 for length in (5, 9)})
    assert rule.at((12, 12)) == 13
    assert rule.at((12, 8)) is None
    assert rule.add((12, 8), 9)
    assert rule.at((30, 20)) == 21
    assert not rule.add((30, 20), 25)


def test_what_follows_no_rule_is_said():
    rule = Rule({(length,): length**2 for length in (4, 9)})
    assert [rule.add((length,), length**2) for length in (30, 70)][-1] is False
    assert not rule.explains


def leaves(batch, size):
    return flatten(batch, size)[1]


@pytest.mark.parametrize("collate", [pad_right, pad_left, pad_by_eights])
def test_padding_is_found(collate):
    sizes = (3, 9, 5, 12)
    samples = [(torch.arange(1, size + 1), i) for i, size in enumerate(sizes)]
    alone = [leaves(collate([sample]), 1) for sample in samples]
    found = find_padding(leaves(collate(samples), 4), alone)
    assert found == Padding((Axis("[0]", 0, collate is pad_left),), {"[0]": 0})
    own = np.array([[rows["[0]"].shape[1]] for rows in alone])
    together = leaves(collate(samples), 4)["[0]"]
    lengths = Lengths(found, own, (together.shape[1],))
    rows = list(lengths.rows("[0]", together))
    assert torch.equal(found.padded("[0]", rows, lengths.whole), together)


def test_each_leaf_has_a_value_and_a_side_of_its_own():
    def collate(samples):
        longest = max(map(len, samples))
        right = [F.pad(row, (0, longest - len(row)), value=-100) for row in samples]
        left = [F.pad(row * 1.5, (longest - len(row), 0), value=0.5) for row in samples]
        return {"labels": torch.stack(right), "scores": torch.stack(left),
                "square": torch.stack([F.pad(torch.outer(row, row), (0, longest - len(row)) * 2)
                                       for row in samples])}  # fmt: skip

    samples = [torch.arange(1, size + 1) for size in (2, 5, 3)]
    alone = [leaves(collate([sample]), 1) for sample in samples]
    found = find_padding(leaves(collate(samples), 3), alone)
    assert found is not None
    assert found.values == {"['labels']": -100, "['scores']": 0.5, "['square']": 0}
    assert found.dims("['scores']") == ((0, True),)
    assert found.dims("['square']") == ((0, False), (1, False))


def test_what_is_no_padding_is_not_taken_for_it():
    def noisy(samples):
        longest = max(map(len, samples))
        rows = [F.pad(row, (0, longest - len(row))) for row in samples]
        return torch.stack(rows) + torch.arange(longest)

    def shortest(samples):
        size = min(map(len, samples))
        return torch.stack([row[:size] for row in samples])

    def longer(samples):
        longest = max(map(len, samples)) + len(samples) - 1
        return torch.stack([F.pad(row, (0, longest - len(row))) for row in samples])

    samples = [torch.arange(1, size + 1) for size in (2, 5, 3)]
    for collate in (noisy, shortest, longer):
        alone = [leaves(collate([sample]), 1) for sample in samples]
        assert find_padding(leaves(collate(samples), 3), alone) is None


def test_the_writers_queue_counts_the_memory_that_padded_rows_hold():
    padded = torch.zeros(3, 10, 4)
    short = PaddedRows(padded, ((0, False),), np.array([[1], [2], [1]]))
    rows = Rows(False, {"a": short, "b": [1, 2, 3]})
    assert sum(one.nbytes for one in rows.tensors()) == padded.nbytes == 480
    assert rows.num_bytes() == sum(row.nbytes for row in short) == 64
    assert [one is padded for one in rows.tensors()] == [True]


def test_an_output_of_another_shape_than_was_proved_is_handed_out_as_it_is():
    """Code behind the boundary may return something else now and then."""
    axis = OutputAxis(1, Rule.longer_by(0, 0), False)
    growth = DynamicShapes({}, {}, (False,), (9,), frozenset(), outputs={0: axis})
    growth.proof.missing = 1.0
    lengths = Lengths(Padding((Axis("x", 0),), {"x": 0}), np.array([[4], [9]]), (9,))
    batch = SimpleNamespace(lengths=lengths)
    call = dataclasses.replace(Invocation.of((), {}), batch=batch)
    for output in (torch.zeros(()), torch.zeros(2), torch.zeros(2, 5), "text", [], {"a": None}):
        assert watched(growth, call, output, lambda: pytest.fail("nothing was read")) is output
    hidden = torch.ones(2, 9, requires_grad=True) * 2
    found: list[bool] = []
    assert watched(growth, call, hidden, lambda: found.append(True)) is hidden
    hidden.sum().backward()
    assert found == [True]


# Batches with lists of one item per sample, as detection and segmentation have them.


class Scenes(Dataset[Any]):
    """Images of one size, or of several, each with some boxes."""

    def __init__(self, num_samples: int, *, sizes: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        self.scenes = []
        for i in range(num_samples):
            height, width = torch.randint(8, 16, (2,), generator=draw).tolist()
            shape = (1, height, width) if sizes else (1, 12, 12)
            boxes = torch.rand(int(torch.randint(0, 5, (), generator=draw)), 4, generator=draw)
            target = {"boxes": boxes, "labels": torch.arange(len(boxes)) % 3, "image_id": i}
            self.scenes.append((torch.rand(shape, generator=draw), target))

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Any:
        image, target = self.scenes[index]
        return image.clone(), {k: v.clone() if isinstance(v, Tensor) else v
                               for k, v in target.items()}  # fmt: skip


class Detector(nn.Module):
    """A convolutional front, a head, and a loss over all boxes if it is given any."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, images: Tensor, targets: Any = None, mask: Tensor | None = None) -> Tensor:
        hidden = self.front(images)
        if mask is None:
            boxes = self.head(hidden.mean((2, 3)))
        else:
            weights = mask[:, None].to(hidden.dtype)
            boxes = self.head((hidden * weights).sum((2, 3)) / weights.sum((2, 3)))
        return boxes if targets is None else loss_of(boxes, targets)


def loss_of(boxes: Tensor, targets: Any) -> Tensor:
    pairs = zip(boxes, targets, strict=True)
    return sum((F.l1_loss(b.expand_as(t["boxes"]), t["boxes"], reduction="sum") for b, t in pairs),
               boxes.sum() * 0)  # fmt: skip


def stacked(samples: Any) -> Any:
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), targets


def as_dict(samples: Any) -> Any:
    images, targets = zip(*samples, strict=True)
    boxes = [target["boxes"] for target in targets]
    return {"images": torch.stack(images), "boxes": boxes, "ids": [t["image_id"] for t in targets]}


def padded(samples: Any) -> Any:
    """Pad images to the largest height and width of the batch, with a mask."""
    images, targets = zip(*samples, strict=True)
    height, width = (max(image.shape[i] for image in images) for i in (1, 2))
    room = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    rows = [F.pad(image, pad) for image, pad in zip(images, room, strict=True)]
    ones = [torch.ones(image.shape[1:], dtype=torch.bool) for image in images]
    masks = [F.pad(one, pad) for one, pad in zip(ones, room, strict=True)]
    return torch.stack(rows), torch.stack(masks), list(targets)


def in_the_loop(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    return loss_of(model(images), targets)


def in_the_model(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    return model(images, list(targets))


def from_a_dict(model: nn.Module, batch: Any) -> Tensor:
    assert type(batch["boxes"]) is list
    assert type(batch["ids"]) is list
    targets = [{"boxes": boxes} for boxes in batch["boxes"]]
    return loss_of(model(batch["images"]), targets)


def with_a_mask(model: nn.Module, batch: Any) -> Tensor:
    images, mask, targets = batch
    return loss_of(model(images, mask=mask), targets)


def scaling(model: nn.Module, batch: Any) -> Tensor:
    """Writes to a list of the batch, which is stored as it was."""
    for target in batch[1]:
        target["boxes"] *= 0.5
    return in_the_loop(model, batch)


def run(data: Any, collate: Any, step: Any, directory: Any, size: int = 8, **options: Any) -> Any:
    """Return the run, and the batches that its loop was given."""
    seen: list[Any] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch)
        return step(model, batch)

    draw = torch.Generator().manual_seed(1)
    batches = {"batch_size": size, "shuffle": True, "generator": draw}
    ran = Run(Detector, data, collate, directory, front=("front",), step=noting, batches=batches,
              **options)  # fmt: skip
    ran.epochs(3)
    if ran.cache is not None:
        ran.cache.close()
    return ran, seen


# A batch of two: a tuple of two, and one of them a tuple of two, is not taken for a list.
CASES = {
    "targets for the loop": (Scenes(40), stacked, in_the_loop, 8),
    "targets for the model": (Scenes(40), stacked, in_the_model, 8),
    "lists in a dict": (Scenes(40), as_dict, from_a_dict, 8),
    "images padded in two directions": (Scenes(40, sizes=True), padded, with_a_mask, 8),
    "as many samples as parts": (Scenes(40), stacked, in_the_loop, 2),
    "a list that the loop writes to": (Scenes(40), stacked, scaling, 8),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_served_as_computed(directory, name, workers):
    data, collate, step, size = CASES[name]
    plain, batches = run(data, collate, step, None, size, workers=workers)
    served, given = run(data, collate, step, directory, size, workers=workers)
    assert_same(plain, served)
    assert served.hits == [0, 40, 40]
    for theirs, ours in zip(batches, given, strict=True):
        assert_alike(theirs, ours)


def test_images_in_a_list_are_given_as_they_are(directory):
    """The model is called with a list, whose tensors do not know their samples."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        images, targets = batch
        return loss_of(torch.cat([model(image[None]) for image in images]), targets)

    def collate(samples: Any) -> Any:
        return tuple(zip(*samples, strict=True))

    data = Scenes(24, sizes=True)
    plain, served = (run(data, collate, step, place)[0] for place in (None, directory))
    assert served.losses == plain.losses
    assert served.hits == [0, 0, 0]


def assert_alike(theirs: Any, ours: Any) -> None:
    """The same structure and values; an image without data has its shape."""
    if isinstance(theirs, Tensor):
        assert theirs.shape == ours.shape
        if theirs.dim() < 3:
            assert torch.equal(theirs, torch.as_tensor(ours))
    elif isinstance(theirs, dict):
        assert theirs.keys() == ours.keys()
        for key in theirs:
            assert_alike(theirs[key], ours[key])
    elif isinstance(theirs, list | tuple):
        assert type(theirs) is type(ours)
        assert len(theirs) == len(ours)
        for pair in zip(theirs, ours, strict=True):
            assert_alike(*pair)
    else:
        assert theirs == ours


# Any order of events in training on padded batches, against the same training without a cache.

FRONTS = ((), ("embed", "layers.0"), ("embed", "layers.0", "layers.1"))

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("epoch"), st.permutations(range(24)), st.integers(1, 9)),
        st.tuples(st.just("move"), st.integers(0, 2), st.none()),
    ),
    min_size=3,
    max_size=9,
)


@given(EVENTS, st.sampled_from([pad_right, pad_left]), st.integers(0, 2))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_epochs_and_moves(events, collate, lasting):
    data = Sentences(24)
    data.tokens[: 8 * lasting] = [row[:4].repeat(2) for row in data.tokens[: 8 * lasting]]
    with tempfile.TemporaryDirectory() as directory:
        plain = Run(Encoder, data, collate)
        served = Run(Encoder, data, collate, Path(directory, "cache"))
        assert served.cache is not None
        for run in (plain, served):  # a loss that jumps makes 1e-6 of rounding 6e-5 in one step
            run.optimizer = torch.optim.SGD(run.model.parameters(), 0.02)
        with served.cache:
            for kind, what, size in events:
                for run in (plain, served):
                    if kind == "move":
                        run.move(*FRONTS[what])
                        continue
                    batches = [what[i : i + size] for i in range(0, 24, size)]
                    run.loader = (
                        run.loader._around(batches)
                        if isinstance(run.loader, EgeriaLoader)
                        else type(run.loader)(data, batch_sampler=batches, collate_fn=collate)
                    )
                    run.epochs(1)
            assert_same(plain, served)
            assert served.cache.stats().audit_failures == 0
