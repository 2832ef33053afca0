"""The harness finds what it is there to find."""

import importlib
import logging
from pathlib import Path

import pytest

from tests.hostile import harness
from tests.hostile.known import KNOWN
from tests.hostile.nets import Net, rows


@pytest.fixture(autouse=True)
def _all_ways(monkeypatch):
    monkeypatch.delenv(harness.FEW, raising=False)


def honest(run):
    run.fit(run.freeze(Net()), run.loader(rows()))


def wrong(run):
    run.record(1.0 if run.way != "always" else 1.1)


def raising(run):
    if run.way == "never":
        raise ValueError("not in plain PyTorch")


def silent(run):
    run.freeze(Net())
    run.record(1.0)


def late(run):
    silent(run)
    for _ in range(3):
        run.record(1.0)
    logging.getLogger("egeria").warning("nothing was cached")


def elsewhere(run):
    run.freeze(Net())
    logging.getLogger("egeria").warning("nothing is cached")
    run.close()
    run.trace.why_not = "nothing is cached"


OUTCOMES = {
    wrong: harness.SilentlyWrong, raising: harness.ForeignError, silent: harness.WithoutAWord,
    late: harness.WithoutAWord,
}  # fmt: skip


@pytest.mark.parametrize("script", OUTCOMES)
def test_each_outcome_is_told_from_the_others(script):
    with pytest.raises(harness.Finding) as caught:
        harness.judge(script)
    assert caught.type is OUTCOMES[script]


def test_an_honest_loop_is_served_and_right():
    harness.judge(honest, served=True)


def test_uncached_and_told_will_do_unless_it_can_be_served():
    harness.judge(elsewhere)
    with pytest.raises(harness.NeedlesslyUncached):
        harness.judge(elsewhere, served=True)


def test_a_limit_must_be_documented():
    with pytest.raises(AssertionError, match="not a limit"):
        harness.judge(honest, limit="whatever else goes wrong")


def test_a_script_that_fails_plainly_is_no_try():
    with pytest.raises(RuntimeError, match="broken"):
        harness.judge(lambda run: 1 / 0)


def test_every_known_failure_is_that_of_a_try():
    files = Path(__file__).parent.glob("test_*.py")
    modules = [importlib.import_module(f"tests.hostile.{file.stem}") for file in files]
    names = {name for module in modules for name in vars(module)}
    assert {name.partition("[")[0] for name in KNOWN} <= names
