"""Two gloo processes against one: the same gradients, through freeze and unfreeze."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals import AutoFreezePolicy
from egeria_cache import EgeriaError
from egeria_core import Bootstrap, FreezeController, StaticPolicy
from egeria_core.ranks import Ranks, unwrap
from tests.helpers.core_nets import batch, mlp
from tests.helpers.gloo import run_ranks

SCHEDULE = {3: "1", 6: "3", 9: None, 12: "1"}
NUM_STEPS = 15
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(64, 16, 16, 16, 10)


def static(schedule: dict[int, str | None] = SCHEDULE) -> dict[str, Any]:
    return {"policy": StaticPolicy(schedule), "layers": r"[135]|6"}


def train(
    model: nn.Module, options: dict[str, Any], rows: slice, steps: int = NUM_STEPS
) -> tuple[list[dict[str, Tensor]], FreezeController]:
    """Return the gradients of every step, by the bare model's names."""
    bare, _ = unwrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    controller = FreezeController(model, optimizer, **options)
    gradients = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if step < 40 else 0.01
        x, y = batch(step, 16)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.flatten(1)[rows]), y[rows])
        loss.backward()
        gradients.append(
            {n: p.grad.clone() for n, p in bare.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        controller.step(loss)
    controller.close()
    return gradients, controller


def worker(rank: int) -> dict[str, Any]:
    """One rank: every scenario in turn, for the test to compare."""
    rows = slice(rank * 8, rank * 8 + 8)
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        ddp = DistributedDataParallel(make_model(), **options)
        found[name], _ = train(ddp, static(), rows)
    for policy in ("plasticity", "autofreeze", "budget"):
        ddp = DistributedDataParallel(make_model())
        measured = {
            "policy": AutoFreezePolicy() if policy == "autofreeze" else policy,
            "bootstrap": Bootstrap(fall=None),  # the labels are random: there is nothing to learn
            "evaluate_every": 2,
            "window": 3,
            "tolerance": 2.0,
            "evaluator": "inline",
            "reference": "fp32",
            "num_layers": 4,
        }
        if policy == "budget":
            measured |= {"total_steps": 140, "harm_budget": 1.0, "layers": r"[135]|6"}
        _, controller = train(ddp, measured, rows, steps=measured.get("total_steps", 60))
        found[policy] = {
            "schedule": controller.schedule(),
            "readings": [(r["step"], r["layer"]) for r in controller.history.of("reading")],
            "weights": dict(ddp.module.state_dict()),
            "policy": controller.policy.state_dict(),
        }
    ranks = Ranks(ddp, ddp.module)
    try:
        ranks.share([], rank)
    except EgeriaError as error:
        found["disagreement"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(worker, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_one_process_through_freeze_and_unfreeze(
    ranks: list[dict[str, Any]], name: str
) -> None:
    expected, _ = train(make_model(), static(), slice(0, 16))
    assert {len(gradients) for gradients in expected} == {8, 6, 4}, "nothing froze"
    for rank in ranks:
        for step, gradients in enumerate(expected):
            found = rank[name][step]
            trained = {n for n, g in found.items() if g.abs().sum() > 0}
            assert trained == set(gradients), f"step {step}"
            for key, gradient in gradients.items():
                torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["plasticity", "autofreeze", "budget"])
def test_ranks_decide_alike_and_stay_in_step(ranks: list[dict[str, Any]], policy: str) -> None:
    first, second = (rank[policy] for rank in ranks)
    assert first["schedule"]
    assert first["schedule"] == second["schedule"]
    assert first["readings"] == second["readings"] != []
    assert first["policy"] == second["policy"], "any rank's state is everyone's"
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name
    if policy == "plasticity":
        assert None in [boundary for _, boundary in first["schedule"]], "it unfroze too"


def test_ranks_that_disagree_are_told(ranks: list[dict[str, Any]]) -> None:
    assert "rank 1 has 1 frozen layers and rank 0 has 0" in ranks[1]["disagreement"]


def bytes_seen(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook as a scheduler hangs one in: it sees every byte that is reduced."""
    buffer = bucket.buffer()
    state["bytes"] += buffer.numel() * buffer.element_size()
    parameters = bucket.parameters()
    state["parameters"] += len(parameters)
    assert all(p.requires_grad for p in parameters)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# DDP compares the annotations with the classes, and does not read them as text.
bytes_seen.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own
@pytest.mark.parametrize("no_sync", [False, True], ids=["each step", "no_sync"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.001},
        {"compiled": True},
    ],
    ids=str,
)
def test_hooks_and_buckets_see_exactly_the_active_parameters(
    process_group: None, options: dict[str, Any], no_sync: bool
) -> None:
    if no_sync and options.get("static_graph"):
        pytest.skip("PyTorch: a static graph is synchronised at every step")
    model, settings = make_model(), dict(options)
    if settings.pop("compiled", False):
        for at in (1, 3):  # activations: what a block is compiled of does not matter
            model[at].compile(backend="eager")
    ddp = DistributedDataParallel(model, **settings)
    state = {"bytes": 0, "parameters": 0}
    ddp.register_comm_hook(state, bytes_seen)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    schedule = StaticPolicy({3: "1", 6: "3", 9: None})
    controller = FreezeController(ddp, optimizer, policy=schedule, layers=r"[135]|6")
    for step in range(12):
        active = [p for p in model.parameters() if p.requires_grad]
        state.update(bytes=0, parameters=0)
        x, y = batch(step, 8)
        optimizer.zero_grad()
        if no_sync:
            with ddp.no_sync():
                F.cross_entropy(ddp(x.flatten(1)), y).backward()
            assert state["bytes"] == 0
        F.cross_entropy(ddp(x.flatten(1)), y).backward()
        assert state["bytes"] == 4 * sum(p.numel() for p in active), f"step {step}"
        assert state["parameters"] == len(active)
        optimizer.step()
        controller.step(0.0)
    assert [num for _, num in controller.schedule()] == ["1", "3", None]
    torch._dynamo.reset()


def test_what_powersgd_keeps_for_a_bucket_goes_with_the_bucket(process_group: None) -> None:
    ddp = DistributedDataParallel(make_model())
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    gradients, _ = train(ddp, static({4: "1", 8: None}), slice(0, 16), steps=12)
    assert [len(found) for found in gradients] == [8] * 4 + [6] * 4 + [8] * 4
    assert state.error_dict, "it was in use"
    assert all(torch.isfinite(g).all() for found in gradients for g in found.values())
