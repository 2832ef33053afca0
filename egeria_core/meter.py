"""What is measured for the policy: activations against a reference, or gradients.

A meter has one rhythm: `prepare` before the forward of an evaluation step, `measure` after its
optimizer step, `collect` whenever the controller wants verdicts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from egeria_cache.device import Event, Held, mark, runs_late
from egeria_core.config import ControllerConfig
from egeria_core.errors import EvaluatorError
from egeria_core.evaluator import (
    Evaluator,
    InlineEvaluator,
    ProcessEvaluator,
    ThreadEvaluator,
)
from egeria_core.history import History
from egeria_core.hooks import Call, LayerTap, Probe, Wire
from egeria_core.judge import InputItem, OutputItem, ReferenceRunner, Verdict
from egeria_core.policies.base import Measure
from egeria_core.prefix import LayerMap
from egeria_core.snapshot import Weights, copy_modules, copy_tensor, copy_weights

__all__ = ["ActivationMeter", "Meter", "device_of", "make_evaluator"]

log = logging.getLogger("egeria")

MISSES_TO_WARN = 3
DROPS_TO_WARN = 20


class Meter(Protocol):
    """Measures layers; used by the training thread alone."""

    @property
    def immediate(self) -> bool:
        """Whether `collect` right after `measure` returns its verdict."""

    def bind(self) -> None:
        """The layers are known, or have changed."""

    def begin(self) -> None:
        """The bootstrapping stage ends with this step: nothing before it counts."""

    def prepare(self, frozen: int) -> None:
        """The next forward belongs to an evaluation step."""

    def measure(self, step: int, frozen: int) -> None:
        """Look at the step that has just been taken."""

    def collect(self) -> list[Verdict]:
        """Return verdicts, oldest first."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later verdicts depend on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def close(self) -> None:
        """Take off hooks and stop threads; idempotent."""


def make_evaluator(config: ControllerConfig, device: torch.device) -> Evaluator:
    """Return the evaluator that the options ask for, for a model on `device`."""
    kind = config.evaluator_for(device.type)
    if config.reference == "device":
        deferred = runs_late(device) and kind != "inline"
        return InlineEvaluator(ReferenceRunner("device", device), deferred=deferred)
    if kind == "process":
        return ProcessEvaluator(
            config.reference,
            cpu_load_limit=config.cpu_load_limit,
            num_threads=config.evaluator_threads,
            training_on_cpu=not runs_late(device),
        )
    if kind == "inline":
        return InlineEvaluator(ReferenceRunner(config.reference))
    return ThreadEvaluator(config.reference)


def device_of(model: nn.Module) -> torch.device:
    """Where the model is, as far as it is on this rank."""
    tensor = next((p for p in model.parameters() if not p.is_meta), None)
    return torch.device("cpu") if tensor is None else tensor.device


