"""Policies that measure: decided alike on all ranks, wherever the first active block is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rivals import SmartPipePolicy
from egeria_core.pipeline import PipelineController
from egeria_core.policies import BudgetPolicy, HarmEstimate, PlasticityPolicy
from tests.helpers.pipelines import Case, alone, spawn


class Eager(HarmEstimate):
    """Four readings suffice it, and every layer rests."""

    @property
    def ready(self) -> bool:
        return self._seen >= 4

    def rests(self, layer: int) -> bool:
        return True


class EagerPolicy(BudgetPolicy):
    def bind(self, boundaries: Sequence[str]) -> None:
        self.estimate = Eager()


QUICK: dict[str, Any] = {"evaluate_every": 2, "evaluator": "inline", "move_cost": 1e-6}
CASES = {
    "plasticity": Case(
        "1F1B", "repartition", "calm", moves=(), policy=partial(PlasticityPolicy, 3, 5.0),
        options=QUICK | {"bootstrap": None, "reference": "fp32"},
    ),
    "smartpipe": Case(
        "GPipe", "stay", "sgd", has_cache=False, moves=(), policy=SmartPipePolicy, options=QUICK
    ),
    "budget": Case(
        "GPipe", "repartition", "adamw", has_cache=False, moves=(), epochs=10,
        policy=partial(EagerPolicy, 100.0),
        options=QUICK | {"total_steps": 40},
    ),
}  # fmt: skip


@pytest.mark.long
def test_all_ranks_decide_alike_by_any_policy(tmp_path: Path) -> None:
    for name, ranks in zip(CASES, spawn(2, tmp_path, list(CASES.values())), strict=True):
        schedule = ranks[0]["schedule"]
        print(name, schedule)
        assert any(boundary is not None for _, boundary in schedule), name
        assert all(found["schedule"] == schedule for found in ranks)
        readings = [[r for r in found["history"] if r["kind"] == "reading"] for found in ranks]
        assert readings[0]
        for left, right in zip(*readings, strict=True):
            assert left["boundary"] == right["boundary"]
            assert left.get("values") == right.get("values")
            assert left["value"] == right["value"]
        # The same moves in one process: equal to the last step.
        replayed = Case(
            optimizer=CASES[name].optimizer, epochs=CASES[name].epochs, moves=tuple(schedule)
        )
        losses, weights = alone(replayed, 2)
        torch.testing.assert_close(ranks[0]["losses"], losses, rtol=1e-5, atol=1e-5)
        for key, weight in weights.items():
            torch.testing.assert_close(ranks[0]["weights"][key], weight, rtol=1e-5, atol=1e-5)
        if name == "plasticity":
            # Both ranks have had the first active block, and measured it.
            assert {int(r["boundary"]) for r in readings[0]} & {0, 1, 2, 3}


def test_the_layers_of_a_pipeline_are_its_blocks() -> None:
    with pytest.raises(ValueError, match="layers of a pipeline are its blocks"):
        PipelineController(None, layers="1|2")  # type: ignore[arg-type]
