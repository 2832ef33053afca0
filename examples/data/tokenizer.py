"""A small word-piece tokenizer of our own: deterministic, kept as JSON, and it knows offsets.

Words are runs of letters and digits, lower case; every other character that is not white space is a
word of its own. The vocabulary holds the commonest words and all characters seen. A word outside it
is split greedily into the longest pieces that are inside, which always succeeds for characters that
were seen; pieces after the first are written with `##`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from data.files import DataError, digest

__all__ = ["BEGIN", "END", "PAD", "UNKNOWN", "Piece", "Tokenizer"]

SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
PAD, BEGIN, END, UNKNOWN = range(4)
WORD = re.compile(r"\w+|[^\w\s]")
LONGEST = 24
"""Longest piece that is looked for, in characters."""


class Piece(NamedTuple):
    """A token and the characters of the text that it stands for."""

    token: int
    start: int
    stop: int


class Tokenizer:
    """Text to token numbers and back.

    Args:
        pieces: The vocabulary, special pieces first; a piece's place is its number.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        if tuple(pieces[:4]) != SPECIAL:
            raise DataError(f"a vocabulary must begin with {', '.join(SPECIAL)}")
        self.pieces = list(pieces)
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self._known: dict[str, list[tuple[int, int, int]]] = {}

    @classmethod
    def build(cls, lines: Iterable[str], size: int = 16_000) -> Tokenizer:
        """Make a vocabulary of at most `size` pieces; the same lines always give the same one."""
        words: Counter[str] = Counter()
        for line in lines:
            words.update(word.lower() for word in WORD.findall(line))
        letters: Counter[str] = Counter()
        for word, count in words.items():
            for letter in word:
                letters[letter] += count
                letters["##" + letter] += count
        ranked = sorted(letters, key=lambda piece: (-letters[piece], piece))
        ranked += sorted(words.keys() - letters.keys(), key=lambda word: (-words[word], word))
        return cls([*SPECIAL, *ranked][:size])

    def __len__(self) -> int:
        return len(self.pieces)

    def split(self, text: str) -> list[Piece]:
        """Return the text's tokens with their offsets in it."""
        found = []
        for match in WORD.finditer(text):
            word = match[0].lower()
            if len(word) != len(match[0]):  # a few capitals have a longer small form
                word = match[0]
            if word not in self._known:
                self._known[word] = self._pieces_of(word)
            found += [
                Piece(token, match.start() + start, match.start() + stop)
                for token, start, stop in self._known[word]
            ]
        return found

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens."""
        return [piece.token for piece in self.split(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return words separated by spaces, up to the first end; special pieces are left out."""
        text = ""
        for token in tokens:
            if token == END:
                break
            piece = self.pieces[token]
            if token == UNKNOWN or token >= len(SPECIAL):
                text += piece[2:] if piece.startswith("##") and len(piece) > 2 else " " + piece
        return text.strip()

    def _pieces_of(self, word: str) -> list[tuple[int, int, int]]:
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for stop in range(min(len(word), start + LONGEST), start, -1):
                token = self._numbers.get(prefix + word[start:stop])
                if token is not None:
                    break
            else:
                stop, token = start + 1, UNKNOWN
            pieces.append((token, start, stop))
            start = stop
        return pieces

    def fingerprint(self) -> str:
        """Tells one vocabulary from another."""
        return digest(*self.pieces)

    def save(self, path: Path) -> None:
        """Write the vocabulary, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.pieces, ensure_ascii=False, indent=0), encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read what `save` wrote.

        Raises:
            DataError: The file is no vocabulary.
        """
        try:
            pieces = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(
                f"{path} is no vocabulary ({error}); delete it to have it made anew"
            ) from None
        if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
            raise DataError(f"{path} is no list of pieces; delete it to have it made anew")
        return cls(pieces)

    @classmethod
    def kept(cls, path: Path, lines: Iterable[str], size: int = 16_000) -> Tokenizer:
        """Return the vocabulary that is kept at `path`; make it from `lines` if there is none.

        It is made once: a vocabulary that followed the text would renumber every token, and with
        it all that was learnt.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            cls.build(lines, size).save(path)
        return cls.load(path)
