from __future__ import annotations

import math

import pytest

from egeria_cache.gate import policy
from tests.hostile.known import KNOWN


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Epochs are so short that an audit takes more than its share of them."""
    monkeypatch.setattr(policy, "MAX_COST", math.inf)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        outcome, why = KNOWN.get(item.name, (None, ""))
        if outcome is not None and item.path.parent.name == "hostile":
            item.add_marker(pytest.mark.xfail(raises=outcome, reason=why, strict=False))
