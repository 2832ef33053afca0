"""Short trainings: what a cache costs that has hardly time to win anything back.

Each is trained as with a plain DataLoader, with a cache in an empty directory and with one in the
directory that it has left, in turns, whole: from making the cache to closing it. The frozen front
is in inference mode in all of them, as with a cache.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from benchmarks.harness import environment, in_turns, parser, publish
from egeria_cache import ActivationCache, EgeriaLoader

BATCH = 16
PLAIN, COLD, WARM = "plain", "cold", "warm"


@dataclass(frozen=True)
class Case:
    """One short training."""

    model: nn.Module
    boundary: str
    data: Any
    epochs: int
    collate: Callable[[list[Any]], Any] | None = None

    def frozen(self) -> nn.Module:
        """Return a model of its own whose front is frozen."""
        model = copy.deepcopy(self.model).train()
        parent, _, last = self.boundary.rpartition(".")
        before = [f"{parent}.{number}".lstrip(".") for number in range(int(last) + 1)]
        for name in ["bert.embeddings"] * bool(parent) + before:
            model.get_submodule(name).requires_grad_(False).eval()
        return model


def images() -> Case:
    """400 images for 5 epochs, a small CNN of which the front half is frozen."""
    torch.manual_seed(0)
    blocks, channels = list[nn.Module](), 3
    for width, stride in ((16, 1), (32, 2), (32, 2), (64, 2)):
        conv = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        blocks.append(nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU()))
        channels = width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    data = [(torch.randn(3, 32, 32), number % 10) for number in range(400)]
    return Case(nn.Sequential(*blocks, head), "2", data, 5)


def texts(num: int, layers: int, epochs: int) -> Case:
    """Padded texts and a BERT of random weights, frozen up to its last layer."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=128,
    )  # fmt: skip
    sizes = torch.randint(8, 64, (num,)).tolist()
    data = [(torch.randint(1, 1000, (size,)), size % 2) for size in sizes]
    boundary = f"bert.encoder.layer.{layers - 2}"
    return Case(BertForSequenceClassification(config), boundary, data, epochs, _padded)


def features() -> Case:
    """A linear probe on 64 numbers a row, behind a frozen projection."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    data = [(torch.randn(64), number % 10) for number in range(2000)]
    return Case(model, "0", data, 5)


CASES: dict[str, Callable[[], Case]] = {
    "400 images, 5 epochs": images,
    "256 padded texts, 5 epochs": lambda: texts(256, 4, 5),
    "linear probe on 64 numbers, 2,000 rows, 5 epochs": features,
    "text classification, 1,000 rows, 3 epochs": lambda: texts(1000, 4, 3),
}


def _padded(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    ids = [row for row, _ in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": torch.tensor([label for _, label in rows]),
    }


def _loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        loss: Tensor = model(**batch).loss
        return loss
    return F.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, loader: Any, epochs: int) -> None:
    """Train what is not frozen."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(epochs):
        for batch in loader:
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


class Trainings:
    """The three ways to train one case; keeps what the cache said of itself."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.said: dict[str, list[Any]] = {COLD: [], WARM: []}

    def plain(self) -> None:
        """Train without a cache."""
        case, order = self.case, torch.Generator().manual_seed(1)
        loader: Any = DataLoader(
            case.data,
            BATCH,
            shuffle=True,
            collate_fn=case.collate,
            generator=order,
        )
        train(case.frozen(), loader, case.epochs)

    def cached(self, directory: Path, which: str) -> None:
        """Train with a cache of this directory."""
        case, order = self.case, torch.Generator().manual_seed(1)
        with ActivationCache(case.frozen(), directory, case.boundary) as cache:
            loader: Any = EgeriaLoader(
                case.data, BATCH, shuffle=True, collate_fn=case.collate, generator=order,
                cache=cache,
            )  # fmt: skip
            train(cache.model, loader, case.epochs)
            self.said[which].append(cache.stats())

    def rounds(self, count: int) -> Iterator[dict[str, Callable[[], object]]]:
        """Yield what to run in turns."""
        with tempfile.TemporaryDirectory() as text:
            left = Path(text) / "left"
            self.cached(left, WARM)
            self.said[WARM].clear()
            for number in range(count):
                cold = Path(text) / str(number)
                yield {
                    PLAIN: self.plain,
                    COLD: lambda cold=cold: self.cached(cold, COLD),  # type: ignore[misc]
                    WARM: lambda: self.cached(left, WARM),
                }


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one case."""
    trainings = Trainings(CASES[name]())
    trainings.plain()
    turns = in_turns(trainings.rounds(rounds))
    found: dict[str, Any] = {"training": name}
    found["plain_s"] = round(statistics.median(turns.work[PLAIN]), 3)
    for way in (COLD, WARM):
        pairs = zip(turns.work[way], turns.work[PLAIN], strict=True)
        walls = zip(turns.wall[way], turns.wall[PLAIN], strict=True)
        stats = trainings.said[way]
        found |= {
            f"{way}_vs_plain": round(statistics.median(a / b for a, b in pairs), 3),
            f"{way}_saved_s": round(statistics.median(b - a for a, b in walls), 2),
            f"{way}_said_s": round(statistics.median(one.saved_s for one in stats), 2),
            f"{way}_proof_s": round(statistics.median(one.proof_s for one in stats), 2),
            f"{way}_hits": stats[-1].hits,
        }
    return found | {"gate": stats[-1].gate}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print."""
    options_of = parser(__doc__)
    options_of.add_argument("--training", choices=list(CASES), action="append", help="repeatable")
    options_of.add_argument("--rounds", type=int, default=5)
    options = options_of.parse_args(argv)
    torch.set_num_threads(1)
    rounds = 1 if options.quick else options.rounds
    found = [measured(name, rounds) for name in options.training or CASES]
    publish("short", {"environment": environment(), "rounds": rounds, "trainings": found}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
