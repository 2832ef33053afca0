"""What a probe of static boundaries found: one row per boundary, and the one to take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from egeria_core.policies import StaticPolicy

__all__ = ["Suggestion", "Trial"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A short training with everything up to `boundary` frozen from its first step on."""

    boundary: str | None
    """None: nothing frozen, what the others are compared with."""
    score: float
    """At the end of the probe: the held-out loss, or what `validate` returned."""
    harm: float
    """By how much the score is worse than with nothing frozen; below 0: it is better."""
    harm_error: float | None
    """One standard error of `harm` over the held-out batches; None where `validate` is asked."""
    step_s: float
    """Seconds of a training step, the front frozen but computed; the median. Of the processor, all
    threads together, where it trains on the CPU, so that a busy machine changes nothing."""
    front_s: float
    """Seconds of it that the front's forward takes, which a cache skips."""
    plain_step_s: float
    """Seconds of a training step with nothing frozen."""
    bytes_per_sample: float
    """Of the boundary's output: what a cache keeps of a sample, before encoding."""
    frozen_parameters: float
    """Part of the parameters that is frozen."""

    @property
    def saved(self) -> float:
        """Part of a plain step that freezing alone saves."""
        return 1 - self.step_s / self.plain_step_s

    @property
    def saved_with_cache(self) -> float:
        """Part of a plain step that is saved where the front is read from a cache for nothing."""
        return 1 - (self.step_s - self.front_s) / self.plain_step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """What `suggest_boundary` returns."""

    trials: tuple[Trial, ...]
    """One per boundary, front first."""
    boundary: str | None
    """The deepest boundary whose harm, with one standard error, is within the budget; or None."""
    harm_budget: float
    by_validation: bool
    """Whether the scores are `validate`'s; else losses on batches that were held out."""
    steps: int
    """Training steps of each trial."""
    seconds: float
    """What all of it took."""

    def policy(self) -> StaticPolicy:
        """Return a controller's policy that freezes the suggested front from the first step on."""
        return StaticPolicy({0: self.boundary})

    def __getitem__(self, boundary: str) -> Trial:
        """Return the trial of a boundary.

        Raises:
            KeyError: There was none.
        """
        for trial in self.trials:
            if trial.boundary == boundary:
                return trial
        raise KeyError(boundary)

    def __str__(self) -> str:
        """Return a table, and a sentence."""
        rows = [
            ("boundary", "harm", "saved", "with a cache", "a sample", "parameters frozen"),
            *(self._row(trial) for trial in self.trials),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, self._sentence()])

    def _row(self, trial: Trial) -> tuple[str, ...]:
        error = "" if trial.harm_error is None else f" ± {trial.harm_error:.4f}"
        mark = " *" if trial.boundary == self.boundary else ""
        return (
            f"{trial.boundary}{mark}",
            f"{trial.harm:+.4f}{error}",
            f"{trial.saved:.0%}",
            f"{trial.saved_with_cache:.0%}",
            _size(trial.bytes_per_sample),
            f"{trial.frozen_parameters:.0%}",
        )

    def _sentence(self) -> str:
        scale = "the metric of validate()" if self.by_validation else "the held-out loss"
        evidence = f"measured in {scale} after {self.steps} steps each, {self.seconds:.0f} s in all"
        if self.boundary is None:
            return (
                f"freeze nothing from the start: every front costs more than {self.harm_budget:g} "
                f"({evidence})"
            )
        best = self[self.boundary]
        effect = f"{'costs' if best.harm >= 0 else 'gains'} {abs(best.harm):.4f}"
        return (
            f"freeze up to {self.boundary} from the start: it {effect} where {self.harm_budget:g} "
            f"are allowed, and saves {best.saved:.0%} of a step, "
            f"{best.saved_with_cache:.0%} with a cache ({evidence})"
        )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
