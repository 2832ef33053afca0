"""Question answering: SQuAD with BERT (Devlin et al. 2019)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from data import Squad, Tokenizer
from data.files import first_present
from data.squad import read_squad
from torch import Tensor, nn
from torch.nn import functional as F
from training.settings import Settings

from tasks.base import Batches, Task, warm_up

__all__ = ["QuestionAnswering", "best_span", "f1"]

LONGEST = 30
"""Tokens of the longest answer that is looked for."""


class QuestionAnswering(Task):
    """BERT with a span head, AdamW, a linear learning rate; F1 as SQuAD's own script has it."""

    metric = "F1"
    lr = 1e-4

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        train = _file(settings.data, "train")
        self.tokenizer = Tokenizer.kept(
            settings.output / "vocabulary.json", _texts(train), size=30_522
        )
        length = settings.size or 384
        sizes = {
            "length": length,
            "question_length": min(64, length // 3),
            "stride": max(1, min(128, length // 3)),
        }
        self.train_set = Squad(train, tokenizer=self.tokenizer, **sizes)
        self.test_set = Squad(_file(settings.data, "dev"), tokenizer=self.tokenizer, **sizes)

    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return a small BERT and Base."""
        from benchmarks.models import Bert

        size, length = len(self.tokenizer), self.settings.size or 384
        return {
            "small": lambda: Bert(4, 128, 4, 512, size, length),
            "bert-base": lambda: Bert(vocabulary=size, max_length=max(512, length)),
        }

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

    def rate(self, step: int, total: int) -> float:
        """Rise over a tenth of the schedule, then fall to 0."""
        return min(warm_up(step, total), max(0.0, (total - step) / (0.9 * total)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross entropy of the answer's first and last place."""
        start, stop = _logits(model, batch)
        return (F.cross_entropy(start, batch["start"]) + F.cross_entropy(stop, batch["stop"])) / 2

    def score(self, model: nn.Module, batches: Batches) -> float:
        """Return the mean over the questions of the overlap with the nearest true answer."""
        questions = self.test_set.questions
        answerable = all(question.answers for question in questions)
        best: dict[int, tuple[float, str]] = {}
        index = 0
        for batch in batches:
            start, stop = (logits.float().cpu() for logits in _logits(model, batch))
            for row in range(len(start)):
                window = self.test_set.windows[index]
                inside = slice(window.offset, window.offset + len(window.pieces))
                value, span = best_span(start[row, inside], stop[row, inside])
                said = self.test_set.answer(index, *(window.offset + place for place in span))
                if not answerable and float(start[row, 0] + stop[row, 0]) > value:
                    value, said = float(start[row, 0] + stop[row, 0]), ""
                best[window.question] = max(
                    best.get(window.question, (-float("inf"), "")), (value, said)
                )
                index += 1
        scores = [
            max(f1(best[n][1], true) for true in [a for a, _ in question.answers] or [""])
            for n, question in enumerate(questions)
        ]
        return sum(scores) / len(scores)


def _logits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of first and last places, (B, T) each; padding is out of the question."""
    start, stop = model(batch["tokens"], batch["segments"], batch["mask"]).unbind(2)
    return start, stop


def best_span(start: Tensor, stop: Tensor) -> tuple[float, tuple[int, int]]:
    """Return the best sum of a start and a stop at most `LONGEST` places on, and the places."""
    if not len(start):
        return -float("inf"), (0, 0)
    sums = start[:, None] + stop[None, :]
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(LONGEST - 1)
    at = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    places = divmod(at, len(stop))
    return float(sums[places]), places


def f1(said: str, true: str) -> float:
    """Return the F1 of two answers' words, articles and punctuation left out."""
    left, right = _words(said), _words(true)
    if not left or not right:
        return float(left == right)
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right))


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _file(root: Path, split: str) -> Path:
    named = [root / f"{split}-v{version}.json" for version in ("1.1", "2.0")]
    return first_present(
        [*named, *sorted(root.glob(f"{split}*.json")), root / f"{split}.json"],
        f"SQuAD's {split} part",
        "Fetch it from https://rajpurkar.github.io/SQuAD-explorer/ and give its folder",
    )


def _texts(path: Path) -> Iterable[str]:
    questions = read_squad(path)
    yield from dict.fromkeys(question.context for question in questions)
    yield from (question.text for question in questions)
