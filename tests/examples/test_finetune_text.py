"""The example of padded text trains to the same losses with and without the cache."""

import re

import finetune_text
import pytest


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
