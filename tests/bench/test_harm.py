"""The evidence for the harm budget: that its figures are what they are called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harm.branch import Trainer, run_plain
from benchmarks.harm.plots import plot
from benchmarks.harm.policy import VARIANTS, run_policy
from benchmarks.harm.summary import area, correlation, points_of, summarise, summarise_policy
from benchmarks.harm.tasks import TASKS, make_data
from benchmarks.report.sections import section_of

torch.set_num_threads(1)
TINY = replace(TASKS["mlp-onecycle"], steps=60, batch_size=8)


def test_area_and_correlation_of_small_examples() -> None:
    assert area([1, 2, 3, 4], [False, False, True, True]) == 1.0
    assert area([1, 3, 2, 4], [False, False, True, True]) == 0.75
    assert area([1, 1], [True, False]) == 0.5
    assert area([1, 2], [True, True]) is None
    assert correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_branch_that_freezes_nothing_is_the_plain_run(accumulate: int) -> None:
    task = replace(TINY, steps=8, accumulate=accumulate, clip=1.0)
    trainer = Trainer(task, 0, make_data(task.data))
    for _ in trainer.train(4):
        pass
    saved = trainer.save()
    plain = trainer.finish()
    for _ in range(2):
        trainer.load(saved)
        assert trainer.finish() == plain


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
    plot(report, tmp_path / "harm.png")
    assert (tmp_path / "harm.png").stat().st_size > 0
