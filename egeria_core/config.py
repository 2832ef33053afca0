"""Every option of the controller, each with its reason. Checked once, here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from egeria_cache.arguments import check_choice
from egeria_core.rules import Bootstrap, UnfreezeRule

ReferenceKind = Literal["auto", "int8", "fp32"]
EvaluatorKind = Literal["auto", "process", "inline"]


LEAST = {"evaluate_every": 1, "total_steps": 1, "window": 2, "num_layers": 2}
READINGS = 100
"""Of every layer, in the whole schedule, for the prediction of harm; more bring nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """Options of `FreezeController`."""

    evaluate_every: int | None = None
    """n, training steps between two evaluations. None: by the guideline, from `total_steps`; more
    often costs CPU and brings no speed-up, much more rarely and deep layers are never reached."""
    total_steps: int | None = None
    """Optimizer steps in the whole schedule."""
    window: int = 10
    """W, evaluations in the history, and stale readings in a row that freeze (paper: 5 freezes
    unconverged layers, 20 only loses time)."""
    tolerance: float = 0.2
    """A reading is stale when its slope is below this part of the layer's largest early slope
    (paper: 0.4 freezes too eagerly, 0.1 hardly ever)."""
    reference: ReferenceKind = "auto"
    """What the front layer is compared with: a snapshot of it in `int8` or `fp32` on the
    CPU. `auto`: int8 where one fp32 forward of the layer takes long enough for the quantisation to
    pay, else fp32."""
    evaluator: EvaluatorKind = "auto"
    """Where the reference runs: a `process` of its own, or `inline` on the training thread, which
    makes the run freeze at the same steps each time, however busy the machine. `auto`: a process
    where there are CPUs for it (training on an accelerator, or more than 4 cores), else inline;
    next to a CPU training on 2 cores a process only competes."""
    layers: str | Sequence[str] | None = None
    """Regular expression, or module names, instead of the balanced parse of the model."""
    num_layers: int = 7
    """Wanted number of layers of that parse (the paper's for ResNet-56)."""
    unfreeze_rule: str | UnfreezeRule = "tenfold_drop"
    """When frozen layers are trained again: `tenfold_drop` (the paper's), `warm_restart` for
    cosine and cyclical schedules, or an object with the methods of `UnfreezeRule`."""
    bootstrap: Bootstrap | Literal["auto"] | None = "auto"
    """The stage in which nothing may freeze. None: over at once, for fine-tuning. `auto`:
    `plasticity` has it, and policies that bring a meter do not."""
    harm_budget: float | None = None
    """By how much the final loss may be worse for what `budget` freezes, in units of the loss.
    None: 0.01, or a hundredth of the loss at the start where that is less."""
    move_cost: float = 3.0
    """Steps that a move of the boundary takes by itself: memory that settles anew, a reducer that
    is rebuilt, a cache that proves its cut. On the tasks of benchmarks/time_to_accuracy it is a
    step and two forwards, and some."""
    log_path: str | Path | None = None
    """The history is also written here as JSON lines."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("harm_budget", "move_cost", "tolerance"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, got {value}")
        if isinstance(self.bootstrap, str) and self.bootstrap != "auto":
            raise ValueError(f"bootstrap is 'auto', None or a Bootstrap, not {self.bootstrap!r}")
        check_choice("reference", self.reference, ReferenceKind)
        check_choice("evaluator", self.evaluator, EvaluatorKind)

    def bootstrap_for(self, measure: str) -> Bootstrap | None:
        """Return the bootstrapping stage of a policy that measures this."""
        if measure in ("nothing", "movement") or (measure == "own" and self.bootstrap == "auto"):
            return None
        return Bootstrap() if isinstance(self.bootstrap, str) else self.bootstrap

    def interval(self, num_layers: int, measure: str) -> int:
        """Return n for a model of so many layers, and a policy that measures this.

        Raises:
            ValueError: Neither the interval nor the schedule's length was given.
        """
        if self.evaluate_every is not None:
            return self.evaluate_every
        if measure == "movement":
            # A layer is looked at in one step, the next one in the following, so that a reading of
            # all takes as many steps as there are layers.
            return max(num_layers, (self.total_steps or 0) // READINGS)
        if self.total_steps is not None:
            # The paper's guideline: every layer gets its 2 W evaluations within the schedule.
            # 1.75 = 1 + 0.5 + 0.25 leaves room for bootstrapping, smoothing delay and halved
            # windows (section 4.2.2: 78k iterations, W = 10, 7 layers: about 300).
            return max(1, int(self.total_steps / (2 * self.window) / num_layers / 1.75))
        if measure == "nothing":
            return 1
        raise ValueError(
            "give total_steps (optimizer steps in the whole schedule, from which the paper's "
            "guideline sets the interval) or evaluate_every (steps between two evaluations)"
        )
