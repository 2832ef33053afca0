"""What `step` takes of a training step, and what the armed hooks take inside the forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.digits_task import ResNet
from benchmarks.harness import percentiles_ms
from egeria_core import FreezeController
from egeria_core.config import EvaluatorKind, ReferenceKind
from egeria_core.watch import Hook

__all__ = ["step_cost"]


class HookClock:
    """Adds up the time that the controller's hooks take inside the forward."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._saved = Hook.__call__

    def __enter__(self) -> HookClock:
        setattr(Hook, "__call__", self._timed(self._saved))  # noqa: B010
        return self

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            function(*args)
            self.seconds += time.perf_counter() - start

        return timed

    def __exit__(self, *error: object) -> None:
        setattr(Hook, "__call__", self._saved)  # noqa: B010

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def step_cost(
    evaluator: EvaluatorKind, reference: ReferenceKind, num_steps: int, every: int
) -> dict[str, Any]:
    """Train ResNet-56 on random images of CIFAR's size; return what `step` took."""
    torch.manual_seed(0)
    model = ResNet(num_blocks=9, width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images, targets = torch.randn(64, 1, 32, 32), torch.randint(0, 10, (64,))
    whole: list[float] = []
    ours: list[float] = []
    with (
        HookClock() as clock,
        FreezeController(
            model,
            optimizer,
            evaluate_every=every,
            evaluator=evaluator,
            reference=reference,
            bootstrap=None,
            tolerance=1e-9,  # never freezes: the training step stays the same
        ) as controller,
    ):
        for _ in range(num_steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            before = time.perf_counter()
            controller.step(loss)
            end = time.perf_counter()
            ours.append(end - before + clock.take())
            whole.append(end - start)
        kinds = [record["kind"] for record in controller.history]
        references = sorted({r["reference"] for r in controller.history.of("reading")})
    # The first step also resolves the layers, the first evaluation also copies their structure:
    # once per run and once per layer.
    setup, rest = max(ours[: every * 2]), ours[every * 2 :]
    step = statistics.median(whole[every * 2 :])
    return {
        "evaluator": evaluator,
        "reference": references or [reference],
        "evaluate_every": every,
        "train_step_ms": round(step * 1e3, 2),
        "mean_share": round(statistics.mean(rest) / step, 5),
        "worst_share": round(max(rest) / step, 5),
        "setup_ms": round(setup * 1e3, 2),
        "step_ms": percentiles_ms(rest),
        "readings": kinds.count("reading"),
        "dropped": kinds.count("dropped"),
    }
