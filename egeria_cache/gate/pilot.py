"""Whether a loader is served and from which cut: decided by whole steps and measured costs.

Pure: it is told what happened, and answers with a `Turn` where something should change. What is
measured, and why whole steps have the last word: part J of docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from egeria_cache.gate.gate import CostMeter, Gate
from egeria_cache.gate.ledger import Ledger
from egeria_cache.prefetch import PlannedEntry, View

__all__ = ["Pilot", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What should change after a step."""

    kind: Literal["stop", "earlier", "back"]
    """Compute this loader from now on; cut before the frozen boundary; cut at it again."""
    why: str
    where: str | None = None
    """The earlier module."""


class Pilot:
    """Keeps the ledgers of one cache, and asks the gate where to cut. Training thread only.

    Args:
        mode: "auto" decides by what is measured; "always" and "never" only keep the figures.
        max_overlap: See `CostMeter`.
    """

    def __init__(self, mode: str, max_overlap: float) -> None:
        self.mode = mode
        self.meter = CostMeter(max_overlap)
        self.stopped: dict[str, str] = {}
        """Loaders for which skipping did not pay under this boundary, and why."""
        self._gate = Gate(self.meter)
        self._ledgers: dict[tuple[str, str, str], Ledger] = {}

    def moved(self) -> None:
        """The frozen boundary is another one: decide anew. What was measured stays."""
        self.stopped.clear()
        self._gate.reset()

    @property
    def wants_trial_read(self) -> bool:
        """Whether reading should be measured before the first hits come."""
        return self.mode == "auto" and not (self.meter.is_enough or self._gate.is_settled)

    def wants_control(self, view: View, boundary: str) -> bool:
        """Whether a batch that this view could serve whole should be computed, for comparison."""
        return self.mode == "auto" and self._ledger(view, boundary).wants_control()

    def step(
        self,
        view: View,
        boundary: str,
        frozen: str,
        seconds: float,
        num_samples: float,
        entry: PlannedEntry | None,
        *,
        is_control: bool,
    ) -> Turn | None:
        """Note what a whole training step cost; say what should change, if anything.

        Args:
            view: Where the loader's batches enter now.
            boundary: The boundary as the user named it.
            frozen: The last frozen module, as the model names it.
            seconds: From one request for a batch to the next.
            num_samples: Of the batch.
            entry: Its hits; None if it was computed whole.
            is_control: It could have been served.
        """
        if entry is not None and entry.num_hits:
            self.meter.read(entry.read_s, entry.num_read, entry.cut.row_bytes)
            self.meter.waited(entry.waited_s, entry.num_hits)
        ledger, at_frozen = self._ledger(view, boundary), self._ledger(view, boundary, frozen)
        if ledger is not at_frozen and not ledger.has_computed:
            ledger.inherit(at_frozen)
        if entry is None:
            ledger.computed(seconds, num_samples, is_control=is_control)
        elif entry.view is view and not entry.num_misses:
            ledger.served(seconds, num_samples)
            if not ledger.is_due:
                return None
        return self._turn(view, frozen, ledger, at_frozen) if self.mode == "auto" else None

    def _turn(self, view: View, frozen: str, ledger: Ledger, at_frozen: Ledger) -> Turn | None:
        pays, verdict = ledger.verdict
        why = ledger.worse_than(at_frozen) if pays and ledger is not at_frozen else None
        why = why if pays else verdict
        if why is not None:
            if self._gate.undo(why):
                return Turn("back", why)
            self.stopped[view.loader_name] = f"off: {why}"
            return Turn("stop", why)
        if view.cut.boundary == frozen:
            where = self._gate.look(view.cut.profile, was_served=ledger.is_served_enough)
            if where is not None:
                return Turn("earlier", str(self._gate), where)
        return None

    def decisions(self, boundary: str | None) -> Iterator[str]:
        """Say in words what was decided under this boundary, for the statistics."""
        if str(self._gate):
            yield str(self._gate)
        for (name, at, cut), ledger in self._ledgers.items():
            if at == boundary and ledger.has_any:
                why = self.stopped.get(name) or ledger.verdict[1]
                yield f"{name.rpartition('#')[0]!r} at {cut!r}: {why}"

    @property
    def saved_s(self) -> float:
        """Training time saved so far; negative if it was lost."""
        return sum(ledger.saved_s for ledger in self._ledgers.values())

    def _ledger(self, view: View, boundary: str, cut: str | None = None) -> Ledger:
        key = view.loader_name, boundary, cut or view.cut.boundary
        ledger = self._ledgers.get(key)
        if ledger is None:
            ledger = self._ledgers[key] = Ledger()
        return ledger
