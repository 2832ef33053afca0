"""The budget policy: its rule on hand-made readings, and whole runs under it."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from egeria_core import FreezeController
from egeria_core.policies import BudgetPolicy, PlasticityPolicy, Prospect, Reading
from tests.helpers.core_nets import batch, mlp
from tests.helpers.steps import take_step

TOTAL = 160


def observe(
    policy: BudgetPolicy, n: int, *, loss: float = 3.0, rate: float | None = None, lr: float = 0.1,
    decrease: tuple[float, ...] = (0.01, 0.02, 0.07), speed: tuple[float, ...] = (1.0, 1.0, 1.0),
    **prospect: Any,
) -> int:  # fmt: skip
    """Hand the policy reading `n` of a run."""
    options: dict[str, Any] = {
        "steps": 100, "rate": 1.0, "saves": (0.0, 0.3, 0.5), "cost": 3.0, "every": 3,
        "draws": (0, 0, 0),
    }  # fmt: skip
    return policy.observe(
        Reading(
            step=3 * n, num_layers=3, lr=(lr,),
            values=(loss, 0.3 * n if rate is None else rate, *decrease, *speed),
            prospect=Prospect(**(options | prospect)),
        )
    )  # fmt: skip


def resting(budget: float | None = 0.01, *, slope: float = 0.0, first: float = 3.0) -> BudgetPolicy:
    """Return a policy after 20 readings of a loss that falls by `slope` per unit of rate."""
    policy = BudgetPolicy(budget)
    for n in range(20):
        speed = 1.0 if n < 5 else 0.01
        frozen = observe(
            policy, n, loss=first - slope * 0.3 * n, speed=(speed,) * 3, rises=True
        )  # a rise to come holds it back
        assert frozen == 0
    policy.take_notes()
    return policy


def test_it_freezes_as_deep_as_the_budget_allows() -> None:
    # A loss on a line: G = slope * rate left = 0.1, phi = 0.1, 0.3, 1.
    for budget, frozen in ((0.009, 0), (0.011, 1), (0.031, 2), (9.0, 2)):
        policy = resting(budget, slope=0.1)
        found = observe(policy, 20, loss=3 - 0.1 * 6, speed=(0.01,) * 3, saves=(0, 0.5, 0.6))
        assert found == frozen, budget
        assert policy.spent == pytest.approx((0, 0.01, 0.03)[frozen], rel=1e-6)


@pytest.mark.parametrize(("draws", "frozen"), [((0, 0, 0), 2), ((0, 0, 1), 1), ((0, 2, 2), 0)])
def test_no_move_switches_a_dropout_off(draws: tuple[int, ...], frozen: int) -> None:
    policy = resting(9.0, slope=0.1)
    fields: dict[str, Any] = {"speed": (0.01,) * 3, "saves": (0, 0.5, 0.6), "draws": draws}
    assert observe(policy, 20, loss=3 - 0.1 * 6, **fields) == frozen
    verdicts = [candidate["verdict"] for candidate in policy.take_notes()[-1]["candidates"]]
    assert verdicts.count("would switch a dropout off") == 2 - frozen


def test_a_second_move_is_paid_from_what_is_left() -> None:
    policy = resting(0.012, slope=0.1)
    assert observe(policy, 20, loss=3 - 0.1 * 6, speed=(0.01,) * 3, saves=(0, 0.6, 0.61)) == 1
    assert policy.spent == pytest.approx(0.01)
    # Of what the two layers that still train bring, the first brings 2/9.
    few = {"loss": 3 - 0.1 * 6.3, "speed": (0.01,) * 3, "saves": (0, 0.3, 0.6)}
    assert observe(policy, 21, **few, rate=6.3, cost=0.1) == 1
    few["loss"] = 3 - 0.1 * 6.6
    prospect = policy.take_notes()[-1]
    assert prospect["candidates"][0]["verdict"] == "above the budget"
    assert prospect["candidates"][0]["harm"] == pytest.approx(0.1 * 2 / 9, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"speed": (0.01, 1.0, 1.0), "slope": 0.0}, "freeze"),
        ({"speed": (1.0, 0.01, 0.01)}, "still moves"),
        ({"slope": 10.0}, "above the budget"),
        ({"cost": 100.0}, "does not pay"),
        ({"steps": 15, "saves": (0.0, 0.1, 0.2)}, "does not pay"),
        ({"slope": 0.05, "saves": (0.0, 0.01, 0.5), "cost": 0.1}, "waiting saves more"),
    ],
)
def test_what_speaks_against_a_move_is_told(changes: dict[str, Any], verdict: str) -> None:
    slope = changes.pop("slope", 0.0)
    policy = resting(slope=slope)
    loss = 3 - slope * 6.0
    fields = {"speed": (0.01,) * 3, "cost": 3.0, **changes}
    observe(policy, 20, loss=loss, **fields)
    (note,) = policy.take_notes()
    assert note["candidates"][0]["verdict"] == verdict
    assert (note["decision"] == "freeze") is (verdict == "freeze")


def test_a_rate_that_will_rise_holds_every_move_back() -> None:
    policy = resting()
    assert observe(policy, 20, speed=(0.01,) * 3, rises=True) == 0
    assert observe(policy, 21, speed=(0.01,) * 3) == 2


def test_a_rate_that_has_risen_gives_everything_back_and_falling_ones_do_not() -> None:
    policy = resting()
    assert observe(policy, 20, speed=(0.01,) * 3) == 2
    for n in range(21, 40):
        assert observe(policy, n, speed=(0.01,) * 3, lr=0.1 / n) == 2
    assert observe(policy, 41, lr=0.3) == 0
    assert "rose to 0.3" in policy.reason


def test_the_default_budget_is_in_proportion_to_the_loss() -> None:
    assert resting(None, first=3.0).budget == 0.01
    assert resting(None, first=1e-3).budget == pytest.approx(1e-5)
    assert resting(0.5, first=1e-3).budget == 0.5
    with pytest.raises(ValueError, match="budget"):
        BudgetPolicy(math.inf)


class Run:
    """A small training run under the budget policy, which can be saved and continued."""

    def __init__(self, schedule: str = "linear", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = mlp(64, 24, 24, 24, 10)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.2, 0.9)
        self.scheduler: Any = LambdaLR(self.optimizer, lambda n: max(0.0, 1 - n / TOTAL) ** 2)
        if schedule == "onecycle":
            self.scheduler = OneCycleLR(self.optimizer, 0.2, TOTAL)
        settings = {
            "total_steps": TOTAL, "lr_scheduler": self.scheduler, "harm_budget": 0.05,
            "move_cost": 3.0, "evaluate_every": 4, "layers": r"[135]|6",
        }  # fmt: skip
        self.controller = FreezeController(self.model, self.optimizer, **(settings | options))
        self.losses: list[float] = []

    def train(self, steps: range) -> Run:
        for step in steps:
            x, y = batch(step % 8, 16)
            loss = take_step(F.cross_entropy(self.model(x.flatten(1)), y), self.optimizer)
            if step < TOTAL - 1:
                self.scheduler.step()
            self.controller.step(loss)
            self.losses.append(loss.item())
        return self

    def parts(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler, self.controller]


def told(run: Run) -> list[Any]:
    """Return the history without what is timed."""
    timed = ("saving_s", "cost_s", "left_s")
    return [{k: v for k, v in r.items() if k not in timed} for r in run.controller.history]


def test_it_is_the_default_where_the_end_is_known(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"lr_scheduler": None}, {"window": 5}):  # harm_budget is given as well
        assert isinstance(Run(**options).controller.policy, BudgetPolicy)
    assert [one.message[-20:] for one in caplog.records] == ["does not read window"]
    assert isinstance(Run("onecycle", total_steps=None).controller.policy, BudgetPolicy)
    assert isinstance(Run(window=5, harm_budget=None).controller.policy, PlasticityPolicy)
    without = Run(total_steps=None, lr_scheduler=None, evaluate_every=2)
    assert isinstance(without.controller.policy, PlasticityPolicy)
    with pytest.raises(ValueError, match="total_steps"):
        Run(policy="budget", total_steps=None)


def test_an_optimizer_of_another_kind_keeps_the_papers_policy() -> None:
    class Foreign:
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    model = mlp(8, 8, 8, 4)
    optimizer: Any = Foreign(model.parameters())
    options: dict[str, Any] = {"total_steps": 100, "layers": r"[024]"}
    controller = FreezeController(model, optimizer, **options)
    assert isinstance(controller.policy, PlasticityPolicy)
    controller.close()
    with pytest.raises(TypeError, match="Foreign cannot be watched"):
        FreezeController(model, optimizer, policy="budget", **options)


@pytest.mark.parametrize("schedule", ["linear", "onecycle"])
def test_it_freezes_once_layers_rest_and_gives_nothing_back(schedule: str) -> None:
    run = Run(schedule).train(range(TOTAL))
    moves = run.controller.history.of("boundary")
    assert moves
    assert all(move["boundary"] is not None for move in moves)
    policy = run.controller.policy
    assert isinstance(policy, BudgetPolicy)
    assert 0 < policy.spent <= 0.05
    freeze = [r for r in run.controller.history.of("decision") if r["decision"] == "freeze"]
    assert [r["frozen"] for r in freeze] == [move["num_frozen"] for move in moves]
    for record in freeze:
        assert {"harm", "spent", "budget", "candidates"} <= set(record)
        assert {c["frozen"] for c in record["candidates"]} <= {1, 2, 3}
    first = next(c for c in freeze[0]["candidates"] if c["frozen"] == freeze[0]["frozen"])
    assert first["saving"] >= 2 * 3.0, "what a move costs"


def test_without_a_scheduler_it_acts_on_the_number_of_steps() -> None:
    assert Run(lr_scheduler=None).train(range(TOTAL)).controller.history.of("boundary")


def test_a_model_that_is_compiled_whole_is_weighed_by_its_parameters() -> None:
    run = Run()
    run.model.compile(backend="eager")
    assert run.train(range(TOTAL)).controller.history.of("boundary")


def test_watching_leaves_the_losses_untouched() -> None:
    run = Run(harm_budget=1e-30).train(range(60))
    torch.manual_seed(0)
    model = mlp(64, 24, 24, 24, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, 0.9)
    scheduler = LambdaLR(optimizer, lambda n: max(0.0, 1 - n / TOTAL) ** 2)
    losses = []
    for step in range(60):
        x, y = batch(step % 8, 16)
        loss = take_step(F.cross_entropy(model(x.flatten(1)), y), optimizer)
        scheduler.step()
        losses.append(loss.item())
    assert losses == run.losses


@pytest.mark.parametrize("schedule", ["linear", "onecycle"])
@pytest.mark.parametrize("cut", [3, 61, 118, 141])
def test_a_resumed_run_takes_the_same_decisions(schedule: str, cut: int) -> None:
    whole = Run(schedule).train(range(TOTAL))
    assert whole.controller.schedule()
    first = Run(schedule).train(range(cut))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first.parts()], file)
    file.seek(0)
    second = Run(schedule)
    states = torch.load(file, weights_only=True)
    for part, state in zip(second.parts(), states, strict=True):
        part.load_state_dict(state)
    second.train(range(cut, TOTAL))
    assert second.controller.schedule() == whole.controller.schedule()
    assert first.losses + second.losses == whole.losses
    kinds = ("reading", "decision")
    after = [r for r in told(second) if r["kind"] in kinds]
    assert after == [r for r in told(whole) if r["kind"] in kinds]
