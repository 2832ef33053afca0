"""docs/troubleshooting.md shows what the program says: each mistake is made here."""

from __future__ import annotations

import re

import pytest

from tests.docs.mistakes import DOCUMENT, MISTAKES, document


@pytest.fixture(scope="module")
def page():
    return document()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_is_what_is_said(page):
    assert DOCUMENT.read_text() == page, "run python -m tests.docs.mistakes"


def test_every_mistake_gets_a_message(page):
    titles = re.findall("^## (.*)$", page, re.MULTILINE)
    messages = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    assert titles == [one.title for one in MISTAKES]
    assert len(messages) == len(titles) >= 20
    for title, message in zip(titles, messages, strict=True):
        assert len(message.split()) >= 1, title
        assert not re.match("(AttributeError|KeyError|AssertionError)", message), title
