"""The first run on an accelerator, tiny on the simulated one."""

import pytest
import torch

from benchmarks import device as benchmark
from tests.device.simulated.runs import DEVICE


@pytest.mark.parametrize("number", range(4))
def test_it_is_right_in_every_way_and_has_its_figures(number):
    here = torch.device(DEVICE, 0)
    case = benchmark.cases(quick=True)[number]
    for one in benchmark.right(case, here, 3 * case.batch):
        assert one["hits"] == one["of"], one
        assert one["largest_difference"] < 1e-2, one
    found = benchmark.fast(case, here, 3 * case.batch, 3)
    assert min(found[f"{name}_ms"] for name in ("trained", "computed", "hit", "oracle")) > 0
    if number == 0:
        assert len(benchmark.growing(case, here, 3 * case.batch, 3)) == 3
    assert benchmark.bandwidth(here, 1 << 16) > 0
    assert benchmark.captured(here) is None
