"""The harness that all benchmarks share: turns, medians of pairs, and what is written beside."""

from __future__ import annotations

import argparse
import itertools
import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.harness import Times, in_turns, machine, output, percentiles_ms
from benchmarks.report.sections import KNOWN


def test_turns_go_back_and_forth_and_a_warm_up_is_not_counted():
    ran = []
    uses = {name: lambda name=name: ran.append(name) for name in "abc"}
    turns = in_turns(itertools.repeat(uses, 3), warm_up=1)
    assert "".join(ran) in ("abccbaabc", "cbaabccba")
    assert list(turns.wall) == list(turns.work) == ["a", "b", "c"]
    assert [len(times) for times in turns.wall.values()] == [2, 2, 2]


def test_a_round_is_prepared_and_cleared_up_around_its_uses():
    ran = []

    def rounds():
        for number in range(2):
            ran.append("prepare")
            yield {"use": lambda number=number: ran.append(number)}
            ran.append("clear up")

    in_turns(rounds())
    assert ran == ["prepare", 0, "clear up", "prepare", 1, "clear up"]


def test_ratios_and_differences_are_medians_of_pairs():
    times = Times(a=[1.0, 9.0, 4.0], b=[1.0, 3.0, 4.0])
    assert times.median("a") == 4.0
    assert times.ratio("a", "b") == 1.0  # of 1, 3 and 1; that of the medians is 4 / 3
    assert times.difference("a", "b") == 0.0
    with pytest.raises(ValueError, match="zip"):
        Times(a=[1.0], b=[1.0, 2.0]).ratio("a", "b")


def test_percentiles_are_in_milliseconds():
    found = percentiles_ms([number / 1000 for number in range(101)])
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}


def test_the_command_is_what_to_type_in_the_repositorys_root():
    root = machine.ROOT / "benchmarks"
    typed = [str(root / "store" / "__main__.py"), "--directory", "a b"]
    assert machine.command(typed) == "python -m benchmarks.store --directory 'a b'"
    assert machine.command([str(root / "variants.py")]) == "python -m benchmarks.variants"


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
