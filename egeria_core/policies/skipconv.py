"""Skip-Conv's norm gate as a freezing rule, as the paper compares with it."""

from __future__ import annotations

from egeria_core.learning_rate import UnfreezeRule
from egeria_core.policies.plasticity import PlasticityPolicy

__all__ = ["SkipConvPolicy"]


class SkipConvPolicy(PlasticityPolicy):
    """Algorithm 1 with P = mean |A_T - A_R| instead of the SP loss. See the method card.

    Args:
        window: As for `PlasticityPolicy`.
        tolerance: As for `PlasticityPolicy`.
        rule: As for `PlasticityPolicy`.
        calibration: As for `PlasticityPolicy`.
    """

    def __init__(
        self,
        window: int = 10,
        tolerance: float = 0.2,
        rule: UnfreezeRule | None = None,
        calibration: int = 3,
    ) -> None:
        super().__init__(window, tolerance, rule, "activation_norm", calibration)
