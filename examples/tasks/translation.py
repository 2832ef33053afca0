"""Translation: a pair of text files with a transformer (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from data import DataError, TextPairs, Tokenizer
from data.text_pairs import pair_of_files, read_pairs
from data.tokenizer import PAD
from torch import Tensor, nn
from torch.nn import functional as F
from training.settings import Settings

from tasks.base import Batches, Task, warm_up

__all__ = ["Translation"]


class Translation(Task):
    """Encoder and decoder, Adam, an inverse square root of a learning rate; perplexity."""

    metric = "perplexity"
    lr = 1e-3

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        files = pair_of_files(settings.data, "train", settings.languages)
        self.tokenizer = Tokenizer.kept(
            settings.output / "vocabulary.json", (s for pair in read_pairs(*files) for s in pair)
        )
        length = settings.size or 64
        self.train_set = TextPairs(*files, tokenizer=self.tokenizer, length=length)
        self.test_set = None
        languages = "-".join(file.suffix[1:] for file in files)
        for split in ("valid", "val", "dev", "test"):
            try:
                files = pair_of_files(settings.data, split, languages)
            except DataError:
                continue
            self.test_set = TextPairs(*files, tokenizer=self.tokenizer, length=length)
            break

    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return Tiny and Base."""
        from benchmarks.models import Transformer

        size = len(self.tokenizer)
        return {
            "small": lambda: Transformer.tiny(size),
            "transformer-tiny": lambda: Transformer.tiny(size),
            "transformer-base": lambda: Transformer(vocabulary=size),
        }

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return Adam as in the paper."""
        return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9)

    def rate(self, step: int, total: int) -> float:
        """Rise over a tenth of the schedule, then fall as 1 / sqrt(step)."""
        warm = max(1, total // 10)
        factor: float = warm_up(step, total) * min(1.0, (warm / max(1, step)) ** 0.5)
        return factor

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross entropy per token, smoothed by 0.1."""
        source, read, said = batch
        logits = model(source, read).flatten(0, 1)
        return F.cross_entropy(logits, said.flatten(), ignore_index=PAD, label_smoothing=0.1)

    def score(self, model: nn.Module, batches: Batches) -> float:
        """Return e to the mean cross entropy per token, not smoothed."""
        total, tokens = 0.0, 0
        for source, read, said in batches:
            logits = model(source, read).flatten(0, 1)
            total += float(
                F.cross_entropy(logits, said.flatten(), ignore_index=PAD, reduction="sum")
            )
            tokens += int((said != PAD).sum())
        return math.exp(min(total / tokens, 700.0))
