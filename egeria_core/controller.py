"""The life of a training run: bootstrap, watch the front, freeze it, move on, unfreeze, again.

`FreezeController.step` is the whole story; docs/controller.md tells it in prose.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from egeria_cache import BoundaryMoved, FrozenPrefix
from egeria_cache.arguments import names_known
from egeria_cache.skip import to_shards
from egeria_core.config import ControllerConfig, EvaluatorKind, ReferenceKind
from egeria_core.history import History, Verdict
from egeria_core.policies import Policy, PolicyError, Prospect, Reading, make_policy
from egeria_core.ranks import Ranks, rebuild, unwrap
from egeria_core.reference import ActivationMeter
from egeria_core.rules import RISE, Bootstrap, MeanLoss, MeanRate, Remembered, UnfreezeRule
from egeria_core.savings import Schedule, saved_parts
from egeria_core.watch import LayerMap, Meter, MovementMeter, Watched, can_be_read

log = logging.getLogger("egeria")

METERS = {"nothing": Meter, "plasticity": ActivationMeter, "movement": MovementMeter}
"""By what a policy measures; what measures in its own way makes its meter itself."""
PAPER_OPTIONS = ("window", "tolerance", "reference", "unfreeze_rule", "bootstrap")
"""Who gives one of these wants `plasticity`, which alone reads them."""


class FreezeController(Remembered):
    """Decides which front layers have converged, freezes them, and tells the cache.

    Args:
        model: The model in training, bare or wrapped by DistributedDataParallel.
        optimizer: Its optimizer; parameter groups are read, never changed.
        cache: Anything with `on_boundary_moved(event)`, such as `egeria_cache.ActivationCache`.
        policy: Name of a policy, or an object with the methods of `policies.Policy`. None: `budget`
            where the schedule's end is known, by `total_steps` or by the scheduler, the optimizer
            is one of torch's kind, and `harm_budget`, or no option of `plasticity`, is given; and
            else `plasticity`.
        lr_scheduler: The torch scheduler that sets the optimizer's rates, or a function of the
            optimizer step (counted from 0) that returns the rate. With it the learning rate that
            is left is summed exactly; it is read, never stepped.
        listeners: Called with every `BoundaryMoved`, after the cache.
        total_steps: Optimizer steps in the whole schedule.
        harm_budget: By how much the final loss may be worse for what `budget` freezes. None: 0.01,
            or a hundredth of the loss at the start where that is less.
        layers: Regular expression, or module names, instead of the balanced parse of the model.
        num_layers: Wanted number of layers of that parse.
        evaluate_every: Training steps between two evaluations. None: by the paper's guideline.
            `ControllerConfig` gives each of these with its reason.
        window: W, evaluations in the history, and stale readings in a row that freeze.
        tolerance: A reading is stale when its slope is below this part of the largest early one.
        reference: What the front layer is compared with: a snapshot in this format.
        evaluator: Where the reference runs: a process of its own, or inline.
        unfreeze_rule: When frozen layers are trained again.
        bootstrap: The stage in which nothing may freeze; None: over at once.
        move_cost: Steps that a move of the boundary takes by itself.
        log_path: The history is also written here as JSON lines.

    Raises:
        LayerError: The model has fewer than two layers.
        TypeError: What was given as the optimizer is none, or an option is misspelt.
        ValueError: An option is out of range, or n can be derived from nothing.

    Call `step(loss)` once after each `optimizer.step()`. Make it before `torch.compile` and before
    the first forward. Under DDP make one on every rank. Not thread-safe.
    """

    remembers = ("evaluate_every", "_losses", "_schedule", "_rates", "_saves")

    @names_known
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cache: Any = None,
        policy: str | Policy | None = None,
        *,
        lr_scheduler: LRScheduler | Callable[[int], float] | None = None,
        listeners: Iterable[Callable[[BoundaryMoved], None]] = (),
        total_steps: int | None = None,
        harm_budget: float | None = None,
        layers: str | Sequence[str] | None = None,
        num_layers: int = 7,
        evaluate_every: int | None = None,
        window: int = 10,
        tolerance: float = 0.2,
        reference: ReferenceKind = "auto",
        evaluator: EvaluatorKind = "auto",
        unfreeze_rule: str | UnfreezeRule = "tenfold_drop",
        bootstrap: Bootstrap | Literal["auto"] | None = "auto",
        move_cost: float = 3.0,
        log_path: str | Path | None = None,
    ) -> None:
        self.config = ControllerConfig(
            total_steps=total_steps, harm_budget=harm_budget, layers=layers, num_layers=num_layers,
            evaluate_every=evaluate_every, window=window, tolerance=tolerance, reference=reference,
            evaluator=evaluator, unfreeze_rule=unfreeze_rule, bootstrap=bootstrap,
            move_cost=move_cost, log_path=log_path,
        )  # fmt: skip
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"the second argument is the optimizer; got {type(optimizer).__name__}")
        self.model, self._ddp = unwrap(model)
        self.optimizer = optimizer
        schedule = Schedule(lr_scheduler, total_steps)
        usual = ControllerConfig()
        given = [n for n in PAPER_OPTIONS if getattr(self.config, n) != getattr(usual, n)]
        if policy is None:
            is_told = schedule.has_end and can_be_read(optimizer)
            is_budget = is_told and (harm_budget is not None or not given)
            policy = "budget" if is_budget else "plasticity"
        self.policy = make_policy(policy, self.config)
        unread = given if policy == "budget" else ["harm_budget"] * (harm_budget is not None)
        if isinstance(policy, str) and unread:
            log.warning("policy %r decides, which does not read %s", policy, ", ".join(unread))
        self._listeners: list[Callable[[BoundaryMoved], None]] = list(listeners)
        if cache is not None:
            self._listeners.insert(0, cache.on_boundary_moved)
        self._start(schedule)

    def _start(self, schedule: Schedule) -> None:
        """Make the parts, as the configuration and the policy say."""
        measure = self.policy.measure
        if measure == "movement" and not schedule.has_end:
            raise ValueError(
                f"{type(self.policy).__name__} weighs what is left of the schedule: give "
                "total_steps, or an lr_scheduler that knows its end (OneCycleLR, CosineAnnealingLR)"
            )
        self._ranks = self._make_ranks()
        self.history = History(self.config.log_path if self._ranks.is_first else None)
        self._map = self._make_map()
        self.evaluate_every = self.config.interval(len(self._map.layers), measure)
        """n, as given or as the guideline set it."""
        self._bootstrap = self.config.bootstrap_for(measure)
        self._rates, self._mean_rate = schedule, MeanRate(self.optimizer)
        self._saves: list[float] | None = None
        """What freezing the first k layers saves, as parts of a step; None: not known yet."""
        self._frozen: list[Tensor] = []
        self._prefix = FrozenPrefix(model=self.model)
        self._untold: list[BoundaryMoved] = []
        self.num_frozen = 0
        """Number of frozen layers."""
        self._step = 0
        self._tied: set[tuple[str, str]] = set()
        self._schedule: list[tuple[int, str | None]] = []
        self._losses = MeanLoss()
        kind: Any = METERS.get(measure, self.policy)
        self.per_layer = kind.per_layer
        """Whether every rank measures its part of each layer; else one measures the front."""
        if self._ranks.is_sharded and not (self.per_layer or measure == "nothing"):
            raise ValueError(
                f"{type(self.policy).__name__} looks at whole layers, which fully_shard has cut: "
                "use policy='budget', and give total_steps or an lr_scheduler that knows its end"
            )
        if not self._ranks.measures:
            kind = Meter
        self._meter = kind.make_meter(
            Watched(self.model, self.optimizer, self._map, self.evaluate_every, self.config,
                    self.history)
        )  # fmt: skip
        weakref.finalize(self, self._meter.close)
        self.policy.bind(self.boundaries)
        if measure == "nothing":
            # A boundary that is to hold from the first forward on.
            self._decide(None)

    def _make_ranks(self) -> Ranks:
        return Ranks(self._ddp, self.model)

    def _make_map(self) -> LayerMap:
        return LayerMap(self.model, self.config.layers, self.config.num_layers)

    @property
    def layers(self) -> list[str]:
        """Boundary names of all layers, front first."""
        return self._map.boundaries

    @property
    def boundaries(self) -> list[str]:
        """Boundary names that can be frozen up to: all layers but the last."""
        return self._map.boundaries[:-1]

    @property
    def boundary(self) -> str | None:
        """Name of the last frozen module, or None."""
        return self._map.boundaries[self.num_frozen - 1] if self.num_frozen else None

    def schedule(self) -> list[tuple[int, str | None]]:
        """Return every move as (first training step that uses it, boundary), for `StaticPolicy`."""
        return sorted(dict(self._schedule).items())

    def step(self, loss: Tensor | float | None = None) -> None:
        """Look at the step that has just been taken; between `optimizer.step()` and next forward.

        Args:
            loss: Training loss of this step, of the whole batch where gradients are accumulated;
                needed in the bootstrapping stage, and on every step by `budget`.

        Raises:
            ValueError: The loss is missing while it is needed.
            PolicyError: A policy answered something impossible.
        """
        self._step += 1
        self._rates.look(self._step)
        if not self._map.resolved:
            self._resolve()
        self._meter.note(loss)
        if not self._bootstrapped(loss):
            return
        # Verdicts are taken at evaluation points only, though they may be ready earlier: so runs,
        # ranks and resumed runs decide at the same steps as long as the evaluator keeps up.
        verdicts: list[Verdict] = []
        if self.policy.measure != "nothing" and self._step % self.evaluate_every == 0:
            if self._is_mine:
                self._meter.measure(self._step, self.num_frozen)
            verdicts = self._ranks.share(self._meter.collect(), self.num_frozen)
        for verdict in verdicts or (None,):
            self._decide(verdict)
        self._prepare()

    _is_mine = True
    """Whether this process looks at the front now."""

    def _prepare(self) -> None:
        """Have the next forward captured if it belongs to an evaluation step."""
        if self._is_mine and (self._step + 1) % self.evaluate_every == 0:
            self._meter.prepare(self.num_frozen)

    def _resolve(self) -> None:
        """Settle the layers by the first forward, which has just run."""
        before = self._map.boundaries
        self._map.resolve()
        if self._map.boundaries != before:
            self.policy.bind(self.boundaries)
        self._meter.bind()
        sizes = [sum(p.numel() for p in own) for own in self._map.parameters_of_layers()]
        self._saves = self._ranks.agree(saved_parts(self._map.parts, sizes))
        if self.num_frozen:
            # Frozen before any forward was seen, by guess: complete it.
            self._freeze_to(self.num_frozen)
        self._tell()

    def _bootstrapped(self, loss: Tensor | float | None) -> bool:
        """Return whether the bootstrapping stage is over."""
        if self._bootstrap is None or self._bootstrap.done:
            return True
        if loss is None:
            raise ValueError("step(loss) needs the training loss until bootstrapping is over")
        self._losses.add(loss)
        if self._step % self._bootstrap.interval(self.evaluate_every, self.config.total_steps):
            return False
        mean = self._ranks.agree(self._losses.take())
        done = self._bootstrap.observe(mean)
        self.history.add("bootstrap", self._step, loss=mean, done=done)
        return done

    def _record(self, verdict: Verdict) -> None:
        front = {name: getattr(verdict, name) for name in ("reference", "noise", "seconds")}
        self.history.add(
            "reading", verdict.step, layer=verdict.layer,
            boundary=self._map.boundaries[verdict.layer], value=verdict.value, taken_at=self._step,
            **(front if verdict.values is None else {"values": list(verdict.values)}),
        )  # fmt: skip

    def _decide(self, verdict: Verdict | None) -> None:
        """Ask the policy, and do as it says."""
        prospect = None
        if verdict is None:
            verdict = Verdict(self._step, self.num_frozen, None)
        else:
            self._record(verdict)
            if self.policy.measure == "movement":
                prospect = self._prospect()
        reading = Reading(
            step=self._step, num_layers=len(self._map.layers),
            lr=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            total_steps=self.config.total_steps, value=verdict.value, layer=verdict.layer,
            values=verdict.values, prospect=prospect,
        )  # fmt: skip
        frozen = self.policy.observe(reading)
        for note in getattr(self.policy, "take_notes", list)():
            self.history.add("decision", self._step, **note)
        if not 0 <= frozen < len(self._map.layers):
            raise PolicyError(
                f"{type(self.policy).__name__} asks for {frozen} frozen layers of "
                f"{len(self._map.layers)}; the last one must stay trainable"
            )
        if frozen < self.num_frozen:
            # Everything behind the new front was trained under another front: release it whole.
            self._move(0, "unfrozen")
        if frozen > self.num_frozen:
            self._move(frozen, "frozen")

    def _prospect(self) -> Prospect | None:
        """Return what a policy may weigh; None: it is not known."""
        rate = self._mean_rate()
        left = self._rates.remaining(self._step, rate)
        if left is None or self._saves is None:
            return None
        prefixes = map(self._map.prefix, self.boundaries)
        return Prospect(
            steps=left.steps, rate=left.rate,
            rises=left.rate is not None and left.highest > RISE * rate, saves=tuple(self._saves),
            draws=(0, *(len(prefix.drawing) for prefix in prefixes)), cost=self.config.move_cost,
            every=self.evaluate_every,
        )  # fmt: skip

    def _move(self, frozen: int, reason: str) -> None:
        """Freeze or release, rebuild DDP, write it down, tell everybody."""
        previous = self.boundary
        if self._ranks.is_sharded:
            to_shards(self.model)
        if frozen:
            self._freeze_to(frozen)
        else:
            self._release()
        self.num_frozen = frozen
        self._follow()
        why = getattr(self.policy, "reason", "")
        reason = f"{reason} by {type(self.policy).__name__}{why and ': '}{why}"
        event = BoundaryMoved(self._step, self.boundary, previous, reason)
        self._schedule.append((event.step, event.boundary))
        self._record_move(event)
        self._untold.append(event)
        self._tell()

    def _record_move(self, event: BoundaryMoved) -> None:
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        self.history.add(
            "boundary", **asdict(event),
            num_frozen=self.num_frozen, num_layers=len(self._map.layers),
            active_parameters=sum(size for size, trains in sizes if trains),
            total_parameters=sum(size for size, _ in sizes),
        )  # fmt: skip
        log.info("egeria: step %d: boundary %s (%s)", event.step, event.boundary, event.reason)

    def _follow(self) -> None:
        """Have what runs the model on several ranks follow the move, before anybody is told."""
        if self._ddp is not None:
            rebuild(self._ddp)

    def _tell(self) -> None:
        """Publish what has moved.

        Only once the layers are settled: a cache that knew earlier would run the model again
        inside the first forward, which is the one that is watched for them.
        """
        while self._untold and self._map.resolved:
            event = self._untold.pop(0)
            for listener in self._listeners:
                listener(event)

    def _freeze_to(self, frozen: int) -> None:
        """Have nothing move up to there; what is frozen already stays so.

        No gradient is asked for, none is lying around (with a zero tensor there, momentum and
        weight decay would still move the weight), and BatchNorm and Dropout are in inference mode
        through every `model.train()`, also dropout in the code of a module around the boundary, as
        far as it runs before it. The optimizer's parameter groups are never touched, so its state
        and the learning-rate schedule go on as if nothing happened.
        """
        boundary = self._map.boundaries[frozen - 1]
        prefix, module = self._map.prefix(boundary), self.model.get_submodule
        self._warn_of_tied(boundary)
        for parameter in map(self.model.get_parameter, prefix.parameters):
            if parameter.requires_grad:
                self._frozen.append(parameter)
                parameter.requires_grad, parameter.grad = False, None
        self._prefix.extend(map(module, prefix.modules))
        self._prefix.extend_around(module(boundary), map(module, prefix.around))

    def _release(self) -> None:
        """Make all of it trainable again and restore the modules' modes."""
        for parameter in self._frozen:
            parameter.requires_grad = True
        self._frozen.clear()
        self._prefix.release()

    def _warn_of_tied(self, boundary: str) -> None:
        """Say once which active weights stop training because they are tied to frozen ones."""
        prefix = self._map.prefix(boundary)
        mine = {id(self.model.get_parameter(name)): name for name in prefix.parameters}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            pair = mine.get(id(parameter), name), name
            is_active = name != pair[0] and name.rpartition(".")[0] not in prefix.modules
            if not is_active or pair in self._tied:
                continue
            self._tied.add(pair)
            log.warning(
                "egeria: %s, frozen with everything up to %s, is the same tensor as %s, which is "
                "still active: that stops training too. Untie the two if it should go on",
                pair[0], boundary, name,
            )  # fmt: skip

    def __repr__(self) -> str:
        frozen = f"{self.num_frozen} of {len(self.layers)} layers, up to {self.boundary or 'none'}"
        return f"FreezeController({type(self.policy).__name__}, step {self._step}, frozen {frozen})"

    def state_dict(self) -> dict[str, Any]:
        """Return what the next decisions depend on: plain containers, numbers and CPU tensors.

        Waits for an evaluation in flight. Under DDP, rank 0's holds the reference.
        """
        return super().state_dict() | {
            "step": self._step, "map": self._map.state_dict(), "policy": self.policy.state_dict(),
            "bootstrap": None if self._bootstrap is None else self._bootstrap.state_dict(),
            "frozen": self.num_frozen, "history": list(self.history),
            "meter": self._meter.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`: freezes what was frozen, tells the cache.

        Call it before the first forward, with the model's and optimizer's own state loaded.
        """
        self._step = state["step"]
        self._map.load_state_dict(state["map"])
        self.policy.bind(self.boundaries)
        self.policy.load_state_dict(state["policy"])
        if self._bootstrap is not None and state["bootstrap"] is not None:
            self._bootstrap.load_state_dict(state["bootstrap"])
        self.history[:] = [dict(record) for record in state["history"]]
        if self.num_frozen:
            self._move(0, "resumed")
        if state["frozen"]:
            self._move(state["frozen"], "resumed")
        super().load_state_dict(state)
        self._meter.bind()
        if state["meter"]:
            self._meter.load_state_dict(state["meter"])
        if self._bootstrap is None or self._bootstrap.done:
            self._prepare()

    def close(self) -> None:
        """Stop the evaluator and take every hook off; what is frozen stays frozen. Idempotent."""
        self._map.close()
        self._meter.close()

    def __enter__(self) -> FreezeController:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
