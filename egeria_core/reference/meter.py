"""Compares the frontmost active layer with its reference, at every n-th step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from egeria_cache.device import Held, device_of, mark, runs_late, to_host
from egeria_core.history import Verdict
from egeria_core.reference.capture import Call, LayerTap, Probe, copy_modules, copy_weights
from egeria_core.reference.evaluators import Evaluator, InlineEvaluator, ProcessEvaluator
from egeria_core.reference.references import EvaluatorError, InputItem, sp_loss
from egeria_core.watch import Meter, Watched

log = logging.getLogger("egeria")

PROBE_ROWS = 32
"""Samples of the batch that are compared. SP depends on their number, so it is fixed; more rows
steady the reading and cost the reference's forward."""
ROOMY_ABOVE_CPUS = 4
"""With more CPUs than these, a CPU training leaves some to an evaluator process."""
MISSES_TO_WARN = 3
DROPS_TO_WARN = 20


class ActivationMeter(Meter):
    """Asks an evaluator how far the front layer's output is from its reference's.

    The layer's present weights and its snapshot of earlier on are run on the same captured rows,
    both in inference mode: Dropout's noise and batch statistics are no part of the reading.
    """

    distance: Callable[[Tensor, Tensor], Tensor] = staticmethod(sp_loss)
    """Of the two activations; a function that can be pickled, for an evaluator in a process."""

    def __init__(self, watched: Watched) -> None:
        self._model, self._layers, self._every = watched.model, watched.layers, watched.every
        self._config, self._history = watched.config, watched.history
        self._tapped: list[tuple[str, ...]] = []
        self._tap = LayerTap(self._model, [])
        self._rows = PROBE_ROWS
        self._misses = self._short = self._drops = 0
        self._undecided: list[Verdict] = []
        self._held = Held()
        self._kept: InputItem | None = None
        """What the reference was made of."""
        self._costly = False
        self.bind()
        # A process takes seconds to start; the bootstrapping stage is time enough.
        kind = self._config.evaluator
        if kind == "auto":
            roomy = runs_late(device_of(self._model)) or (os.cpu_count() or 1) > ROOMY_ABOVE_CPUS
            kind = "process" if roomy else "inline"
        make = ProcessEvaluator if kind == "process" else InlineEvaluator
        self._evaluator: Evaluator | None = make(self._config.reference)

    @property
    def _layer(self) -> int | None:
        """Of which there is a reference."""
        return None if self._kept is None else self._kept.layer

    def bind(self) -> None:
        """Hook every layer that can become the front, unless that has been done."""
        names = [layer.modules for layer in self._layers.layers[:-1]]
        if names != self._tapped:
            self._tap.close()
            self._tapped, self._tap = names, LayerTap(self._model, names)

    def prepare(self, frozen: int) -> None:
        """Arm the front layer's hooks."""
        if self._evaluator is not None and frozen < len(self._tapped):
            # A layer's curve starts with as many rows as its first batch has, and keeps them.
            rows = self._rows if frozen == self._layer else PROBE_ROWS
            self._tap.arm(frozen, rows, training=self._layers.training)

    def measure(self, step: int, frozen: int) -> None:
        """Hand the probe and the layer's weights to the evaluator."""
        armed, probe = self._tap.armed, self._tap.take()
        if armed != frozen:
            return  # the front has just moved on; what was captured belongs to another layer
        if probe is None:
            # Said once: no reading will ever come from a layer whose tap does not fire.
            self._misses += 1
            if self._misses == MISSES_TO_WARN:
                name = self._layers.boundaries[frozen]
                log.warning(
                    "egeria: the hooks of %r have not fired in %d training forwards, so it cannot "
                    "be judged; make the FreezeController before torch.compile, and check that "
                    "training forwards run this module with gradients on",
                    name, self._misses,
                )  # fmt: skip
                self._history.add("tap_silent", step, layer=frozen, boundary=name)
            return
        self._misses = 0
        new = self._layer != frozen
        if probe.num_rows < 2 and (new or self._costly):
            return  # one sample has no pairs that could be compared
        if new:
            self._kept, self._costly, self._rows = None, False, probe.num_rows
        is_whole = self._is_long_enough(probe, step)
        age = 0 if self._kept is None else (step - self._kept.step) // self._every
        # Of a reference whose refresh only copies weights all readings are of one age: one taken
        # later, because an evaluation was dropped, would stand out of the curve for no reason of
        # the layer's. Where it quantises, the moving average over W readings compares equal ages.
        judge = is_whole and (age == 1 or (self._costly and age > 0))
        refresh = age == 0 or not self._costly or age >= self._config.window
        if judge or refresh:
            modules, device = self._modules(probe), device_of(self._model)
            if runs_late(device):
                probe = probe.mapped(to_host)
            item = InputItem(step, frozen, probe, judge, refresh, copy_weights(modules))
            item.modules = copy_modules(modules) if new else None
            item.distance, item.ready = self.distance, mark(device)
            self._submit(item)

    def _modules(self, probe: Probe) -> list[nn.Module]:
        return [self._model.get_submodule(call.module) for call in probe.calls]

    def _submit(self, item: InputItem) -> None:
        if self._evaluator is None:
            return
        # A copy into memory that was given back, because the item was dropped, would hit others'.
        self._held.hold((item.probe, item.weights), item.ready)
        kept = replace(item, modules=None)
        try:
            accepted = self._evaluator.submit(item)
        except EvaluatorError as error:
            self._lose(item.step, error)
            return
        if not accepted:
            self._history.add("dropped", item.step, layer=item.layer, reason="evaluator busy")
            self._drops += 1
            if self._drops == DROPS_TO_WARN:
                log.warning(
                    "egeria: the last %d evaluations were dropped, as the evaluator is busy; "
                    "nothing freezes without them. Raise evaluate_every, or use evaluator='inline'",
                    self._drops,
                )
        elif item.refresh:
            self._kept = kept
            self._history.add("refresh", item.step, layer=item.layer)

    def _is_long_enough(self, probe: Probe, step: int) -> bool:
        """Return whether the batch fills the probe; a few short ones in a row shrink the probe."""
        is_whole = probe.num_rows == self._rows
        self._short = 0 if is_whole else self._short + 1
        if self._short >= MISSES_TO_WARN and probe.num_rows >= 2:
            log.info("egeria: batches are small, the probe is now %d rows", probe.num_rows)
            self._history.add("probe_rows", step, rows=probe.num_rows)
            self._rows, self._short = probe.num_rows, 0
        return is_whole

    def collect(self, timeout_s: float = 0.0) -> list[Verdict]:
        """Return the verdicts that are ready; losing the evaluator is one warning."""
        verdicts, self._undecided = self._undecided, []
        try:
            fresh = [] if self._evaluator is None else self._evaluator.poll(timeout_s)
        except EvaluatorError as error:
            self._lose(-1, error)
            return verdicts
        for verdict in fresh:
            self._drops = 0
            if verdict.layer == self._layer:
                self._costly = verdict.costly
            for note in verdict.notes:
                log.info("egeria: layer %r: %s", self._layers.boundaries[verdict.layer], note)
                self._history.add("fallback", verdict.step, layer=verdict.layer, note=note)
        return verdicts + [verdict for verdict in fresh if verdict.value is not None]

    def _lose(self, step: int, error: Exception) -> None:
        """Go on without readings: what is frozen stays frozen, learning-rate rules still act."""
        log.warning(
            "egeria: the evaluator has stopped: %s. Training goes on and frozen layers stay "
            "frozen, but no further layer will freeze",
            error,
        )
        self._history.add("evaluator_lost", step, error=str(error))
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the reference (weights and calibration probe) and verdicts not yet taken."""
        self._undecided = self.collect(timeout_s=30.0)
        state: dict[str, Any] = {
            "rows": self._rows,
            "costly": self._costly,
            "undecided": [(v.step, v.layer, v.value) for v in self._undecided],
            "kept": None,
        }
        if self._kept is not None:
            kept, probe = self._kept, self._kept.probe
            kept.arrive()
            calls = [*map(tuple, probe.calls)]
            state["kept"] = (kept.step, kept.layer, calls, probe.num_rows, kept.weights)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rebuild the reference as it was."""
        self._kept, self._rows = None, state["rows"]
        self._undecided = [Verdict(*verdict) for verdict in state["undecided"]]
        if state["kept"] is not None:
            step, layer, calls, rows, weights = state["kept"]
            probe = Probe([Call(*call) for call in calls], rows)
            modules = copy_modules(self._modules(probe))
            self._submit(InputItem(step, layer, probe, False, True, weights, modules))
        self._costly = state["costly"]

    def close(self) -> None:
        """Take the hooks off and stop the evaluator."""
        self._tap.close()
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None
