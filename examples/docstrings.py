"""Real text of real lengths that every machine has, and an encoder small enough for two CPU cores.

The docstrings of Python's own standard library: half of them have fewer than 20 words, and one in
twenty has more than 170. The task is to tell which package one comes from.
"""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

__all__ = ["PACKAGES", "VOCABULARY", "Docstrings", "Encoder", "pad"]

PACKAGES = (
    "asyncio", "email", "http", "importlib", "logging", "mailbox", "multiprocessing", "tarfile",
    "unittest", "xml",
)  # fmt: skip
VOCABULARY = 4096
PADDING, START = 0, 1
_WORD = re.compile(r"[A-Za-z]+|\d+|[^\sA-Za-z\d]")
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "__pycache__"}

Sample = tuple[Tensor, int]


class Docstrings(Dataset[Sample]):
    """Docstrings as words, int64 of shape (L,), and the number of the package each comes from.

    Args:
        packages: Modules or packages of the standard library.
        max_length: Longer ones are cut here.

    Raises:
        FileNotFoundError: The interpreter's library lacks one of them.
    """

    def __init__(self, packages: Sequence[str] = PACKAGES, max_length: int = 128) -> None:
        found = [
            (_codes(text, max_length), label)
            for label, package in enumerate(packages)
            for text in _docstrings(package)
        ]
        self._words = torch.tensor([code for codes, _ in found for code in codes])
        self.labels = [label for _, label in found]
        self.lengths = [len(codes) for codes, _ in found]
        self._ends = list(itertools.accumulate(self.lengths))
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        end = self._ends[index]
        return self._words[end - self.lengths[index] : end], self.labels[index]


def pad(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Pad a batch to its longest sample: words (B, T), int64, and labels (B,)."""
    words = pad_sequence([one for one, _ in samples], batch_first=True, padding_value=PADDING)
    return words, torch.tensor([label for _, label in samples])


class Block(nn.Module):
    """Self-attention and feed-forward, each normalised first; (B, T, W) to (B, T, W)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Encoder(nn.Module):
    """Words (B, T) to logits (B, C); what is padded is seen by nobody.

    Args:
        num_classes: C.
        num_blocks: Of the encoder.
        width: W.
        max_length: Largest T.
    """

    def __init__(
        self, num_classes: int, num_blocks: int = 6, width: int = 128, max_length: int = 128
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        mask = (words != PADDING)[:, None, None]
        x = self.words(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def _docstrings(package: str) -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    path = root / package
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    files = [file for file in files if not _NOT_LIBRARY & set(file.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"there is no Python source in {path}")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own
            tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


def _codes(text: str, max_length: int) -> list[int]:
    words = _WORD.findall(text.lower())[: max_length - 1]
    return [START, *(2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words)]
