"""The life of a training run: bootstrap, watch the front, freeze it, move on, unfreeze, again.

`FreezeController.step` is the whole story; docs/controller.md tells it in prose.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from egeria_cache import BoundaryMoved
from egeria_core.config import ControllerConfig
from egeria_core.distributed import Ranks, rebuild, unwrap
from egeria_core.errors import PolicyError
from egeria_core.freezer import Freezer
from egeria_core.gradients import GradientMeter
from egeria_core.history import History
from egeria_core.judge import Verdict
from egeria_core.meter import ActivationMeter, Meter, make_evaluator
from egeria_core.policies import Policy, Reading, make_policy
from egeria_core.prefix import LayerMap
from egeria_core.tensorboard import make_listener

__all__ = ["FreezeController"]

log = logging.getLogger("egeria")


class BoundaryListener(Protocol):
    """All that the controller asks of a cache."""

    def on_boundary_moved(self, event: BoundaryMoved) -> None:
        """Called between two training steps."""


class FreezeController:
    """Decides which front layers have converged, freezes them, and tells the cache.

    Args:
        model: The model in training, bare or wrapped by DistributedDataParallel.
        optimizer: Its optimizer; parameter groups are read, never changed.
        cache: Anything with `on_boundary_moved(event)`, such as `egeria_cache.ActivationCache`.
        policy: Name of a policy, or an object with the methods of `policies.Policy`.
        listeners: Called with every `BoundaryMoved`, after the cache.
        options: See `ControllerConfig`.

    Raises:
        LayerError: The model has fewer than two layers.
        ValueError: An option is out of range, or n can be derived from nothing.

    Call `step(loss)` once after each `optimizer.step()`. Make it before `torch.compile` and before
    the first forward. Under DDP make one on every rank. Not thread-safe.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cache: BoundaryListener | None = None,
        policy: str | Policy = "plasticity",
        *,
        listeners: Iterable[Callable[[BoundaryMoved], None]] = (),
        **options: Any,
    ) -> None:
        self.config = ControllerConfig(**options)
        self.model, self._ddp = unwrap(model)
        self.optimizer = optimizer
        self.policy = make_policy(policy, self.config)
        self._ranks = Ranks(self._ddp)
        self.history = History(self.config.log_path if self._ranks.is_first else None)
        self._board = None
        if self.config.tensorboard_dir is not None and self._ranks.is_first:
            self._board = make_listener(self.config.tensorboard_dir)
        if self._board is not None:
            self.history.listeners.append(self._board)
        self._map = LayerMap(self.model, self.config.layers, self.config.num_layers)
        measured = self.policy.measure != "nothing"
        self._every = self.config.interval(len(self._map.layers), measured=measured)
        self._bootstrap = self.config.bootstrap if measured else None
        self._listeners: list[Callable[[BoundaryMoved], None]] = list(listeners)
        if cache is not None:
            self._listeners.insert(0, cache.on_boundary_moved)
        self._freezer = Freezer()
        self._untold: list[BoundaryMoved] = []
        self._frozen = 0
        self._tied: set[tuple[str, str]] = set()
        self._step = 0
        self._schedule: list[tuple[int, str | None]] = []
        self._loss_sum: Tensor | float = 0.0
        self._num_losses = 0
        self._meter = self._make_meter() if measured and self._ranks.is_first else None
        if self._meter is not None:
            self._finalizer = weakref.finalize(self, self._meter.close)
        self.policy.bind(self.boundaries)
        if not measured:
            # A boundary that is to hold from the first forward on.
            self._decide(None)

    def _make_meter(self) -> Meter:
        measure = self.policy.measure
        if measure in ("gradient_sum", "gradient_change"):
            return GradientMeter(self.model, self.optimizer, self._map, measure)
        device = next(self.model.parameters()).device
        config = self.config
        return ActivationMeter(
            self.model,
            self._map,
            self._every,
            measure,
            config,
            self.history,
            lambda: make_evaluator(config, device),
        )

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

    @property
    def evaluate_every(self) -> int:
        """n, as given or as the guideline set it."""
        return self._every

    def schedule(self) -> list[tuple[int, str | None]]:
        """Return every move as (first training step that uses it, boundary), for `StaticPolicy`."""
        return sorted(dict(self._schedule).items())

    def step(self, loss: Tensor | float | None = None) -> None:
        """Look at the step that has just been taken; between `optimizer.step()` and next forward.

        Args:
            loss: Training loss of this step; needed in the bootstrapping stage only.

        Raises:
            ValueError: The loss is missing while it is needed.
            PolicyError: A policy answered something impossible.
        """
        self._step += 1
        if not self._map.resolved:
            self._resolve()
        due = self._step % self._every == 0
        if not self._bootstrapped(loss, due):
            return
        # Verdicts are taken at evaluation points only, though they may be ready earlier: so runs,
        # ranks and resumed runs decide at the same steps as long as the evaluator keeps up.
        verdicts = self._exchange() if due else []
        for verdict in verdicts:
            self._decide(verdict)
        if due and self._meter is not None:
            self._meter.measure(self._step, self._frozen)
        if due:
            for verdict in self._exchange(only_immediate=True):
                verdicts.append(verdict)
                self._decide(verdict)
        if not verdicts:
            self._decide(None)
        self._prepare()

    def _prepare(self) -> None:
        """Have the next forward captured if it belongs to an evaluation step."""
        if self._meter is not None and (self._step + 1) % self._every == 0:
            self._meter.prepare(self._frozen)

    def _resolve(self) -> None:
        """Settle the layers by the first forward, which has just run."""
        before = self._map.boundaries
        self._map.resolve()
        if self._map.boundaries != before:
            self.policy.bind(self.boundaries)
            if self._meter is not None:
                self._meter.bind()
        if self._frozen:
            # Frozen before any forward was seen, by guess: complete it.
            self._freeze_to(self._frozen)
        self._tell()

    def _bootstrapped(self, loss: Tensor | float | None, due: bool) -> bool:
        """Return whether the bootstrapping stage is over."""
        if self._bootstrap is None or self._bootstrap.done:
            return True
        if loss is None:
            raise ValueError("step(loss) needs the training loss until bootstrapping is over")
        # Summed where it lies: reading it on every step would make the host wait for the device.
        self._loss_sum = self._loss_sum + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._num_losses += 1
        if not due:
            return False
        mean = self._ranks.agree(float(self._loss_sum) / self._num_losses)
        self._loss_sum, self._num_losses = 0.0, 0
        done = self._bootstrap.observe(mean)
        self.history.add("bootstrap", self._step, loss=mean, done=done)
        return done

    def _exchange(self, *, only_immediate: bool = False) -> list[Verdict]:
        """Collect verdicts on rank 0 and hand them to every rank."""
        if self.policy.measure == "nothing":
            return []
        meter = self._meter
        idle = meter is None or (only_immediate and not meter.immediate)
        verdicts = [] if meter is None or idle else meter.collect()
        verdicts = self._ranks.share(verdicts, self._frozen)
        for verdict in verdicts:
            self._record(verdict)
        return verdicts

    def _record(self, verdict: Verdict) -> None:
        fields: dict[str, Any] = {
            "layer": verdict.layer,
            "boundary": self._map.boundaries[verdict.layer],
            "value": verdict.value,
            "taken_at": self._step,
        }
        if verdict.values is not None:
            fields["values"] = list(verdict.values)
        else:
            fields |= {
                "reference": verdict.reference,
                "noise": verdict.noise,
                "seconds": verdict.seconds,
            }
        self.history.add("reading", verdict.step, **fields)

    def _decide(self, verdict: Verdict | None) -> None:
        """Ask the policy, and do as it says."""
        frozen = self.policy.observe(
            Reading(
                step=self._step,
                num_layers=len(self._map.layers),
                lr=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
                total_steps=self.config.total_steps,
                value=None if verdict is None else verdict.value,
                layer=None if verdict is None else verdict.layer,
                values=None if verdict is None else verdict.values,
            )
        )
        if not 0 <= frozen < len(self._map.layers):
            raise PolicyError(
                f"{type(self.policy).__name__} asks for {frozen} frozen layers of "
                f"{len(self._map.layers)}; the last one must stay trainable"
            )
        if frozen < self._frozen:
            # Everything behind the new front was trained under another front: release it whole.
            self._move(0, "unfrozen")
        if frozen > self._frozen:
            self._move(frozen, "frozen")

    def _move(self, frozen: int, reason: str) -> None:
        """Freeze or release, rebuild DDP, write it down, tell everybody."""
        previous = self.boundary
        if frozen:
            self._freeze_to(frozen)
        else:
            self._freezer.release()
        self._frozen = frozen
        if self._ddp is not None:
            rebuild(self._ddp)
        event = BoundaryMoved(self._step, self.boundary, previous, self._reason(reason))
        self._schedule.append((event.step, event.boundary))
        self.history.add(
            "boundary",
            event.step,
            boundary=event.boundary,
            previous=event.previous,
            reason=event.reason,
            num_frozen=frozen,
            num_layers=len(self._map.layers),
            active_parameters=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            total_parameters=sum(p.numel() for p in self.model.parameters()),
        )
        log.info("egeria: step %d: boundary %s (%s)", event.step, event.boundary, event.reason)
        self._untold.append(event)
        self._tell()

    def _tell(self) -> None:
        """Publish what has moved.

        Only once the layers are settled: a cache that knew earlier would run the model again
        inside the first forward, which is the one that is watched for them.
        """
        while self._untold and self._map.resolved:
            event = self._untold.pop(0)
            for listener in self._listeners:
                listener(event)

    def _reason(self, what: str) -> str:
        why = getattr(self.policy, "reason", "")
        return f"{what} by {type(self.policy).__name__}" + (f": {why}" if why else "")

    def _freeze_to(self, frozen: int) -> None:
        boundary = self._map.boundaries[frozen - 1]
        self._warn_of_tied(boundary)
        prefix = self._map.prefix(boundary)
        self._freezer.freeze(
            (self.model.get_parameter(name) for name in prefix.parameters),
            (self.model.get_submodule(name) for name in prefix.modules),
        )
        self._freezer.freeze_around(
            self.model.get_submodule(boundary), map(self.model.get_submodule, prefix.around)
        )

    def _warn_of_tied(self, boundary: str) -> None:
        """Say once which active weights stop training because they are tied to frozen ones."""
        tied = [pair for pair in self._map.tied(boundary) if pair not in self._tied]
        self._tied.update(tied)
        for mine, theirs in tied:
            log.warning(
                "egeria: %s, frozen with everything up to %s, is the same tensor as %s, which is "
                "still active: that stops training too. Untie the two if it should go on",
                mine, boundary, theirs,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return what the next decisions depend on: plain containers, numbers and CPU tensors.

        Waits for an evaluation in flight. Under DDP, rank 0's holds the reference.
        """
        return {
            "step": self._step,
            "every": self._every,
            "map": self._map.state_dict(),
            "policy": self.policy.state_dict(),
            "bootstrap": None if self._bootstrap is None else self._bootstrap.state_dict(),
            "loss": [float(self._loss_sum), self._num_losses],
            "frozen": self._frozen,
            "schedule": [list(move) for move in self._schedule],
            "history": list(self.history),
            "meter": None if self._meter is None else self._meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`: freezes what was frozen, tells the cache.

        Call it before the first forward, with the model's and optimizer's own state loaded.
        """
        self._step, self._every = state["step"], state["every"]
        self._map.load_state_dict(state["map"])
        self.policy.bind(self.boundaries)
        self.policy.load_state_dict(state["policy"])
        if self._bootstrap is not None and state["bootstrap"] is not None:
            self._bootstrap.load_state_dict(state["bootstrap"])
        self._loss_sum, self._num_losses = state["loss"]
        self.history.records = [dict(record) for record in state["history"]]
        if self._frozen:
            self._move(0, "resumed")
        if state["frozen"]:
            self._move(state["frozen"], "resumed")
        self._schedule = [(step, boundary) for step, boundary in state["schedule"]]
        if self._meter is not None:
            self._meter.bind()
            if state["meter"] is not None:
                self._meter.load_state_dict(state["meter"])
            if self._bootstrap is None or self._bootstrap.done:
                self._prepare()

    def close(self) -> None:
        """Stop the evaluator and take every hook off; what is frozen stays frozen. Idempotent."""
        self._map.close()
        if self._meter is not None:
            self._meter.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> FreezeController:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
