"""The life of a training run: bootstrap, watch the front, freeze it, move on, unfreeze, again.

`FreezeController.step` is the whole story; docs/controller.md tells it in prose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from egeria_cache.events import BoundaryMoved
from egeria_core.bootstrap import Bootstrap
from egeria_core.errors import EvaluatorError, PolicyError
from egeria_core.evaluator import Evaluator, InlineEvaluator, ThreadEvaluator
from egeria_core.freezer import Freezer
from egeria_core.history import History
from egeria_core.hooks import LayerTap, Probe
from egeria_core.judge import Evaluation, Judge, Verdict
from egeria_core.learning_rate import UnfreezeRule
from egeria_core.policies import Policy, Reading, make_policy
from egeria_core.prefix import LayerMap
from egeria_core.snapshot import copy_modules, copy_weights

__all__ = ["FreezeController", "guideline_interval"]

log = logging.getLogger("egeria")


class BoundaryListener(Protocol):
    """All that the controller asks of a cache."""

    def on_boundary_moved(self, event: BoundaryMoved) -> None:
        """Called between two training steps."""


def guideline_interval(total_steps: int, num_layers: int, window: int) -> int:
    """Return n by the paper's guideline: every layer gets its 2 W evaluations within the schedule.

    1.75 = 1 + 0.5 + 0.25 leaves room for bootstrapping, smoothing delay and halved windows
    (section 4.2.2: 78k iterations, W = 10, 7 layers: about 300).
    """
    return max(1, int(total_steps / (2 * window) / num_layers / 1.75))


class FreezeController:
    """Decides which front layers have converged, freezes them, and tells the cache.

    Args:
        model: The model in training.
        optimizer: Its optimizer; parameter groups are read, never changed.
        cache: Anything with `on_boundary_moved(event)`, such as `egeria_cache.ActivationCache`.
        policy: Name of a policy, or an object with the methods of `policies.Policy`.
        evaluate_every: n, training steps between two evaluations; None: by the guideline, from
            `total_steps`.
        total_steps: Optimizer steps in the whole schedule.
        window: W, evaluations in the history, and stale readings that freeze.
        tolerance: Part of the largest early slope below which a reading is stale.
        reference: What the front layer is compared with; `fp32`.
        evaluator: `thread`, or `inline` for a run that freezes at the same steps each time.
        layers: Regular expression or names, instead of the balanced parse of the model.
        num_layers: Wanted number of layers of that parse.
        unfreeze_rule: `tenfold_drop`, `warm_restart`, or an `UnfreezeRule`.
        bootstrap: The stage in which nothing may freeze; None: over at once.
        probe_rows: Samples of the batch that are compared (SP depends on their number).
        batch_dim: Dimension of the batch in the layers' arguments and outputs.
        refresh_every: Evaluations between two refreshes of the reference.
        listeners: Called with every `BoundaryMoved`, after the cache.
        log_path: The history is also written here, as JSON lines.

    Call `step(loss)` once after each `optimizer.step()`. Not thread-safe.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cache: BoundaryListener | None = None,
        policy: str | Policy = "plasticity",
        *,
        evaluate_every: int | None = None,
        total_steps: int | None = None,
        window: int = 10,
        tolerance: float = 0.2,
        reference: str = "fp32",
        evaluator: Literal["inline", "thread"] = "thread",
        layers: str | Sequence[str] | None = None,
        num_layers: int = 7,
        unfreeze_rule: str | UnfreezeRule = "tenfold_drop",
        bootstrap: Bootstrap | Literal["default"] | None = "default",
        probe_rows: int = 32,
        batch_dim: int = 0,
        refresh_every: int = 1,
        matched: bool = True,
        listeners: Iterable[Callable[[BoundaryMoved], None]] = (),
        log_path: str | Path | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.policy = make_policy(policy, window=window, tolerance=tolerance, rule=unfreeze_rule)
        self.history = History(log_path)
        self._map = LayerMap(model, layers, num_layers)
        self._total_steps = total_steps
        self._every = _interval(
            evaluate_every, total_steps, len(self._map.layers), window, self.policy
        )
        self._listeners: list[Callable[[BoundaryMoved], None]] = list(listeners)
        if cache is not None:
            self._listeners.insert(0, cache.on_boundary_moved)
        self._bootstrap = Bootstrap() if bootstrap == "default" else bootstrap
        self._probe_rows = probe_rows
        self._batch_dim = batch_dim
        self._refresh_every = refresh_every
        self._matched = matched
        self._freezer = Freezer()
        self._frozen = 0
        self._step = 0
        self._schedule: list[tuple[int, str | None]] = []
        self._loss_sum: Tensor | float = 0.0
        self._num_losses = 0
        self._training = True
        self._tap: LayerTap | None = None
        self._evaluator: Evaluator | None = None
        if self.policy.measure in ("plasticity", "activation_norm"):
            self._tap = self._make_tap()
            judge = Judge()
            self._evaluator = (
                InlineEvaluator(judge) if evaluator == "inline" else ThreadEvaluator(judge)
            )
        self._sent_layer: int | None = None
        self._refreshed_at: int | None = None
        self._since_refresh = 0
        self.policy.bind(self.boundaries)
        if self.policy.measure == "nothing":
            self._decide(None)

    @property
    def layers(self) -> list[str]:
        """Boundary names of all layers, front first."""
        return self._map.boundaries

    @property
    def boundaries(self) -> list[str]:
        """Boundary names that can be frozen up to: all layers but the last."""
        return self._map.boundaries[:-1]

    @property
    def num_frozen(self) -> int:
        """Number of frozen layers."""
        return self._frozen

    @property
    def boundary(self) -> str | None:
        """Name of the last frozen module, or None."""
        return self._map.boundaries[self._frozen - 1] if self._frozen else None

    def schedule(self) -> list[tuple[int, str | None]]:
        """Return every move as (first training step that uses it, boundary), for `StaticPolicy`."""
        return sorted(dict(self._schedule).items())

    def step(self, loss: Tensor | float | None = None) -> None:
        """Look at the step that has just been taken; between `optimizer.step()` and next forward.

        Args:
            loss: Training loss of this step; needed in the bootstrapping stage only.
        """
        self._step += 1
        if not self._map.resolved:
            self._resolve()
        if self._watching(loss):
            if self._step % self._every == 0:
                self._evaluate()
            verdicts = self._verdicts()
            for verdict in verdicts:
                self._decide(verdict)
            if not verdicts:
                self._decide(None)
            if self._tap is not None and (self._step + 1) % self._every == 0:
                self._tap.arm(self._frozen, training=self._training)

    def _resolve(self) -> None:
        """Settle the layers by the first forward."""
        before = self._map.boundaries
        self._map.resolve()
        self._training = self.model.training
        if self._map.boundaries != before:
            self.policy.bind(self.boundaries)
            if self._tap is not None:
                self._tap.close()
                self._tap = self._make_tap()
        if self._frozen:
            # Frozen before any forward was seen, by guess: complete it.
            self._freeze_to(self._frozen)

    def _make_tap(self) -> LayerTap:
        names = [layer.modules for layer in self._map.layers[:-1]]
        return LayerTap(self.model, names, num_rows=self._probe_rows, batch_dim=self._batch_dim)

    def _watching(self, loss: Tensor | float | None) -> bool:
        """Return whether the bootstrapping stage is over."""
        if self._bootstrap is None or self._bootstrap.done or self.policy.measure == "nothing":
            return True
        if loss is None:
            raise ValueError("step(loss) needs the training loss until bootstrapping is over")
        # Summed where it lies: reading it on every step would make the host wait for the device.
        self._loss_sum = self._loss_sum + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._num_losses += 1
        if self._step % self._every:
            return False
        mean = float(self._loss_sum) / self._num_losses
        self._loss_sum, self._num_losses = 0.0, 0
        done = self._bootstrap.observe(mean)
        self.history.add("bootstrap", self._step, loss=mean, done=done)
        return done

    def _evaluate(self) -> None:
        """Hand the captured probe and the layer's weights to the evaluator."""
        if self._tap is None or self._evaluator is None or self._frozen >= len(self.boundaries):
            return
        probe = self._tap.take()
        if probe is None:
            return
        if probe.batch_size < self._probe_rows:
            self._probe_rows_too_many(probe)
        layer = self._frozen
        modules = [self.model.get_submodule(call.module) for call in probe.calls]
        new = self._sent_layer != layer
        if new:
            self._refreshed_at = None
        refresh = self._refreshed_at is None or self._since_refresh + 1 >= self._refresh_every
        judge = self._refreshed_at is not None and (
            self._refresh_every > 1 or self._step - self._refreshed_at == self._every
        )
        job = Evaluation(
            step=self._step,
            layer=layer,
            measure=self.policy.measure,
            probe=probe,
            weights=copy_weights(modules) if refresh or self._matched else None,
            refresh=refresh,
            judge=judge,
            modules=copy_modules(modules) if new else None,
        )
        if not self._submit(job):
            self.history.add("dropped", self._step, layer=layer)
            return
        self._sent_layer = layer
        self._since_refresh = 0 if refresh else self._since_refresh + 1
        if refresh:
            self._refreshed_at = self._step
            self.history.add("refresh", self._step, layer=layer)

    def _probe_rows_too_many(self, probe: Probe) -> None:
        """Stub for short batches."""

    def _submit(self, job: Evaluation) -> bool:
        assert self._evaluator is not None
        try:
            return self._evaluator.submit(job)
        except EvaluatorError as error:
            self._lose_evaluator(error)
            return False

    def _verdicts(self) -> list[Verdict]:
        if self._evaluator is None:
            return []
        try:
            verdicts = self._evaluator.poll()
        except EvaluatorError as error:
            self._lose_evaluator(error)
            return []
        for verdict in verdicts:
            if verdict.value is not None:
                self.history.add(
                    "reading",
                    verdict.step,
                    layer=verdict.layer,
                    boundary=self._map.boundaries[verdict.layer],
                    value=verdict.value,
                    seconds=verdict.seconds,
                )
        return [verdict for verdict in verdicts if verdict.value is not None]

    def _lose_evaluator(self, error: Exception) -> None:
        """Go on without readings: what is frozen stays frozen, and the learning rate still acts."""
        log.warning(
            "egeria: the evaluator has stopped (%s); training goes on, nothing more will freeze",
            error,
        )
        self.history.add("evaluator_lost", self._step, error=str(error))
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def _decide(self, verdict: Verdict | None) -> None:
        """Ask the policy, and do as it says."""
        reading = Reading(
            step=self._step,
            num_layers=len(self._map.layers),
            lr=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            total_steps=self._total_steps,
            value=None if verdict is None else verdict.value,
            layer=None if verdict is None else verdict.layer,
        )
        frozen = self.policy.observe(reading)
        if not 0 <= frozen < len(self._map.layers):
            raise PolicyError(
                f"{type(self.policy).__name__} froze {frozen} of {len(self._map.layers)} layers; "
                "the last one must stay trainable"
            )
        if frozen < self._frozen:
            self._move(0, "unfreeze")
        if frozen > self._frozen:
            self._move(frozen, "converged")

    def _move(self, frozen: int, reason: str) -> None:
        """Freeze or release, write it down, tell everybody."""
        previous = self.boundary
        if frozen:
            self._freeze_to(frozen)
        else:
            self._freezer.release()
        self._frozen = frozen
        event = BoundaryMoved(self._step, self.boundary, previous, reason)
        self._schedule.append((self._step, self.boundary))
        self._sent_layer = None
        self.history.add(
            "boundary",
            self._step,
            boundary=event.boundary,
            previous=event.previous,
            reason=reason,
            num_frozen=frozen,
            active_parameters=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )
        for listener in self._listeners:
            listener(event)

    def _freeze_to(self, frozen: int) -> None:
        prefix = self._map.prefix(self._map.boundaries[frozen - 1])
        self._freezer.freeze(
            (self.model.get_parameter(name) for name in prefix.parameters),
            (self.model.get_submodule(name) for name in prefix.modules),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next decisions depend on."""
        return {
            "step": self._step,
            "map": self._map.state_dict(),
            "policy": self.policy.state_dict(),
            "bootstrap": None if self._bootstrap is None else self._bootstrap.state_dict(),
            "loss": (float(self._loss_sum), self._num_losses),
            "frozen": self._frozen,
            "schedule": list(self._schedule),
            "training": self._training,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; freezes what was frozen and tells the cache."""
        self._step = state["step"]
        self._map.load_state_dict(state["map"])
        self._training = state["training"]
        self.policy.bind(self.boundaries)
        self.policy.load_state_dict(state["policy"])
        if self._bootstrap is not None and state["bootstrap"] is not None:
            self._bootstrap.load_state_dict(state["bootstrap"])
        self._loss_sum, self._num_losses = state["loss"]
        if self._tap is not None:
            self._tap.close()
            self._tap = self._make_tap()
        self._freezer.release()
        self._frozen = 0
        if state["frozen"]:
            self._move(state["frozen"], "resumed")
        self._schedule = [(step, boundary) for step, boundary in state["schedule"]]
        if self._tap is not None and (self._step + 1) % self._every == 0:
            self._tap.arm(self._frozen, training=self._training)

    def close(self) -> None:
        """Stop the evaluator and take every hook off; what is frozen stays frozen. Idempotent."""
        self._map.close()
        if self._tap is not None:
            self._tap.close()
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def __enter__(self) -> FreezeController:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _interval(
    every: int | None, total_steps: int | None, num_layers: int, window: int, policy: Policy
) -> int:
    if every is not None:
        if every < 1:
            raise ValueError(f"evaluate_every must be a positive number of steps, got {every}")
        return every
    if total_steps is not None:
        return guideline_interval(total_steps, num_layers, window)
    if policy.measure == "nothing":
        return 1
    raise ValueError(
        "give evaluate_every (steps between two evaluations) or total_steps (optimizer steps in "
        "the whole schedule, from which the guideline sets it)"
    )
