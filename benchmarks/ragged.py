"""What padded text costs: bytes of a sample, and an epoch of hits beside an oracle.

    python -m benchmarks.ragged [--rounds 6] [--samples 2048] [--widths 128 256] [--json] [--quick]

Docstrings of the standard library, at most 128 words, and encoders as BERT's. The oracle trains the
active part alone on the same padded batches, whose activations lie in memory: nothing can be
faster. Both train on every epoch, in turns. Writes benchmarks/results/ragged.json (not with
--quick).
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from docstrings import PADDING, Docstrings, pad
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

from benchmarks.harness import Round, environment, in_turns, parser, publish, tell
from benchmarks.models import Bert
from benchmarks.models.bert import State
from egeria_cache import ActivationCache, EgeriaLoader

MAX_LENGTH = 128
BATCH_SIZE = 32
TOKENS = 1024
"""Of a batch with a budget, with its padding."""
WARM_UP = 1
NUM_FILLS = 3
"""Epochs at most until all samples are stored."""

Batches = list[list[int]]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """An encoder, and where it is cut."""

    width: int
    num_layers: int

    @property
    def stop(self) -> int:
        """How many layers are frozen: two thirds."""
        return round(self.num_layers * 2 / 3)


SIZES = ((128, 4), (128, 6), (256, 4), (256, 6))
SHAPES = tuple(Shape(width=width, num_layers=layers) for width, layers in SIZES)


class Classifier(Bert):
    """A text's class is told from its first word; (B, T) to (B, C)."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__(
            shape.num_layers, shape.width, 4, 4 * shape.width, 4096, MAX_LENGTH, dropout=0.0
        )
        self.span = nn.Linear(shape.width, num_classes)

    def enter(self, tokens: Tensor, *_: Tensor) -> State:
        """Embed, and see what is padded."""
        return super().enter(tokens, torch.zeros_like(tokens), tokens != PADDING)

    def leave(self, state: State) -> Tensor:
        """Return logits."""
        return self.span(state.h[:, 0])  # type: ignore[no-any-return]


