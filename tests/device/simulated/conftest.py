from __future__ import annotations

import pytest
import torch

from tests.device import backend


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    missing = backend.compiler_missing()
    if missing:
        pytest.skip(missing)
    torch.set_num_threads(1)
    return backend.register()
