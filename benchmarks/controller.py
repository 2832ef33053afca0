"""What the controller costs: `step`, the evaluator at work beside it, and the references' speed.

    python benchmarks/controller.py [--steps 400]

Prints a table and writes benchmarks/results/controller.json. `step` is given as a part of the
training step of the same run; what the armed hooks cost in the forward is counted in.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_environment import environment
from digits_task import ResNet
from torch import Tensor, nn
from torch.nn import functional as F

from egeria_core import FreezeController, sp_loss
from egeria_core import hooks as hooks_module
from egeria_core.hooks import Call, Probe
from egeria_core.reference import (
    DynamicInt8Reference,
    FloatReference,
    Reference,
    StaticInt8Reference,
    run_layer,
)

RESULTS = Path(__file__).parent / "results"


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, p90, p99 and largest, in milliseconds."""
    ordered = sorted(values)

    def at(part: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1e3, 4)

    return {"p50_ms": at(0.5), "p90_ms": at(0.9), "p99_ms": at(0.99), "max_ms": at(1.0)}


class HookClock:
    """Adds up the time that the controller's hooks take inside the forward."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._saved = {name: getattr(hooks_module._Hook, name) for name in ("before", "after")}

    def __enter__(self) -> HookClock:
        for name, function in self._saved.items():
            setattr(hooks_module._Hook, name, self._timed(function))
        return self

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            function(*args)
            self.seconds += time.perf_counter() - start

        return timed

    def __exit__(self, *error: object) -> None:
        for name, function in self._saved.items():
            setattr(hooks_module._Hook, name, function)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def step_cost(evaluator: str, reference: str, num_steps: int, every: int) -> dict[str, Any]:
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
            cpu_load_limit=1.0,
            evaluator_threads=1,
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
    step = sorted(whole[every * 2 :])[len(rest) // 2]
    return {
        "evaluator": evaluator,
        "reference": references or [reference],
        "evaluate_every": every,
        "train_step_ms": round(step * 1e3, 2),
        "mean_share": round(sum(rest) / len(rest) / step, 5),
        "worst_share": round(max(rest) / step, 5),
        "worst_share_p99": round(sorted(rest)[int(0.99 * len(rest))] / step, 5),
        "setup_ms": round(setup * 1e3, 2),
        "step": percentiles(rest),
        "readings": kinds.count("reading"),
        "dropped": kinds.count("dropped"),
    }


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
                self._model, self._optimizer, bootstrap=None, tolerance=1e-9, cpu_load_limit=1.0,
                **options,
            )  # fmt: skip

    def burst(self, num_steps: int) -> float:
        """Take so many training steps; return their seconds."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self._model(self._images), self._targets)
            loss.backward()
            self._optimizer.step()
            if self.controller is not None:
                self.controller.step(loss)
        return time.perf_counter() - start


def slowdown(every: int, rounds: int) -> list[dict[str, Any]]:
    """Let each kind of evaluator work beside a training on all cores; compare with none.

    Bursts of steps alternate between the trainings; medians of the ratios of one round.
    """
    kinds = ("inline", "thread", "process")
    trainers = {"none": Trainer()} | {
        kind: Trainer(evaluator=kind, evaluate_every=every) for kind in kinds
    }
    bursts: dict[str, list[float]] = {kind: [] for kind in trainers}
    for trainer in trainers.values():
        trainer.burst(every * 3)
    for _ in range(rounds):
        for kind, trainer in trainers.items():
            bursts[kind].append(trainer.burst(max(16, every)))
    rows = []
    for kind in kinds:
        controller = trainers[kind].controller
        assert controller is not None
        ratios = sorted(a / b for a, b in zip(bursts[kind], bursts["none"], strict=True))
        rows.append(
            {
                "evaluator": kind,
                "evaluate_every": every,
                "cores": torch.get_num_threads(),
                "slowdown": round(ratios[len(ratios) // 2], 3),
                "readings": len(controller.history.of("reading")),
                "dropped": len(controller.history.of("dropped")),
            }
        )
        controller.close()
    return rows


class Bert(nn.Module):
    """BERT-base's encoder blocks, four of them, on hidden states of shape (B, T, 768)."""

    def __init__(self, layers: int = 4, width: int = 768) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 12, 4 * width, batch_first=True, activation="gelu", norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def best_ms(function: Callable[[], Any], repeats: int) -> float:
    """Return the fastest of `repeats`: other load on the machine only ever slows down."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def reference_speed(name: str, model: nn.Module, x: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Build every kind of reference of the whole model; time it against fp32 in the same run."""
    model.eval().requires_grad_(False)
    probe = Probe([Call("model", (x,), {})], None, len(x), len(x), 0)
    int8: type = StaticInt8Reference if name.startswith("ResNet") else DynamicInt8Reference
    kinds: list[Reference] = [
        FloatReference(torch.float32),
        FloatReference(torch.bfloat16),
        int8(),
    ]
    expected = run_layer([model], probe)
    rows = []
    base = 0.0
    for reference in kinds:
        start = time.perf_counter()
        reference.build([model], probe)
        build_s = time.perf_counter() - start
        with torch.no_grad():
            forward_ms = best_ms(partial(reference.run, probe), repeats)
        base = base or forward_ms
        rows.append(
            {
                "model": name,
                "reference": reference.name,
                "forward_ms": round(forward_ms, 2),
                "speedup": round(base / forward_ms, 2),
                "build_s": round(build_s, 2),
                "sp_to_fp32": float(f"{float(sp_loss(expected, reference.run(probe))):.2g}"),
            }
        )
    return rows


def warm_resnet() -> nn.Module:
    """ResNet-56 with BatchNorm statistics of some training steps."""
    torch.manual_seed(0)
    model = ResNet(num_blocks=9, width=16).train()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(32, 1, 32, 32))
    return model


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    slower = []
    for every in (2, 16):
        slower += slowdown(every, rounds=max(3, arguments.steps // 20))
    for row in slower:
        print(json.dumps(row), flush=True)
    # One core trains, the other is the evaluator's.
    torch.set_num_threads(1)
    steps = []
    for evaluator, reference in (
        ("process", "fp32"),
        ("process", "int8"),
        ("thread", "fp32"),
        ("inline", "fp32"),
    ):
        steps.append(step_cost(evaluator, reference, arguments.steps, arguments.every))
        print(json.dumps(steps[-1]), flush=True)
    speeds = reference_speed(
        "ResNet-56, 32 x 32, batch 32", warm_resnet(), torch.randn(32, 1, 32, 32), arguments.repeats
    )
    torch.manual_seed(0)
    speeds += reference_speed(
        "BERT-like, 4 x 768, T = 128, batch 8",
        Bert(),
        torch.randn(8, 128, 768),
        max(3, arguments.repeats // 3),
    )
    for row in speeds:
        print(json.dumps(row), flush=True)
    report = {
        "environment": environment(seeds=1),
        "paper": {"reference_overhead": 0.015, "int8_speedup": 3.59},
        "step": steps,
        "slowdown": slower,
        "references": speeds,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "controller.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
