"""The schedules of rivals against their formulas, worked out by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from benchmarks.rivals import LinearPolicy, PipeTransformerPolicy
from egeria_core import Policy
from egeria_core.policies import Reading

ROWS: dict[int, tuple[float | None, ...]] = {
    # L = 9: 3 by the schedule, but the second layer's gradient is the smallest.
    2: (5.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 2.0),
    # 2 + 7 / 3 = 4.33; the smallest of the active ones lies behind.
    4: (None, None, 4.0, 4.0, 4.0, 4.0, 4.0, 1.0, 2.0),
    # 4.33 + 4.67 / 3 = 5.89, of which the ceiling; the last layer's is the smallest.
    6: (None, None, None, None, None, 4.0, 4.0, 4.0, 2.0),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("policy", "steps", "rows", "num_layers", "expected"),
    [
        (PipeTransformerPolicy(steps_per_epoch=2), range(1, 8), ROWS, 9, [0, 2, 2, 5, 5, 6, 6]),
        # L = 9, alpha = 1/3: 9 (1 - (2/3)^e) = 0, 3, 5, 6.33, ...
        (PipeTransformerPolicy(steps_per_epoch=10, gradients=False), [0, 9, 10, 20, 30, 400], {}, 9,
         [0, 0, 3, 5, 7, 8]),
        (LinearPolicy(steps_per_epoch=10, start=0.5, level=1.0), [0, 49, 50, 60, 79, 90, 100], {},
         6, [0, 0, 0, 1, 2, 4, 5]),
    ],
)  # fmt: skip
def test_schedules_follow_their_formula(
    policy: Policy, steps: Any, rows: Any, num_layers: int, expected: list[int]
) -> None:
    total = max(steps)
    read = partial(Reading, num_layers=num_layers, lr=(0.1,), total_steps=total)
    found = [policy.observe(read(step=s, values=rows.get(s))) for s in steps]
    assert found == expected
