"""A controller on a model that `fully_shard` cut: one decision on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.rivals import AutoFreezePolicy
from egeria_core import FreezeController
from egeria_core.policies import BudgetPolicy
from tests.helpers.gloo import run_ranks
from tests.helpers.sharded import Blocks, shard
from tests.helpers.steps import take_step

POLICIES = ("autofreeze", "budget")
OPTIONS: dict[str, Any] = {
    "evaluate_every": 2, "window": 3, "tolerance": 2.0, "evaluator": "inline", "reference": "fp32",
    "layers": r"stem|blocks\.\d|head", "bootstrap": None,
}  # fmt: skip


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    return x[rows], (x.sum(1) > 0).long()[rows]


def options_of(policy: str) -> dict[str, Any]:
    if policy == "budget":
        return {**OPTIONS, "policy": BudgetPolicy(1e6), "total_steps": 40}
    return {**OPTIONS, "policy": AutoFreezePolicy()}


def train(model: Any, policy: str, rows: slice, steps: int, state: Any = None) -> dict[str, Any]:
    # Nesterov's momentum writes into the gradients.
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    controller = FreezeController(model, optimizer, **options_of(policy))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if step < 30 else 0.01
        x, y = batch(step, rows)
        loss = take_step(F.cross_entropy(model(x), y), optimizer)
        controller.step(loss)
    saved = controller.state_dict()
    controller.close()
    readings = [
        record.get("values", [record["value"]]) for record in controller.history.of("reading")
    ]
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }
    return {
        "schedule": controller.schedule(), "readings": readings, "weights": weights,
        "state": saved,
    }  # fmt: skip


def worker(rank: int) -> dict[str, Any]:
    share = 16 // dist.get_world_size()
    rows = slice(rank * share, (rank + 1) * share)
    found = {policy: train(shard(Blocks()), policy, rows, 40) for policy in POLICIES}
    for policy in POLICIES:  # what one rank saved is everyone's, and can be taken up
        model = shard(Blocks())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        controller = FreezeController(model, optimizer, **options_of(policy))
        controller.load_state_dict(found[policy]["state"])
        found[policy]["taken_up"] = controller.num_frozen
        found[policy]["frozen"] = [not p.requires_grad for p in model.parameters()]
        controller.close()
    for policy in POLICIES:
        with in_double():  # forty steps of float32 let rounding grow
            found[policy]["in_double"] = train(shard(Blocks()), policy, rows, 40)
    with pytest.raises(ValueError, match="looks at whole layers, which fully_shard has cut"):
        FreezeController(model, optimizer, policy="plasticity", total_steps=40)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(worker, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_decide_alike_and_stay_in_step(ranks: Any, policy: str) -> None:
    first, second = (rank[policy] for rank in ranks)
    assert first["schedule"] == second["schedule"]
    assert first["schedule"] or policy == "budget", "for which they are too few steps"
    assert first["readings"] == second["readings"] != []
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name
    for rank in ranks:
        is_frozen = (rank[policy]["schedule"] or [(0, None)])[-1][1] is not None
        assert (rank[policy]["taken_up"] > 0) is is_frozen
        assert any(rank[policy]["frozen"]) is is_frozen


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_and_steps_are_measured_as_in_one_process(ranks: Any, policy: str) -> None:
    with in_double():
        ours, alone = ranks[0][policy]["in_double"], train(Blocks(), policy, slice(0, 16), 40)
    assert alone["schedule"] == ours["schedule"]
    num = len(alone["readings"])
    for name, value in alone["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=1e-9, atol=1e-9)
    first = 1 if policy == "budget" else 0  # rank 0's own loss
    for found, expected in zip(ours["readings"][:num], alone["readings"][:num], strict=True):
        assert [value is None for value in found] == [value is None for value in expected]
        for a, b in zip(found[first:], expected[first:], strict=True):
            assert a is None or a == pytest.approx(b, rel=1e-3, abs=1e-6)
