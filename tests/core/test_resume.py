"""What a run has to survive: a restart, accumulation, AMP, optimizers with memory, odd models."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rivals import AutoFreezePolicy, SkipConvPolicy
from egeria_core import Bootstrap, BoundaryMoved, EvaluatorError, FreezeController, StaticPolicy
from egeria_core.policies import Policy, PolicyError
from egeria_core.reference.references import ReferenceRunner
from tests.helpers.core_nets import FAMILIES, ResNet, family_batch
from tests.helpers.steps import take_step


class Run:
    """A training run that can be saved and continued in another 'process'."""

    def __init__(self, family: str = "resnet", policy: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        make, self.kind = FAMILIES[family]
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.events: list[BoundaryMoved] = []
        options = {
            "evaluate_every": 2, "window": 3, "tolerance": 2.0, "evaluator": "inline",
            "reference": "fp32",
        } | options  # fmt: skip
        options.setdefault("bootstrap", Bootstrap(change=10.0, fall=None))
        self.controller = FreezeController(
            self.model,
            self.optimizer,
            policy="plasticity" if policy is None else policy(),
            listeners=[self.events.append],
            **options,
        )
        self.losses: list[float] = []

    def train(self, steps: range, drop_at: int = 45) -> None:
        for step in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.1 if step < drop_at else 0.01
            self.model.train()
            torch.manual_seed(step)
            x, y = family_batch(self.kind, step)
            loss = take_step(F.cross_entropy(self.model(x), y), self.optimizer)
            self.controller.step(loss)
            self.losses.append(loss.item())

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        state = [self.model.state_dict(), self.optimizer.state_dict(), self.controller.state_dict()]
        torch.save(state, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        model, optimizer, controller = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.controller.load_state_dict(controller)


def decisions(run: Run) -> list[Any]:
    return [
        {k: v for k, v in record.items() if k not in ("seconds", "reason")}
        for record in run.controller.history
    ]


POLICIES: list[Callable[[], Policy] | None] = [
    None, AutoFreezePolicy, partial(SkipConvPolicy, 3, 2.0)
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=["plasticity", "autofreeze", "skipconv"])
@pytest.mark.parametrize("cut", [1, 19, 46])
def test_a_resumed_run_takes_the_same_decisions_at_the_same_steps(policy: Any, cut: int) -> None:
    whole = Run(policy=policy)
    whole.train(range(60))
    assert whole.controller.schedule()
    first = Run(policy=policy)
    first.train(range(cut))
    second = Run(policy=policy)
    second.load(first.save())
    second.train(range(cut, 60))
    assert second.controller.schedule() == whole.controller.schedule()
    assert first.losses + second.losses == whole.losses
    told = ("reading", "bootstrap")
    resumed, known = ([r for r in decisions(run) if r["kind"] in told] for run in (second, whole))
    assert resumed == known


def test_the_loss_that_ends_the_bootstrapping_stage_is_that_of_the_rank_that_measures() -> None:
    run = Run()
    run.controller._ranks.agree = lambda mean: 7.0  # type: ignore[method-assign]
    run.train(range(2))
    assert [record["loss"] for record in run.controller.history.of("bootstrap")] == [7.0]


def test_a_resumed_run_freezes_before_its_first_forward_and_tells_the_cache() -> None:
    first = Run(policy=lambda: StaticPolicy({3: "layer2.1"}))
    first.train(range(6))
    second = Run(policy=lambda: StaticPolicy({3: "layer2.1"}))
    second.load(first.save())
    assert [event.boundary for event in second.events] == ["layer2.1"]
    assert not second.model.layer2[0].conv1.weight.requires_grad
    assert not second.model.bn1.training
    assert second.controller.schedule() == first.controller.schedule()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reference", ["fp32", "int8"])
def test_every_family_freezes_and_its_frozen_weights_stay(family: str, reference: str) -> None:
    run = Run(family, tolerance=1e6, reference=reference, evaluate_every=1)
    run.train(range(26))
    frozen = run.controller.num_frozen
    assert frozen >= 2
    assert not run.controller.history.of("evaluator_lost")
    assert not run.controller.history.of("tap_silent")
    before = {n: p.detach().clone() for n, p in run.model.named_parameters() if not p.requires_grad}
    front = run.controller.boundary
    run.controller.close()
    run.train(range(26, 28))
    assert run.controller.boundary == front
    for name, value in before.items():
        assert torch.equal(run.model.get_parameter(name), value), name
    assert before


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize(
    ("name", "set_to_none", "mode"),
    [(name, False, "plain") for name in OPTIMIZERS]
    + [("adamw", True, mode) for mode in ("plain", "accumulate", "bf16", "scaler")]
    + [("momentum", False, mode) for mode in ("accumulate", "bf16", "scaler")],
)
def test_frozen_weights_do_not_move_by_one_bit(name: str, set_to_none: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = ResNet()
    back, front = [], []
    for key, parameter in model.named_parameters():
        (front if key.startswith(("conv1", "bn1", "layer1")) else back).append(parameter)
    optimizer = OPTIMIZERS[name]([{"params": back, "lr": 0.01}, {"params": front}])
    groups = [list(group["params"]) for group in optimizer.param_groups]
    controller = FreezeController(
        model, optimizer, policy=StaticPolicy({2: "layer2.1", 6: None, 8: "layer2.1"})
    )
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "scaler")
    frozen: dict[str, Tensor] = {}
    moved = False
    for step in range(12):
        model.train()
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(2 if mode == "accumulate" else 1):
            x, y = family_batch("image", 2 * step + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode in ("bf16", "scaler")):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for key, value in frozen.items():
            same = torch.equal(model.state_dict()[key], value)
            assert same or not controller.num_frozen, (step, key)
            moved |= not same
        controller.step(loss)
        prefix = ("conv1", "bn1", "layer1", "layer2")
        frozen = {k: v.clone() for k, v in model.state_dict().items() if k.startswith(prefix)}
    assert moved, "nothing trained while it was not frozen"
    assert [list(group["params"]) for group in optimizer.param_groups] == groups


def test_a_lost_evaluator_is_one_warning_and_the_learning_rate_still_acts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.train(range(30))
    assert run.controller.num_frozen >= 1

    def fail(self: ReferenceRunner, item: Any) -> Any:
        raise EvaluatorError("gone")

    monkeypatch.setattr(ReferenceRunner, "run", fail)
    with caplog.at_level(logging.WARNING):
        run.train(range(30, 44))
    assert caplog.text.count("the evaluator has stopped") == 1
    frozen = run.controller.num_frozen
    assert frozen >= 1
    run.train(range(44, 50))
    assert run.controller.num_frozen == 0, "the tenfold drop unfreezes without an evaluator"
    assert len(run.controller.history.of("evaluator_lost")) == 1


def test_a_batch_of_one_sample_loses_no_evaluator() -> None:
    run = Run("mlp", bootstrap=None, tolerance=1e-9)
    for step in range(30):
        x, y = family_batch(run.kind, step, size=1 if step % 6 == 1 else 8)
        run.controller.step(take_step(F.cross_entropy(run.model(x), y), run.optimizer))
    assert len(run.controller.history.of("reading")) >= 8


def test_a_tap_that_stays_silent_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(bootstrap=None)
    run.train(range(3))
    block = run.model.layer1[0]
    forward = block.forward
    run.model.layer1.forward = lambda x: run.model.layer1[1].forward(forward(x))  # type: ignore[method-assign]
    run.train(range(3, 20))
    assert caplog.text.count("have not fired") == 1
    assert len(run.controller.history.of("tap_silent")) == 1


def test_a_policy_that_freezes_the_last_layer_is_stopped() -> None:
    class All(StaticPolicy):
        def observe(self, reading: Any) -> int:
            return int(reading.num_layers)

    with pytest.raises(PolicyError, match="last one"):
        Run(policy=lambda: All({}))


def test_a_backward_move_goes_through_an_unfreeze() -> None:
    run = Run(policy=lambda: StaticPolicy({1: "layer2.1", 3: "layer1.1"}))
    run.train(range(5))
    assert [event.boundary for event in run.events] == ["layer2.1", None, "layer1.1"]
    assert run.model.layer2[0].conv1.weight.requires_grad
    assert not run.model.layer1[0].conv1.weight.requires_grad
    assert run.controller.schedule() == [(1, "layer2.1"), (3, "layer1.1")]


@pytest.mark.parametrize("kind", ["CosineAnnealingWarmRestarts", "LambdaLR"])
def test_warm_restarts_unfreeze_also_where_the_rate_rises_from_nought(kind: str) -> None:
    run = Run(evaluate_every=1, tolerance=1e6, bootstrap=None, unfreeze_rule="warm_restart")
    given, first = {"LambdaLR": (lambda n: abs(n % 20 - 10) / 10, 12)}.get(kind, (20, 21))
    scheduler = getattr(torch.optim.lr_scheduler, kind)(run.optimizer, given)
    for step in range(50):
        x, y = family_batch("image", step)
        run.controller.step(take_step(F.cross_entropy(run.model(x), y), run.optimizer))
        scheduler.step()
    unfrozen = [step for step, boundary in run.controller.schedule() if boundary is None]
    assert unfrozen == [first, first + 20]
    assert any(step > first for step, boundary in run.controller.schedule() if boundary)


# Dynamo itself asks a tensor for its grad while it traces a call out of the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("how", ["whole", "regional"])
def test_a_compiled_model_is_judged_if_the_controller_came_first(how: str) -> None:
    run = Run("mlp", bootstrap=None, tolerance=1e6, evaluate_every=1)
    for module in [run.model] if how == "whole" else list(run.model.children()):
        module.compile(backend="eager")
    run.train(range(12))
    assert run.controller.history.of("reading")
    assert run.controller.boundary == "1"
    assert not run.model[0].weight.requires_grad
