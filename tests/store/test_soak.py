"""Many steps, two processes, and a cleaner beside them: nothing wrong, and nothing grows."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

from egeria_cache.inspect.cli import main
from egeria_cache.store import ActivationStore
from tests.store.conftest import keep

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("num_steps", [600, pytest.param(250_000, marks=pytest.mark.long)])
@pytest.mark.timeout(24 * 3600)
def test_two_processes_with_moves_and_a_cleaner_hold_no_more_at_the_end(
    tmp_path, num_steps, capsys
):
    command = [sys.executable, "-m", "tests.helpers.soak", str(tmp_path / "cache"), str(num_steps)]
    children = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for seed in range(2)
    ]
    while any(child.poll() is None for child in children):
        if (tmp_path / "cache" / "cache.json").exists():
            assert main([str(tmp_path / "cache"), "prune", "--unused", "--yes", "--json"]) == 0
            assert main([str(tmp_path / "cache"), "verify", "--json"]) in (0, 2)  # 2: just gone
        time.sleep(min(0.2, num_steps / 10_000))
    for child in children:
        report = json.loads(child.communicate()[0])
        assert child.returncode == 0
        assert report["wrong"] == []
        assert report["corrupt"] == 0
        assert report["hits"] > 0
        settled, last = report["measured"][3], report["measured"][-1]
        assert last["descriptors"] <= settled["descriptors"] + 2
        assert last["threads"] <= settled["threads"]
        assert last["memory_mb"] <= settled["memory_mb"] + 24
        with capsys.disabled():
            if num_steps > 600:
                print(json.dumps(report))


def test_generations_that_are_over_are_let_go_and_their_counts_are_kept(tmp_path):
    with ActivationStore(tmp_path / "cache") as store:
        past = []
        for number in range(20):
            generation = store.open_generation({"boundary": number % 2})
            keep(store, [1, 2], torch.ones(2, 4), into=generation)
            generation.get_batch([1, 2, 3])
            generation.void("unfrozen")
            past.append(weakref.ref(generation))
            del generation
        gc.collect()
        assert sum(one() is not None for one in past) <= 2
        stats = store.stats()
        assert (stats.hits, stats.misses, stats.writes) == (40, 20, 40)
