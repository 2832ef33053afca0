"""Skip-Conv's norm gate as a freezing rule, as the paper compares with it."""

from __future__ import annotations

from torch import Tensor

from egeria_core.policies import Measure, PlasticityPolicy
from egeria_core.reference import ActivationMeter
from egeria_core.watch import Meter, Watched

__all__ = ["SkipConvPolicy"]


class SkipConvPolicy(PlasticityPolicy):
    """Algorithm 1 with P = mean |A_T - A_R| instead of the SP loss. See the method card."""

    measure: Measure = "own"
    per_layer = False

    def make_meter(self, watched: Watched) -> Meter:
        """Return what compares activations."""
        return NormMeter(watched)


def mean_difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return mean |A_T - A_R|."""
    return (ours.float() - theirs).abs().mean()


class NormMeter(ActivationMeter):
    """Reads the norm of the difference."""

    distance = staticmethod(mean_difference)
