"""The cost model: it chooses the cut that saves most, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from egeria_cache.gate.cost import Costs, choose
from egeria_cache.skip.serve.cut import Step

STEPS = [
    Step("stem", seconds_per_sample=1e-4, row_bytes=400_000),
    Step("layer1", seconds_per_sample=1e-3, row_bytes=200_000),
    Step("layer2", seconds_per_sample=2e-3, row_bytes=100_000),
]
GROWN = [*STEPS, Step("up", seconds_per_sample=2.05e-3, row_bytes=1_600_000)]
"""The last frozen module expands its input sixteen times, and costs next to nothing."""
FREE = Costs(fetch_s_per_byte=0.0, fetch_s_per_sample=0.0)
DEAR = Costs(fetch_s_per_byte=1e-9, overlap=0.0)


@pytest.mark.parametrize(
    ("steps", "costs", "cut"),
    [
        (STEPS, FREE, "layer2"),
        (GROWN, FREE, "up"),
        (GROWN, DEAR, "layer2"),
        (GROWN, Costs(), "layer2"),
        (STEPS[:1], DEAR, None),
        ([replace(STEPS[0], row_bytes=0), STEPS[1]], FREE, "layer1"),
        ([replace(STEPS[0], row_bytes=0)], FREE, None),
    ],
)
def test_the_cut_that_saves_most_is_chosen_and_none_while_the_front_is_cheap(steps, costs, cut):
    assert choose(steps, costs) == cut
