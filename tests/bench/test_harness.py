"""The harness that all benchmarks share: turns, medians of pairs, and what is written beside."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace

import pytest
import torch
from docstrings import Docstrings
from torch.utils.data import Subset

from benchmarks import __main__ as benchmarks
from benchmarks import device, small_step
from benchmarks.forward_skip.__main__ import plot
from benchmarks.forward_skip.bench import Bench
from benchmarks.forward_skip.cells import measure
from benchmarks.forward_skip.tasks import ALL, Task
from benchmarks.forward_skip.tasks import Shape as ModelShape
from benchmarks.harm.branch import run_plain
from benchmarks.harm.plots import plot as plot_harm
from benchmarks.harm.policy import VARIANTS, run_policy
from benchmarks.harm.summary import area, correlation, points_of, summarise, summarise_policy
from benchmarks.harm.tasks import TASKS
from benchmarks.harness import Times, in_turns, output
from benchmarks.ragged import Shape, bytes_of_samples, time_of_hits
from benchmarks.report.sections import KNOWN, section_of


def test_turns_go_back_and_forth_and_a_warm_up_is_not_counted():
    ran = []
    uses = {name: lambda name=name: ran.append(name) for name in "abc"}
    turns = in_turns(itertools.repeat(uses, 3), warm_up=1)
    assert "".join(ran) in ("abccbaabc", "cbaabccba")
    assert list(turns.wall) == list(turns.work) == ["a", "b", "c"]
    assert [len(times) for times in turns.wall.values()] == [2, 2, 2]


def test_ratios_and_differences_are_medians_of_pairs():
    times = Times(a=[1.0, 9.0, 4.0], b=[1.0, 3.0, 4.0])
    assert times.median("a") == 4.0
    assert times.ratio("a", "b") == 1.0  # of 1, 3 and 1; that of the medians is 4 / 3
    assert times.difference("a", "b") == 0.0
    with pytest.raises(ValueError, match="zip"):
        Times(a=[1.0], b=[1.0, 2.0]).ratio("a", "b")


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_run_is_printed_and_not_kept(tmp_path, monkeypatch, capsys, quick):
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    options = argparse.Namespace(json=False, quick=quick)
    output.publish("one", {"rows": [{"a": 1.5}]}, options)
    assert "1.5" in capsys.readouterr().out
    written = tmp_path / "results" / "one.json"
    assert written.exists() != quick
    assert quick or json.loads(written.read_text()) == {"rows": [{"a": 1.5}]}


def test_every_benchmark_is_listed_and_its_results_are_known_by_its_name():
    assert set(benchmarks.benchmarks()) == set(KNOWN)
    assert all(text.strip() for text in benchmarks.benchmarks().values())
    assert all(key in vars(owner) for _, owner, key in small_step.NAMED), "what is timed is there"


# The first run on an accelerator, tiny on the CPU: it says so, and keeps nothing.


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


def test_what_is_wrong_makes_the_command_fail(monkeypatch, capsys):
    wrong = {"model": "BERT-base", "way": "as it comes", "hits": 3, "of": 4,
             "largest_difference": 0.0}  # fmt: skip
    monkeypatch.setattr(device, "right", lambda *args: [wrong])
    monkeypatch.setattr(device, "fast", lambda *args: {})
    assert device.main(["--device", "cpu", "--json", "--model", "BERT-base"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == 1


# The benchmark of padded text runs end to end, and every sample of its epochs is a hit.

SMALL = Shape(width=16, num_layers=3)


@pytest.fixture(scope="module")
def data():
    whole = Docstrings(("json", "http"))
    return Subset(whole, range(0, len(whole), 3))


def test_samples_take_less_than_half_of_what_padding_to_the_maximum_takes(data, tmp_path):
    assert bytes_of_samples(SMALL, data, tmp_path)["saved"] > 2


def test_epochs_of_hits_are_measured_end_to_end(data, tmp_path):
    torch.manual_seed(0)
    found = time_of_hits(SMALL, "token budget", data, tmp_path / "cache", 1)
    assert found["hit_rate"] == 1
    report = {"environment": {}, "epochs": [found]}
    assert section_of("ragged", report).tables
    json.dumps(report)


# The benchmark of the paper's models: they are what was published, and a cell runs end to end.


def small(task: Task) -> ModelShape:
    images = {"ResNet-50": 32, "MobileNetV2": 32, "ResNet-56": 16, "DeepLabv3": 33}
    return ModelShape(batch_size=2, size=images.get(task.name, 40))


def test_a_cell_is_measured_end_to_end(tmp_path):
    task = ALL["Transformer-Tiny"]
    bench = Bench.make(task, small(task), torch.device("cpu"), 1, False, task.tiny)
    cell = measure(bench, "decoder.0", 3, tmp_path)
    assert cell["all_hits"]
    assert cell["raw_bytes"] == 2 * 40 * 16 * 4  # two tensors cross: memory, and decoder states
    assert cell["codecs"]["raw"]["bytes"] >= cell["raw_bytes"]
    model = {"model": task.name, "batch_size": 2, "environment": {}, "cells": [cell]}
    report = {"models": [model]}
    section = section_of("forward_skip", report)
    assert section.tables[-1].rows[0][0] == "Transformer-Tiny (2)"
    assert "another form" not in section.findings[0]
    plot(report, tmp_path / "plot.png")
    json.dumps(report)


# The evidence for the harm budget: that its figures are what they are called.

TINY = replace(TASKS["mlp-onecycle"], steps=60, batch_size=8)


def test_area_and_correlation_of_small_examples() -> None:
    assert area([1, 2, 3, 4], [False, False, True, True]) == 1.0
    assert area([1, 3, 2, 4], [False, False, True, True]) == 0.75
    assert area([1, 1], [True, False]) == 0.5
    assert area([1, 2], [True, True]) is None
    assert correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)


def test_from_a_plain_run_to_the_page(tmp_path) -> None:
    record, branches = run_plain(TINY, 0)
    record |= {"task": TINY.name, "seed": 0, "half": "fresh", "branches": branches}
    points = points_of(record)
    assert len(points) == len(branches) == 12
    assert all(p["predicted"] >= 0 for p in points)
    deep = [p["predicted"] for p in points if p["at"] == points[-1]["at"]]
    assert deep == sorted(deep), "more layers cannot cost less"
    setting = next(iter(VARIANTS))
    run = run_policy(TINY, VARIANTS[setting], 0)
    run |= {"task": TINY.name, "seed": 0, "method": setting}
    report = {
        "environment": {},
        "summary": summarise(points),
        "points": points,
        "policy": summarise_policy([run], {(TINY.name, 0): record}),
    }
    section = section_of("harm", report)
    assert section.tables[0].title == "Both halves"
    plot_harm(report, tmp_path / "harm.png")
    assert (tmp_path / "harm.png").stat().st_size > 0
