"""The first run on an accelerator, tiny on the CPU: it says so, and keeps nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import device
from benchmarks.harness import output


@pytest.mark.parametrize(
    "model", [pytest.param("ResNet-50", marks=pytest.mark.long), "GPT-2 small"]
)
def test_a_tiny_run_on_the_cpu_is_right_and_keeps_no_figures_of_a_device(
    tmp_path, monkeypatch, capsys, model
):
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    assert device.main(["--device", "cpu", "--json", "--model", model]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert "a run on the CPU" in printed.err
    assert not report["is_accelerator"]
    assert report["size"] == "tiny"
    assert not list(tmp_path.iterdir())
    assert [one["hits"] == one["of"] for one in report["right"]] == [True] * 3
    assert max(one["largest_difference"] for one in report["right"]) < 1e-3
    (step,) = report["steps"]
    assert min(step[f"{name}_ms"] for name in ("trained", "computed", "hit", "oracle")) > 0
    total = step["freezing_saves"] + step["skipping_saves"] + step["hit_ms"] / step["trained_ms"]
    assert total == pytest.approx(1.0)
    assert 0 < step["gradient_bytes_frozen"] < step["gradient_bytes"]
    assert step["stored_bytes_of_a_sample"] > 0
    assert len(report["growing"]) == 3 * (model == "ResNet-50")


def test_less_is_trained_the_further_the_front_grows():
    case = next(one for one in device.cases(quick=True) if one.name == "BERT-base")
    case = replace(case, front=("entry", "blocks.0", "blocks.0.linear2"))
    shares = [device._trained_share(one) for one in case.fronts()]
    assert 1 > shares[0] > shares[1] >= shares[2] > 0


def test_what_is_wrong_makes_the_command_fail(monkeypatch, capsys):
    wrong = {"model": "BERT-base", "way": "as it comes", "hits": 3, "of": 4,
             "largest_difference": 0.0}  # fmt: skip
    monkeypatch.setattr(device, "right", lambda *args: [wrong])
    monkeypatch.setattr(device, "fast", lambda *args: {})
    assert device.main(["--device", "cpu", "--json", "--model", "BERT-base"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == 1
