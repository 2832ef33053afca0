from __future__ import annotations

import os
import re
from pathlib import Path

import hypothesis
import pytest

# One thread for each process, and for those that it starts: the tests are many and small, and
# threads that wait for each other on a busy machine make them ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests train for a few batches, and are to see them served all the same.
os.environ.setdefault("EGERIA_POSTPONE", "0")

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("egeria", deadline=None)
hypothesis.settings.load_profile("egeria")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=["rows with the batch", "rows with the batch, read by training", "ring"])
def way_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on the CPU, with readers and without, and with the ring of other devices."""
    monkeypatch.setattr(
        "egeria_cache.prefetch.prefetcher.needs_ring", lambda device: request.param == "ring"
    )
    if request.param.endswith("training"):
        always = property(lambda crew: True, lambda crew, value: None)
        monkeypatch.setattr("egeria_cache.prefetch.Crew.is_spared", always, raising=False)


SLOW = re.compile(
    "|".join(
        (
            r"test_other_ways_to_start_workers_are_served_the_same\[.*(ring|training).*",
            r"test_a_dead_or_stuck_worker_gives_dataloaders_own_error\[.*(ring|training).*",
            r"test_a_generation_cleared_by_the_inspector_while_a_loader_runs.*ring.*",
            r"test_a_stopped_run_goes_on_to_the_same_losses\[.*segmentation.*",
            # with workers, of which each start takes a second
            r"test_in_mid_epoch_both_loaders_go_on_alike\[.*-(?!epochs|shuffle).*-[12]-2\]",
            r"test_in_mid_epoch_both_loaders_go_on_alike\[0-(epochs|shuffle)-2-2\]",
            r"test_uninterrupted_the_order_is_dataloaders\[(0|None)-(?!epochs).*-2\]",
            r"test_a_state_of_the_(end|beginning|last_batch)\w+\[(?!epochs|batches).*-2\]",
            r"test_an_iterable_data_set_goes_on_where_it_was\[.*-(-1|3|None)-2\]",
            r"test_batches_that_were_overtaken_are_not_lost\[stops[01]-.*",
            r"test_padded_batches_are_served\[(?!pad_right).*-2\]",
            r"test_two_processes_have_the_losses_of_two_without_a_cache\[ddp_spawn\]",
        )
    )
)
"""Tests whose like is run by default, with other parameters, and which take long."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW.fullmatch(item.name):
            item.add_marker(pytest.mark.long)
    if "long" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long mode: run with -m long"))
