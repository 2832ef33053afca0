"""The demo: its losses are those of plain PyTorch."""

import json
import logging
import signal

import demo
import pytest

FLAGS = ["--quick", "--act", "finetune", "--out"]


@pytest.fixture(autouse=True)
def signals():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    logging.getLogger("egeria.modes").setLevel(logging.NOTSET)
    signal.signal(signal.SIGTERM, handler)


def losses(out):
    (act,) = json.loads((out / "demo.json").read_text())["acts"]
    return act["plain"]["losses"], act["egeria"]["losses"]


def test_its_losses_are_those_of_plain_pytorch(tmp_path, capsys):
    assert demo.main([*FLAGS, str(tmp_path)]) == 0
    assert "as fast" in capsys.readouterr().out
    plain, egeria = losses(tmp_path)
    assert plain == egeria
    assert (tmp_path / "demo.png").stat().st_size > 10_000
