"""One plain run with everything that is read on the way, and the runs that branch off it.

A branch starts from a copy of the plain run's whole state, freezes the first layers, sees the same
batches to the end of the same schedule, and differs in nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from egeria_cache import FrozenPrefix
from egeria_core import ControllerConfig, History
from egeria_core.rules import MeanRate
from egeria_core.watch import LayerMap, MovementMeter, Watched

from .tasks import Data, Task, make_data, make_model, make_optimizer

__all__ = ["Trainer", "run_plain", "run_twin"]

WHEN = (0.3, 0.5, 0.7, 0.85)
"""Parts of the schedule at which a branch may start."""
TAIL = 0.1
"""Part of the steps, at the end, whose mean is the final training loss."""


class Trainer:
    """Model, optimizer and schedule of one run.

    Args:
        task: Which.
        seed: Of weights, order and augmentation.
        data: Of `make_data(task.data)`.
    """

    def __init__(self, task: Task, seed: int, data: Data) -> None:
        self.task, self.seed, self.data = task, seed, data
        torch.manual_seed(seed)
        self.model = make_model(task)
        self.optimizer = make_optimizer(task, self.model)
        self.schedule = task.make_schedule(self.optimizer)
        self.step = 0
        self.losses: list[float] = []

    def save(self) -> dict[str, Any]:
        """Return a copy of everything that training depends on."""
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.schedule)
        states = copy.deepcopy([part.state_dict() for part in parts])
        return {"states": states, "step": self.step, "losses": list(self.losses)}

    def load(self, saved: dict[str, Any]) -> None:
        """Go back to a copy."""
        states = copy.deepcopy(saved["states"])
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.schedule)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        for group, rate in zip(
            self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        self.step, self.losses = saved["step"], list(saved["losses"])
        self.optimizer.zero_grad()

    def train(self, until: int) -> Iterator[Tensor]:
        """Train up to a step; yield the loss after each."""
        task = self.task
        batches = self.data.batches(task.batch_size, self.seed, start=self.step * task.accumulate)
        while self.step < until:
            self.model.train()
            self.optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(task.accumulate):
                x, y = next(batches)
                loss = loss_of(self.model(x), y) / task.accumulate
                loss.backward()
                total = total + loss.detach()
            if task.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), task.clip)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            self.losses.append(total.item())
            yield total

    def finish(self) -> dict[str, float]:
        """Train to the end; return the final losses and accuracy."""
        for _ in self.train(self.task.steps):
            pass
        return self.result()

    @torch.no_grad()
    def result(self) -> dict[str, float]:
        """Return losses in nats (last steps, training data, validation data) and accuracy."""
        self.model.eval()
        inputs, targets = (part[:1024] for part in self.data.train)
        train = _mean_loss(self.model, inputs, targets)
        valid = _mean_loss(self.model, *self.data.valid)
        tail = self.losses[-max(1, int(TAIL * self.task.steps)) :]
        return {
            "tail": sum(tail) / len(tail), "train": train[0],
            "valid": valid[0], "accuracy": valid[1],
        }  # fmt: skip


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    loss = right = 0.0
    for x, y in zip(inputs.split(128), targets.split(128), strict=True):
        output = model(x)
        loss += float(loss_of(output, y)) * len(x)
        right += float((output.argmax(-1) == y).float().mean()) * len(x)
    return loss / len(inputs), right / len(inputs)


def layers_of(trainer: Trainer) -> LayerMap:
    """Return the model's layers, settled by one forward as the controller does it."""
    layers = LayerMap(trainer.model, None, 7)
    x, y = next(trainer.data.batches(trainer.task.batch_size, trainer.seed))
    loss_of(trainer.model(x), y)
    layers.resolve()
    return layers


def run_plain(task: Task, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the plain run's record with its trace, and the branches' records."""
    data = make_data(task.data)
    trainer = Trainer(task, seed, data)
    before = trainer.save()
    layers = layers_of(trainer)
    trainer.load(before)
    meter = MovementMeter(
        Watched(trainer.model, trainer.optimizer, layers, 1, ControllerConfig(), History())
    )
    trace: list[list[float | None]] = []
    rates: list[float] = []
    moments = sorted({int(part * task.steps) for part in WHEN})
    saved: dict[int, dict[str, Any]] = {}
    for moment in [*moments, task.steps]:
        while trainer.step < moment:
            rates.append(MeanRate(trainer.optimizer)())
            for loss in trainer.train(trainer.step + 1):
                meter.note(loss)
            meter.measure(trainer.step, 0)
            trace.extend(list(verdict.values or ()) for verdict in meter.collect())
        if moment < task.steps:
            saved[moment] = trainer.save()
    meter.close()
    plain = {
        "layers": layers.boundaries, "result": trainer.result(), "trace": trace, "rates": rates,
    }  # fmt: skip
    depths = [k for k in task.depths if k < len(layers.boundaries)]
    branches = []
    for moment in moments:
        for depth in depths:
            trainer.load(saved[moment])
            result = _frozen(trainer, layers, depth)
            branches.append({"at": moment, "depth": depth, "result": result})
    # How far two runs drift apart that nobody harmed: all weights moved by a millionth.
    trainer.load(saved[moments[1]])
    plain["twin"] = run_twin(trainer)
    return plain, branches


def _frozen(trainer: Trainer, layers: LayerMap, depth: int) -> dict[str, float]:
    prefix = layers.prefix(layers.boundaries[depth - 1])
    parameters = [trainer.model.get_parameter(name) for name in prefix.parameters]
    frozen = FrozenPrefix(map(trainer.model.get_submodule, prefix.modules), model=trainer.model)
    for parameter in parameters:
        parameter.requires_grad, parameter.grad = False, None
    result = trainer.finish()
    for parameter in parameters:
        parameter.requires_grad = True
    frozen.release()
    return result


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator))


def run_twin(trainer: Trainer) -> dict[str, float]:
    """Finish the run from weights moved by a millionth."""
    _shake(trainer.model)
    return trainer.finish()
