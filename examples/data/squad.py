"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018): questions, and the span that answers them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.files import DataError, digest
from data.tokenizer import BEGIN, END, PAD, Piece, Tokenizer

__all__ = ["Question", "Squad", "Window", "read_squad"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one paragraph."""

    key: str
    """Its `id` in the file."""
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]
    """Text and the character it starts at; none where the paragraph does not answer (2.0)."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a paragraph that fits beside the question."""

    question: int
    number: int
    tokens: list[int]
    pieces: list[Piece]
    """The context's pieces in the window."""
    offset: int
    """Place of the first of them in `tokens`."""
    start: int
    """Place of the answer's first token in `tokens`; 0 where the window does not hold it."""
    stop: int
    """Place of its last token."""


class Squad(Dataset[dict[str, Tensor]]):
    """Rows of `<begin> question <end> context <end>`, padded; long contexts give several windows.

    A row: `tokens`, int64 (length,); `segments`, int64 (length,), 1 from the context on; `mask`,
    bool (length,), False where a token is padding; `start` and `stop`, int64 (), the places of the
    answer's first and last token, 0 where the window does not hold it.

    Args:
        path: A file of the published form.
        tokenizer: Vocabulary.
        length: Tokens of a row.
        stride: Tokens of the context by which the next window lies further.
        question_length: Longer questions are cut.

    Raises:
        DataError: The file is not SQuAD, or an answer is not where it is said to be.
        ValueError: A window would have no room for the context.
    """

    def __init__(
        self,
        path: Path,
        *,
        tokenizer: Tokenizer,
        length: int = 384,
        stride: int = 128,
        question_length: int = 64,
    ) -> None:
        if length < question_length + 3 + 1:
            raise ValueError(f"length must be at least question_length + 4, got {length}")
        if not 0 < stride <= length - question_length - 3:
            raise ValueError(
                f"stride must be between 1 and {length - question_length - 3} (or words between "
                f"two windows are in none), got {stride}"
            )
        self.questions = read_squad(path)
        self.tokenizer = tokenizer
        self._shape = length, stride, question_length
        self.windows: list[Window] = []
        contexts: dict[str, list[Piece]] = {}
        self._contents = []
        for number, question in enumerate(self.questions):
            if question.context not in contexts:
                contexts[question.context] = tokenizer.split(question.context)
            self.windows += self._windows(number, question, contexts[question.context])
            self._contents.append(digest(question.text, question.context, repr(question.answers)))

    def _windows(self, number: int, question: Question, context: list[Piece]) -> Iterator[Window]:
        length, stride, question_length = self._shape
        head = [BEGIN, *self.tokenizer.encode(question.text)[:question_length], END]
        room = length - len(head) - 1
        for count, first in enumerate(range(0, max(1, len(context)), stride)):
            pieces = context[first : first + room]
            tokens = [*head, *(piece.token for piece in pieces), END]
            tokens += [PAD] * (length - len(tokens))
            start, stop = _span(question, pieces)
            if stop:
                start, stop = start + len(head), stop + len(head) - 1
            yield Window(number, count, tokens, pieces, len(head), start, stop)
            if first + room >= len(context):
                return

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index]
        tokens = torch.tensor(window.tokens)
        mask = tokens != PAD
        in_context = torch.arange(len(tokens)) >= window.offset
        return {
            "tokens": tokens,
            "segments": (mask & in_context).long(),
            "mask": mask,
            "start": torch.tensor(window.start),
            "stop": torch.tensor(window.stop),
        }

    def answer(self, index: int, start: int, stop: int) -> str:
        """Return the text between two places of a window's tokens, both included.

        "" where they are no span of its context: that says that there is no answer.
        """
        window = self.windows[index]
        first, last = start - window.offset, stop - window.offset
        if not 0 <= first <= last < len(window.pieces):
            return ""
        context = self.questions[window.question].context
        return context[window.pieces[first].start : window.pieces[last].stop]

    def sample_id(self, index: int) -> tuple[str, int]:
        """The question's `id` and the window's number."""
        window = self.windows[index]
        return self.questions[window.question].key, window.number

    def sample_version(self, index: int) -> str:
        """Digest of question, paragraph and answers, which may be corrected in the file."""
        return self._contents[self.windows[index].question]

    def fingerprint(self) -> str:
        """What else a row depends on: the vocabulary and how contexts are cut."""
        return f"{self.tokenizer.fingerprint()} {self._shape}"


def _span(question: Question, pieces: list[Piece]) -> tuple[int, int]:
    """Return first and one past the last piece of the first answer; (0, 0) if not all inside."""
    if not question.answers or not pieces:
        return 0, 0
    text, begin = question.answers[0]
    end = begin + len(text)
    if begin < pieces[0].start or end > pieces[-1].stop:
        return 0, 0
    inside = [i for i, p in enumerate(pieces) if p.stop > begin and p.start < end]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def read_squad(path: Path) -> list[Question]:
    """Return all questions of a file.

    Raises:
        DataError: The file is missing, no JSON, or not of SQuAD's form; two questions share an id.
    """
    if not path.is_file():
        raise DataError(
            f"{path} is missing; fetch train-v1.1.json and dev-v1.1.json from "
            "https://rajpurkar.github.io/SQuAD-explorer/ and give the folder that holds them"
        )
    try:
        articles = json.loads(path.read_bytes())["data"]
        found = [
            _question(path, entry, paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not SQuAD's JSON ({type(error).__name__}: {error}); expected "
            "data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}"
        ) from None
    if not found:
        raise DataError(f"{path} holds no question")
    keys = {question.key for question in found}
    if len(keys) != len(found):
        raise DataError(f"{path} has questions with the same id; it must name each question")
    return found


def _question(path: Path, entry: dict[str, Any], context: str) -> Question:
    answers = tuple((str(a["text"]), int(a["answer_start"])) for a in entry.get("answers", ()))
    for text, start in answers:
        if context[start : start + len(text)] != text:
            raise DataError(
                f"{path}: the answer {text!r} of question {entry['id']} is not at character "
                f"{start} of its paragraph; the file was changed or cut. Fetch it again"
            )
    return Question(str(entry["id"]), str(entry["question"]), context, answers)