class ActivationMeter:
    """Compares the frontmost active layer with its reference.

    Args:
        model: The bare model.
        layers: Its layers.
        every: Training steps between two evaluations.
        measure: What to compute.
        config: Options.
        history: Refreshes, drops and fallbacks are written here.
        evaluator: Made on first use, so that a run that never evaluates starts no process.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerMap,
        every: int,
        measure: Measure,
        config: ControllerConfig,
        history: History,
        evaluator: Callable[[], Evaluator],
    ) -> None:
        self._model, self._layers, self._every = model, layers, every
        self._measure, self._config, self._history = measure, config, history
        self._make_evaluator = evaluator
        self._evaluator: Evaluator | None = None
        self._lost = False
        self._tap: LayerTap | None = None
        self._tapped: list[tuple[str, ...]] = []
        self._rows = config.probe_rows
        self._misses = 0
        self._short = 0
        self._drops = 0
        self._undecided: list[Verdict] = []
        self._held = Held()
        self._forget_reference()
        self.bind()
        device = device_of(model).type
        if config.evaluator_for(device) == "process" and config.reference != "device":
            # A process takes seconds to start; the bootstrapping stage is time enough.
            self._evaluator = evaluator()

    def _forget_reference(self) -> None:
        self._layer: int | None = None
        self._refreshed_at: int | None = None
        self._since_refresh = 0
        self._costly = False
        self._kept: tuple[Probe, Weights] | None = None
        self._kept_ready: Event | None = None

    @property
    def immediate(self) -> bool:
        """Whether the evaluator works in `measure`."""
        return self._evaluator is not None and self._evaluator.immediate

    def bind(self) -> None:
        """Hook every layer that can become the front, unless that has been done."""
        names = [layer.modules for layer in self._layers.layers[:-1]]
        if names != self._tapped:
            if self._tap is not None:
                self._tap.close()
            self._tapped = names
            self._tap = LayerTap(
                self._model, names, num_rows=self._rows, batch_dim=self._config.batch_dim
            )

    def begin(self) -> None:
        """Nothing has been measured yet."""

    def prepare(self, frozen: int) -> None:
        """Arm the front layer's hooks."""
        if self._tap is not None and not self._lost and frozen < len(self._tapped):
            # A layer's curve starts with as many rows as its first batch has, and keeps them.
            self._tap.num_rows = self._rows if frozen == self._layer else self._config.probe_rows
            self._tap.arm(frozen, training=self._layers.training)

    def measure(self, step: int, frozen: int) -> None:
        """Hand the probe and the layer's weights to the evaluator."""
        if self._tap is None or self._lost or frozen >= len(self._tapped):
            return
        armed = self._tap.armed
        probe = self._tap.take()
        if armed != frozen:
            return  # the front has just moved on; what was captured belongs to another layer
        if probe is None:
            self._missed(step, frozen)
            return
        self._misses = 0
        new = self._layer != frozen
        if new:
            self._forget_reference()
            self._rows = probe.num_rows
        usable = self._long_enough(probe, step)
        every = self._config.refresh_every or (self._config.window if self._costly else 1)
        refresh = self._refreshed_at is None or self._since_refresh + 1 >= every
        # At one refresh per evaluation all readings are of one age; one taken later, because an
        # evaluation was dropped, would stand out of the curve for no reason of the layer's.
        judge = usable and self._refreshed_at is not None
        if every == 1 and self._refreshed_at is not None:
            judge = judge and step - self._refreshed_at == self._every
        if not (judge or refresh):
            return
        inference = self._config.train_output == "inference"
        modules = [self._model.get_submodule(call.module) for call in probe.calls]
        device = device_of(self._model)
        self._submit(
            InputItem(
                step=step,
                layer=frozen,
                probe=self._to_evaluator(probe),
                judge=judge,
                refresh=refresh,
                inference=inference,
                weights=copy_weights(modules, self._device) if refresh or inference else None,
                modules=self._structure(modules) if new else None,
            ),
            mark(device) if self._device is None else None,
        )

    @property
    def _device(self) -> torch.device | None:
        """Where the reference lives; None: the CPU."""
        if self._config.reference != "device":
            return None
        return device_of(self._model)

    def _structure(self, modules: list[nn.Module]) -> list[nn.Module]:
        copies = copy_modules(modules)
        return copies if self._device is not None else [module.cpu() for module in copies]

    def _to_evaluator(self, probe: Probe) -> Probe:
        """Start the copy to where the reference runs."""
        if self._device is not None or probe.output is None or not runs_late(probe.output.device):
            return probe

        def move(leaf: Any) -> Any:
            return copy_tensor(leaf, None) if isinstance(leaf, torch.Tensor) else leaf

        calls = [
            Call(call.module, tree_map(move, call.args), tree_map(move, call.kwargs))
            for call in probe.calls
        ]
        output = copy_tensor(probe.output, None)
        return Probe(calls, output, probe.batch_size, probe.num_rows, probe.batch_dim)

    def _submit(self, item: InputItem, ready: Event | None = None) -> None:
        training = OutputItem(
            item.step, self._measure, None if item.inference else item.probe.output
        )
        item.probe.output, item.ready = None, ready
        # A copy into memory that was given back, because the item was dropped, would hit others'.
        self._held.hold((item.probe, item.weights, training.output), ready)
        try:
            if self._evaluator is None:
                self._evaluator = self._make_evaluator()
            accepted = self._evaluator.submit(item, training)
        except EvaluatorError as error:
            self._lose(item.step, error)
            return
        if not accepted:
            self._drop(item.step, item.layer, "the evaluator is busy")
            return
        self._layer = item.layer
        self._since_refresh = 0 if item.refresh else self._since_refresh + 1
        if item.refresh and item.weights is not None:
            self._refreshed_at = item.step
            self._kept, self._kept_ready = (item.probe, item.weights), ready
            self._history.add("refresh", item.step, layer=item.layer)

    def _missed(self, step: int, frozen: int) -> None:
        """Say, once, that a tap does not fire: no reading will ever come from this layer."""
        self._misses += 1
        if self._misses == MISSES_TO_WARN:
            name = self._layers.boundaries[frozen]
            log.warning(
                "egeria: the hooks of %r have not fired in %d training forwards, so it cannot be "
                "judged; make the FreezeController before torch.compile, and check that training "
                "forwards run this module with gradients on",
                name,
                self._misses,
            )
            self._history.add("tap_silent", step, layer=frozen, boundary=name)

    def _long_enough(self, probe: Probe, step: int) -> bool:
        """Return whether the batch fills the probe; a few short ones in a row shrink the probe."""
        if probe.num_rows == self._rows:
            self._short = 0
            return True
        self._short += 1
        if self._short >= MISSES_TO_WARN and probe.num_rows >= 2:
            log.info("egeria: batches are small, the probe is now %d rows", probe.num_rows)
            self._history.add("probe_rows", step, rows=probe.num_rows)
            self._rows, self._short = probe.num_rows, 0
        return False

    def collect(self) -> list[Verdict]:
        """Return the verdicts that are ready; losing the evaluator is one warning."""
        verdicts, self._undecided = self._undecided, []
        if self._evaluator is None:
            return verdicts
        try:
            verdicts.extend(self._evaluator.poll())
        except EvaluatorError as error:
            self._lose(None, error)
        for verdict in verdicts:
            self._note(verdict)
        return [verdict for verdict in verdicts if verdict.value is not None]

    def _note(self, verdict: Verdict) -> None:
        if verdict.layer == self._layer:
            self._costly = verdict.costly
        for note in verdict.notes:
            log.info("egeria: layer %r: %s", self._layers.boundaries[verdict.layer], note)
            self._history.add("fallback", verdict.step, layer=verdict.layer, note=note)
        if verdict.dropped is not None:
            self._drop(verdict.step, verdict.layer, verdict.dropped)
        else:
            self._drops = 0

    def _drop(self, step: int, layer: int, reason: str) -> None:
        self._history.add("dropped", step, layer=layer, reason=reason)
        self._drops += 1
        if self._drops == DROPS_TO_WARN:
            log.warning(
                "egeria: the last %d evaluations were dropped (%s); nothing freezes without them. "
                "Raise cpu_load_limit or evaluate_every, or use evaluator='thread'",
                self._drops,
                reason,
            )

    def _lose(self, step: int | None, error: Exception) -> None:
        """Go on without readings: what is frozen stays frozen, learning-rate rules still act."""
        log.warning(
            "egeria: the evaluator has stopped: %s. Training goes on and frozen layers stay "
            "frozen, but no further layer will freeze",
            error,
        )
        self._history.add("evaluator_lost", -1 if step is None else step, error=str(error))
        self._lost = True
        self._stop_evaluator()

    def _stop_evaluator(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the reference (weights and calibration probe) and verdicts not yet taken."""
        if self._evaluator is not None:
            self._undecided.extend(self._evaluator.drain(timeout_s=30.0))
        if self._kept_ready is not None:
            self._kept_ready.synchronize()
        return {
            "layer": self._layer,
            "refreshed_at": self._refreshed_at,
            "since_refresh": self._since_refresh,
            "costly": self._costly,
            "rows": self._rows,
            "probe": None if self._kept is None else _probe_state(self._kept[0]),
            "weights": None if self._kept is None else self._kept[1],
            "undecided": [(v.step, v.layer, v.value) for v in self._undecided],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rebuild the reference as it was."""
        self._forget_reference()
        self._rows = state["rows"]
        self._undecided = [Verdict(*verdict) for verdict in state["undecided"]]
        if state["layer"] is None or state["probe"] is None:
            return
        probe = _load_probe(state["probe"])
        modules = [self._model.get_submodule(call.module) for call in probe.calls]
        self._submit(
            InputItem(
                step=state["refreshed_at"],
                layer=state["layer"],
                probe=probe,
                judge=False,
                refresh=True,
                inference=True,
                weights=state["weights"],
                modules=self._structure(modules),
            )
        )
        self._since_refresh = state["since_refresh"]
        self._costly = state["costly"]

    def close(self) -> None:
        """Take the hooks off and stop the evaluator."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        self._stop_evaluator()


def _probe_state(probe: Probe) -> dict[str, Any]:
    """Return the probe as plain containers and tensors."""

    def plain(leaf: Any) -> Any:
        return {"wire": leaf.call, "path": list(leaf.path)} if isinstance(leaf, Wire) else leaf

    calls = [
        (call.module, tree_map(plain, call.args), tree_map(plain, call.kwargs))
        for call in probe.calls
    ]
    return {"calls": calls, "rows": probe.num_rows, "batch_dim": probe.batch_dim}


def _load_probe(state: dict[str, Any]) -> Probe:
    def is_wire(value: Any) -> bool:
        return isinstance(value, dict) and set(value) == {"wire", "path"}

    def restore(value: Any) -> Any:
        return Wire(value["wire"], tuple(value["path"])) if is_wire(value) else value

    calls = [
        Call(
            module,
            tree_map(restore, args, is_leaf=is_wire),
            tree_map(restore, kwargs, is_leaf=is_wire),
        )
        for module, args, kwargs in state["calls"]
    ]
    return Probe(calls, None, state["rows"], state["rows"], state["batch_dim"])
