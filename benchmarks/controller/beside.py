"""Training on all cores, with the evaluator at work beside it."""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.digits_task import ResNet
from benchmarks.harness import in_turns
from egeria_core import FreezeController

__all__ = ["slowdown"]

KINDS = ("inline", "process")


class Trainer:
    """A small ResNet that trains on random images, in bursts that can be interleaved."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self._model = ResNet(num_blocks=3, width=16)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._images, self._targets = torch.randn(64, 1, 16, 16), torch.randint(0, 10, (64,))
        self.controller: FreezeController | None = None
        if options:
            self.controller = FreezeController(
                self._model, self._optimizer, bootstrap=None, tolerance=1e-9,
                **options,
            )  # fmt: skip

    def burst(self, num_steps: int) -> None:
        """Take so many training steps."""
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self._model(self._images), self._targets)
            loss.backward()
            self._optimizer.step()
            if self.controller is not None:
                self.controller.step(loss)


def slowdown(every: int, rounds: int) -> list[dict[str, Any]]:
    """Let each kind of evaluator work beside a training on all cores; compare with none."""
    trainers = {"none": Trainer()} | {
        kind: Trainer(evaluator=kind, evaluate_every=every) for kind in KINDS
    }
    for trainer in trainers.values():
        trainer.burst(every * 3)
    uses = {kind: partial(one.burst, max(16, every)) for kind, one in trainers.items()}
    times = in_turns(repeat(uses, rounds)).wall
    rows = []
    for kind in KINDS:
        controller = trainers[kind].controller
        assert controller is not None
        rows.append(
            {
                "evaluator": kind,
                "evaluate_every": every,
                "cores": torch.get_num_threads(),
                "slowdown": round(times.ratio(kind, "none"), 3),
                "readings": len(controller.history.of("reading")),
                "dropped": len(controller.history.of("dropped")),
            }
        )
        controller.close()
    return rows