class Epochs:
    """Batch sampler of one way to make batches; `epoch` says which one comes next."""

    def __init__(self, kind: str, lengths: Sequence[int]) -> None:
        self._kind, self._lengths, self.epoch = kind, np.array(lengths), 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def batches(self) -> Batches:
        """Of this epoch."""
        drawn = np.random.default_rng(self.epoch)
        order = drawn.permutation(len(self._lengths))
        if self._kind == "shuffled":
            return _cut(order)
        if self._kind == "by length":  # as transformers does: sorted within long parts
            parts = np.split(order, range(50 * BATCH_SIZE, len(order), 50 * BATCH_SIZE))
            by_length = [part[np.argsort(-self._lengths[part], kind="stable")] for part in parts]
            return _cut(np.concatenate(by_length))
        in_order = order[np.argsort(self._lengths[order] // 8, kind="stable")]
        filled = _filled(in_order, self._lengths)
        return [filled[i] for i in drawn.permutation(len(filled))]


KINDS = ("shuffled", "by length", "token budget")


def _cut(order: np.ndarray) -> Batches:
    return [order[i : i + BATCH_SIZE].tolist() for i in range(0, len(order), BATCH_SIZE)]


def _filled(order: np.ndarray, lengths: np.ndarray) -> Batches:
    """Fill each batch to the budget, padding included."""
    batches: Batches = [[]]
    longest = 0
    for index in order.tolist():
        longest = max(longest, int(lengths[index]))
        if batches[-1] and longest * (len(batches[-1]) + 1) > TOKENS:
            batches.append([])
            longest = int(lengths[index])
        batches[-1].append(index)
    return batches


def pad_to_maximum(samples: Sequence[tuple[Tensor, int]]) -> Batch:
    words, labels = pad(samples)
    return F.pad(words, (0, MAX_LENGTH - words.shape[1]), value=PADDING), labels


# ---- bytes ---------------------------------------------------------------------------------------


def bytes_of_samples(shape: Shape, data: Any, directory: Path) -> dict[str, Any]:
    """Store all samples at their own lengths, and all at the greatest."""
    found: dict[str, Any] = {}
    for name, collate in (("own", pad), ("maximum", pad_to_maximum)):
        model = _model(shape)
        path = directory / f"{name}-{shape.width}"
        with ActivationCache(model, path, _boundary(shape), gate="always") as cache:
            loader: Any = EgeriaLoader(data, BATCH_SIZE, collate_fn=collate, cache=cache)
            while cache.stats().num_samples < len(data):
                before = cache.stats().num_samples
                for batch in loader:
                    _loss(model(batch[0]), batch).backward()
                cache.flush()
                assert cache.stats().num_samples > before, cache.stats().why_not
            stats = cache.stats()
        found[f"{name}_bytes"] = round(stats.stored_bytes / len(data))
        found[f"{name}_bytes_on_disk"] = round(stats.bytes_on_disk / len(data))
    found["saved"] = round(found["maximum_bytes"] / found["own_bytes"], 3)
    return {"width": shape.width, **found}


# ---- time ----------------------------------------------------------------------------------------


class Contest:
    """One encoder that trains on hits, its copy that trains on activations in memory."""

    def __init__(self, shape: Shape, kind: str, data: Any, directory: Path) -> None:
        self.shape, self.data = shape, data
        self.model = _model(shape)
        self.oracle = copy.deepcopy(self.model)
        self.epochs = Epochs(kind, [len(words) for words, _ in data])
        self.cache = ActivationCache(self.model, directory, _boundary(shape), gate="always")
        self.loader: Any = EgeriaLoader(
            data, batch_sampler=self.epochs, collate_fn=pad, cache=self.cache
        )
        self.optimizers = [
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01)
            for m in (self.model, self.oracle)
        ]

    def fill(self) -> None:
        """Train until all samples are stored."""
        for self.epochs.epoch in range(NUM_FILLS):
            self.hits()
            self.cache.flush()
            if self.cache.stats().num_samples == len(self.data):
                return
        raise RuntimeError(f"not all samples are stored: {self.cache.stats().why_not}")

    def hits(self) -> None:
        """One epoch from the cache."""
        for batch in self.loader:
            self._step(0, self.model(batch[0]), batch)

    def alone(self, states: list[tuple[State, Batch]]) -> None:
        """One epoch of the oracle."""
        for state, batch in states:
            self._step(1, self.oracle.suffix(state, self.shape.stop), batch)

    def rounds(self, count: int) -> Iterator[Round]:
        """Yield epochs to be run in turns, each of other batches."""
        for number in range(count):
            self.epochs.epoch = NUM_FILLS + number
            batches = [pad([self.data[i] for i in ids]) for ids in self.epochs.batches]
            with torch.no_grad():
                states = [(self.oracle.prefix((b[0],), self.shape.stop), b) for b in batches]
            gc.collect()
            yield {"hits": self.hits, "oracle": partial(self.alone, states)}

    def _step(self, number: int, logits: Tensor, batch: Batch) -> None:
        self.optimizers[number].zero_grad()
        _loss(logits, batch).backward()
        self.optimizers[number].step()


def time_of_hits(
    shape: Shape, kind: str, data: Any, directory: Path, rounds: int
) -> dict[str, Any]:
    """Time epochs of hits and of the oracle."""
    contest = Contest(shape, kind, data, directory)
    with contest.cache:
        contest.fill()
        before = contest.cache.stats()
        times, work = in_turns(contest.rounds(WARM_UP + rounds), warm_up=WARM_UP)
        after = contest.cache.stats()
        num_batches = len(contest.epochs)
    return {
        "width": shape.width,
        "layers": shape.num_layers,
        "frozen": shape.stop,
        "batches": kind,
        "num_batches": num_batches,
        "oracle_s": round(times.median("oracle"), 4),
        "hits_vs_oracle": round(times.ratio("hits", "oracle"), 4),
        "work_vs_oracle": round(work.ratio("hits", "oracle"), 4),
        "hit_rate": round((after.hits - before.hits) / ((WARM_UP + rounds) * len(data)), 4),
    }


def _model(shape: Shape) -> Classifier:
    torch.manual_seed(0)
    model = Classifier(shape, 10)
    model.freeze(shape.stop)
    return model


def _boundary(shape: Shape) -> str:
    return f"blocks.{shape.stop - 1}"


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int, default=6)
    options_of.add_argument("--threads", type=int, default=1)
    options_of.add_argument("--samples", type=int, default=2048)
    options_of.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    shapes = [shape for shape in SHAPES if shape.width in options.widths]
    if options.quick:
        options.samples, options.rounds, shapes = 128, 2, [Shape(width=32, num_layers=3)]
    whole = Docstrings(max_length=MAX_LENGTH)
    chosen = np.linspace(0, len(whole) - 1, min(options.samples, len(whole))).astype(int)
    data: Any = Subset(whole, chosen.tolist())
    lengths = [len(words) for words, _ in data]
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        widths = {shape.width: shape for shape in shapes}
        stored = [bytes_of_samples(shape, data, directory) for shape in widths.values()]
        epochs = []
        for shape in shapes:
            for kind in KINDS:
                place = directory / f"{shape.width}-{shape.num_layers}-{kind}"
                epochs.append(time_of_hits(shape, kind, data, place, options.rounds))
                tell(str(epochs[-1]))
    report = {
        "environment": environment(1),
        "num_samples": len(data),
        "lengths": {
            "mean": round(float(np.mean(lengths)), 1),
            "median": float(np.median(lengths)),
            "p90": float(np.percentile(lengths, 90)),
            "max": max(lengths),
        },
        "rounds": options.rounds,
        "stored": stored,
        "epochs": epochs,
    }
    publish("ragged", report, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
