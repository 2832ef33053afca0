"""The benchmark of padded text runs end to end, and every sample of its epochs is a hit."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from docstrings import Docstrings
from torch.utils.data import Subset

from benchmarks.ragged import KINDS, TOKENS, Epochs, Shape, bytes_of_samples, time_of_hits
from benchmarks.report.sections import section_of

SMALL = Shape(width=16, num_layers=3)


@pytest.fixture(scope="module")
def data():
    whole = Docstrings(("json", "http"))
    return Subset(whole, range(0, len(whole), 3))


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_sample_once_and_the_next_one_has_other_batches(kind, data):
    lengths = [len(words) for words, _ in data]
    epochs = Epochs(kind, lengths)
    first = list(epochs)
    assert sorted(itertools.chain.from_iterable(first)) == list(range(len(data)))
    if kind == "token budget":
        assert all(max(lengths[i] for i in batch) * len(batch) <= TOKENS for batch in first)
    epochs.epoch = 1
    assert list(epochs) != first


def test_samples_take_less_than_half_of_what_padding_to_the_maximum_takes(data, tmp_path):
    assert bytes_of_samples(SMALL, data, tmp_path)["saved"] > 2


def test_epochs_of_hits_are_measured_end_to_end(data, tmp_path):
    torch.manual_seed(0)
    found = time_of_hits(SMALL, "token budget", data, tmp_path / "cache", 1)
    assert found["hit_rate"] == 1
    report = {"environment": {}, "epochs": [found]}
    assert section_of("ragged", report).tables
    json.dumps(report)
