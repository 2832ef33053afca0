"""`cache-inspect fill`: everything is stored before training; the next run finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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


SCRIPT = """
import sys
import torch
from torch import nn
from egeria_cache import ActivationCache, EgeriaLoader

class Front(nn.Linear):
    pass

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.full((4,), float(index)) * FACTOR

FACTOR = 2.0

def model():
    torch.manual_seed(0)
    made = nn.Sequential(Front(4, 4), nn.Linear(4, 2))
    made[0].requires_grad_(False)
    return made

if __name__ == "__main__":
    net = model()
    with ActivationCache(net, sys.argv[1], "auto", gate="always", audit_rate=0) as cache:
        for batch in EgeriaLoader(Rows(), 8, cache=cache):
            net(batch)
        print(cache.stats().hits)
"""


def test_what_is_filled_by_the_name_of_a_script_is_found_by_the_script(
    capsys, directory, tmp_path, monkeypatch
):
    (tmp_path / "a_training_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    code = main(
        ["fill", "a_training_script:model", "--data", "a_training_script:Rows", "--directory",
         str(directory), "--batch-size", "8", "--device", "cpu"]
    )  # fmt: skip
    assert (code, capsys.readouterr().out) == (0, "24 of 24 samples are stored\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "a_training_script.py"), str(directory)], check=True,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert int(done.stdout) >= 16  # the first batch is the proof's


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
