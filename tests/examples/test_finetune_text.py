"""The example of padded text trains to the same losses with and without the cache."""

import re

import finetune_text
import pytest
import torch
from docstrings import PADDING, VOCABULARY, Docstrings, pad


def test_docstrings_are_of_many_lengths_and_padded_to_the_longest_of_a_batch():
    data = Docstrings(("json", "email"), max_length=64)
    assert max(data.lengths) == 64
    assert sum(data.lengths) / len(data) < 48
    for index, (words, label) in enumerate(data):
        assert len(words) == data.lengths[index]
        assert 0 < int(words.min()) <= int(words.max()) < VOCABULARY
        assert label in (0, 1)
    chosen = [data[i] for i in (0, 3, 5)]
    words, labels = pad(chosen)
    assert words.shape == (3, max(len(one) for one, _ in chosen))
    for row, (own, label), padded in zip(words, chosen, labels, strict=True):
        assert torch.equal(row[: len(own)], own)
        assert (row[len(own) :] == PADDING).all()
        assert padded == label


@pytest.mark.long
def test_both_ways_to_train_give_the_same_losses(tmp_path, capsys):
    arguments = ["--epochs", "2", "--samples", "96", "--cache", str(tmp_path)]
    assert finetune_text.main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"hits", said)
    first, second = (int(hits) for hits in re.findall(r"(\d+) of 96", said))
    assert first == 0
    assert second > 0
    worst = float(re.search(r"largest difference of two losses is (\S+)", said)[1])
    assert worst <= 1e-5
    assert float(re.search(r"kB, ([\d.]+) times as many", said)[1]) > 2
