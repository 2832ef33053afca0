"""What a cache would bring at a boundary: measured figures, and what follows from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from egeria_cache.inspect.pairs import Share, falling

__all__ = ["Forecast", "Prospect", "in_order"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """One boundary. Seconds and bytes are per sample, except for `prove_s`."""

    boundary: str
    refused: str | None = None
    """Why the engine would not cut here; everything else is nought then."""
    raw_bytes: float = 0.0
    """Decoded, with the leaves that a hit needs besides (labels, masks)."""
    stored_bytes: float = 0.0
    codec: str | None = None
    forward_s: float = 0.0
    """Forward and loss with the prefix frozen, without a cache."""
    served_forward_s: float = 0.0
    step_s: float = 0.0
    """Forward, loss, backward and optimizer step with the prefix frozen, without a cache."""
    served_step_s: float = 0.0
    forward_error: float = 0.0
    """How far `forward_skipped` may be off (95 %)."""
    step_error: float = 0.0
    """How far `step_skipped` may be off (95 %)."""
    read_s: float = 0.0
    """Reading and decoding, which threads do beside the training."""
    write_s: float = 0.0
    """Encoding and writing, likewise."""
    prove_s: float = 0.0
    """Once: by how much the first batch takes longer."""
    cut_at: str | None = None
    """Where `gate="auto"` would cut if everything up to `boundary` is frozen: perhaps before it;
    None if it sees nothing to gain."""

    @property
    def forward_skipped(self) -> float:
        """Share of the forward that a hit saves; below 0 if it costs."""
        return 1 - self.served_forward_s / self.forward_s if self.forward_s else 0.0

    @property
    def step_skipped(self) -> float:
        """Share of the whole step with a frozen prefix that a hit saves."""
        return 1 - self.served_step_s / self.step_s if self.step_s else 0.0

    @property
    def saved_s(self) -> float:
        """What serving a sample saves, with its reading counted in full."""
        return self.step_s - self.served_step_s - self.read_s

    @property
    def epoch_ratio(self) -> float:
        """Time of an epoch of hits over one with the same prefix frozen and no cache; reading is
        counted in full."""
        return 1 - self.saved_s / self.step_s if self.step_s else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """All boundaries of a model, front first."""

    model: str
    device: str
    batch_size: int
    num_measured: int
    """Samples that were measured with."""
    num_samples: int
    """Of the whole data set."""
    variants: int
    """Augmented versions of each that would be cached."""
    limit_bytes: int | None
    """Of the planned cache."""
    load_s: float
    """Time to load a sample in one process. A hit saves that, too; it is not counted, since
    workers may hide it."""
    prospects: tuple[Prospect, ...]
    reuse: int | None = None
    """For how many epochs a random draw of a sample would be used; None: for ever, or samples draw
    nothing."""
    mean_lengths: tuple[float, ...] | None = None
    """Of the data set's samples, where they are padded: bytes are given for samples of such
    lengths."""

    def set_bytes(self, one: Prospect) -> float:
        """Bytes on disk of all samples in all variants."""
        return one.stored_bytes * self.num_samples * self.variants

    def fits(self, one: Prospect) -> float:
        """Part of them that the limit has room for: the others are computed in every epoch."""
        size = self.set_bytes(one)
        return 1.0 if self.limit_bytes is None or not size else min(1.0, self.limit_bytes / size)

    @property
    def fresh(self) -> float:
        """Part of the samples that each epoch after the first draws, computes and writes anew."""
        return 0.0 if self.reuse is None else 1 / self.reuse

    def later_epochs(self, one: Prospect) -> float:
        """Time of an epoch after the first over one with the same prefix frozen and no cache;
        reading is counted in full."""
        served = self.fits(one) * (1 - self.fresh)
        return served * one.epoch_ratio + (1 - served)

    def break_even_epoch(self, one: Prospect) -> int | None:
        """Return the epoch, from 1, at whose end the cache has paid for itself; None: never.

        Proving, writing and reading count in full, as if nothing of them were hidden behind the
        training. The first epoch computes and writes, and so does each of the first `variants`
        where draws are kept for ever; the later ones read, except for what they draw anew.
        """
        stored = self.num_samples * self.fits(one)
        gain_s = stored * ((1 - self.fresh) * one.saved_s - self.fresh * one.write_s)
        if one.refused is not None or gain_s <= 0:
            return None
        computed = self.variants if self.reuse is None else 1
        spent_s = one.prove_s + computed * stored * one.write_s
        return computed + max(1, math.ceil(spent_s / gain_s))

    def recommended(self) -> Prospect | None:
        """Return the boundary whose later epochs are shortest; None if no cut pays.

        Of boundaries that differ by less than they are known, the one that stores least.
        """
        paying = [one for one in self.prospects if self.break_even_epoch(one) is not None]
        if not paying:
            return None
        best = min(paying, key=self.later_epochs)
        reach = self.later_epochs(best) + best.step_error
        alike = [one for one in paying if self.later_epochs(one) <= reach]
        return min(alike, key=self.set_bytes)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, those that follow included."""
        best = self.recommended()
        content = asdict(self) | {"recommended": None if best is None else best.boundary}
        content["prospects"] = [
            {
                **asdict(one),
                "forward_skipped": one.forward_skipped,
                "step_skipped": one.step_skipped,
                "epoch_ratio": one.epoch_ratio,
                "later_epochs": self.later_epochs(one),
                "set_bytes": self.set_bytes(one),
                "fits": self.fits(one),
                "break_even_epoch": self.break_even_epoch(one),
            }
            for one in self.prospects
        ]
        return content


def in_order(prospects: Sequence[Prospect]) -> list[Prospect]:
    """Return the prospects with shares that fall from front to back, where their errors allow it.

    The deeper the boundary, the less of a step is left to a hit.
    """
    served = [one for one in prospects if one.refused is None]
    steps = falling([Share(1 - one.step_skipped, one.step_error) for one in served])
    forwards = falling([Share(1 - one.forward_skipped, one.forward_error) for one in served])
    smoothed = {
        one.boundary: replace(
            one,
            served_step_s=step.value * one.step_s,
            served_forward_s=forward.value * one.forward_s,
        )
        for one, step, forward in zip(served, steps, forwards, strict=True)
    }
    return [smoothed.get(one.boundary, one) for one in prospects]
