"""One training program, started in each way that people start programs."""

from __future__ import annotations

import pytest

from tests.helpers.scripts import launched, run_cells, run_file, side

PROGRAM = """
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset  # -

from net import Net
# %%
from torch.utils.data import TensorDataset  # +
from egeria_cache import ActivationCache, EgeriaLoader  # +

torch.manual_seed(3)
x, y = torch.randn(64, 6), torch.arange(64) % 3
data = TensorDataset(x, y)
model = Net()
model.front.requires_grad_(False)
rank = os.environ.get("RANK", "0")
# %%
loader = DataLoader(data, batch_size=16)  # -
cache = ActivationCache(model, f"cache-{rank}", "front", gate="always")  # +
loader = EgeriaLoader(data, batch_size=16, cache=cache)  # +
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
# %%
for epoch in range(3):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    cache.flush()  # +
# %%
hits = cache.stats().hits  # +
cache.close()  # +
print("done", sys.argv[1:])
"""
NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.front(x))
"""


def program(place, *, cached):
    place.mkdir()
    (place / "net.py").write_text(NET)
    path = place / "program.py"
    path.write_text(side(PROGRAM, cached=cached))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    ran = run_file(program(tmp_path_factory.mktemp("plain") / "place", cached=False), "--plain")
    assert ran.error is None
    assert ran.output == "done ['--plain']\n"
    assert len(ran.losses) == 12
    return ran.losses


def assert_served(ran, plain):
    assert ran.error is None
    assert ran.losses == pytest.approx(plain, rel=1e-5)
    assert ran.names["hits"] == 128
    assert (ran.told, ran.warned) == ([], [])


def test_a_file_at_module_level_is_served(tmp_path, plain):
    assert_served(run_file(program(tmp_path / "place", cached=True)), plain)


def test_cells_of_a_notebook_are_served(tmp_path, plain):
    path = program(tmp_path / "place", cached=True)
    assert_served(run_cells(path.read_text().split("# %%\n"), path.parent), plain)


@pytest.mark.cases(3)
@pytest.mark.parametrize("launcher", ["python", "torchrun", "accelerate"])
def test_a_launched_file_is_served_in_each_process(tmp_path, plain, launcher):
    ran = launched(launcher, program(tmp_path / "place", cached=True))
    assert len(ran) == (2 if launcher == "torchrun" else 1)
    for one in ran:
        assert_served(one, plain)


def test_a_program_that_fails_says_so(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("print('before')\nraise ValueError('mine')\n")
    ran = run_file(path)
    assert str(ran.error) == "mine"
    assert ran.output == "before\n"
