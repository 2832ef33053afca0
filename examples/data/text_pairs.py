"""Two text files, a sentence a line: the same sentences in two languages (WMT, IWSLT, Tatoeba)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.files import DataError, digest, read_lines
from data.tokenizer import BEGIN, END, PAD, Tokenizer

__all__ = ["TextPairs", "pair_of_files"]


def pair_of_files(root: Path, split: str, languages: str | None) -> tuple[Path, Path]:
    """Return the source and the target file of a split, such as train.en and train.de.

    Args:
        root: The folder of the files.
        split: Stem of their names.
        languages: Their suffixes, such as "en-de"; None takes the only two in alphabetical order.

    Raises:
        DataError: They are missing, or more than two and none was chosen.
    """
    if languages is not None:
        suffixes = languages.split("-")
        if len(suffixes) != 2:
            raise DataError(f"languages are written as 'en-de', got {languages!r}")
    else:
        found = sorted(root.glob(f"{split}.*"))
        suffixes = [path.suffix[1:] for path in found if path.is_file()]
        if len(suffixes) != 2:
            names = ", ".join(path.name for path in found) or "none"
            raise DataError(
                f"{root} must hold two files named {split}.SOURCE and {split}.TARGET; found "
                f"{names}. Say which with --languages, for example --languages en-de"
            )
    paths = [root / f"{split}.{suffix}" for suffix in suffixes]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is missing; --languages names the two files' suffixes")
    return paths[0], paths[1]


class TextPairs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Three rows of tokens, int64 (length,): the source, what a decoder reads, what it must say.

    The last two are the target, one token apart: the former begins with `BEGIN`, the latter ends
    with `END`, as the source does. Padded with `PAD`; longer sentences are cut.

    Args:
        source: Text file, a sentence a line.
        target: The same sentences in the other language, in the same order.
        tokenizer: Vocabulary of both.
        length: Tokens a sentence, `END` counted in.

    Raises:
        DataError: The files differ in their number of lines, are empty, or not UTF-8.
    """

    def __init__(self, source: Path, target: Path, *, tokenizer: Tokenizer, length: int) -> None:
        pairs = read_pairs(source, target)
        self.tokenizer, self.length = tokenizer, length
        self.sources = [_padded(tokenizer.encode(s), length) for s, _ in pairs]
        self.targets = [_padded(tokenizer.encode(t), length) for _, t in pairs]
        self._ids, seen = [], Counter[str]()
        for pair in pairs:
            name = digest(*pair)
            self._ids.append((name, seen[name]))
            seen[name] += 1

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        said = self.targets[index]
        read = [BEGIN, *(PAD if token == END else token for token in said[:-1])]
        return torch.tensor(self.sources[index]), torch.tensor(read), torch.tensor(said)

    def sample_id(self, index: int) -> tuple[str, int]:
        """Digest of the two lines, and which of their occurrences it is.

        An edited line is another sample; moved lines stay the same.
        """
        return self._ids[index]

    def fingerprint(self) -> str:
        """What else a row depends on: the vocabulary and the length."""
        return f"{self.tokenizer.fingerprint()} {self.length}"


def read_pairs(source: Path, target: Path) -> list[tuple[str, str]]:
    """Return the pairs of lines; those of which one side is empty are left out."""
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise DataError(
            f"{source} has {len(left)} lines and {target} has {len(right)}: they are not the same "
            "sentences. Fetch both again, or cut them from the same corpus"
        )
    pairs = [(s, t) for s, t in zip(left, right, strict=True) if s.strip() and t.strip()]
    if not pairs:
        raise DataError(f"{source} and {target} hold no pair of sentences")
    return pairs


def _padded(tokens: Sequence[int], length: int) -> list[int]:
    row = [*tokens[: length - 1], END]
    return row + [PAD] * (length - len(row))
