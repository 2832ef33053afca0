"""`cache-inspect fill`: everything is stored before training; the next run finds it."""

from __future__ import annotations

import json

import pytest
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.inspect.cli import main
from tests.cache.test_auto import Blocks as Trained
from tests.cache.test_auto import data, train
from tests.cache.test_filling import frozen_blocks

HERE = __name__


def all_trained():
    return Trained()


def loader_of_data():
    return DataLoader(data(), batch_size=8)


def call_with_inputs(model, batch):
    return model(batch[0])


def ask(capsys, directory, *argv, model="frozen_blocks", source="data"):
    code = main(
        ["fill", f"{HERE}:{model}", "--data", f"{HERE}:{source}", "--directory", str(directory),
         "--batch-size", "8", "--device", "cpu", *argv]
    )  # fmt: skip
    return code, capsys.readouterr()


@pytest.mark.parametrize("source", ["data", "loader_of_data"])
def test_the_next_run_finds_everything(capsys, directory, source):
    code, shown = ask(capsys, directory, "--forward", f"{HERE}:call_with_inputs", source=source)
    assert (code, shown.out) == (0, "32 of 32 samples are stored\n")
    expected = train(frozen_blocks(), EgeriaLoader(data(), batch_size=8), 3)
    model = frozen_blocks()
    with ActivationCache(model, directory, "auto", gate="always", audit_rate=0) as cache:
        assert train(model, EgeriaLoader(data(), batch_size=8, cache=cache), 3) == pytest.approx(
            expected, abs=1e-6
        )
        assert cache.stats().num_samples == 32
        assert cache.stats().hits >= 64
    code, shown = ask(capsys, directory, "--json", source=source)
    assert code == 0
    assert json.loads(shown.out) == {"samples": 32, "stored": 32, "why_not": None}


def test_mistakes_are_told_in_one_line(capsys, directory):
    for argv, words in (
        (("--boundary", "blocks.9"), "blocks.9"),
        (("--device", "nowhere"), "--device"),
        (("--limit", "many"), "many"),
    ):
        code, shown = ask(capsys, directory, *argv)
        assert code == 2
        assert words in shown.err
        assert len(shown.err.splitlines()) == 1
    code, shown = ask(capsys, directory, model="all_trained")
    assert code == 1
    assert "no module is frozen" in shown.out
