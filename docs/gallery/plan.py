# %% [markdown]
# # What would it bring me?
#
# `cache-inspect plan` measures, before any training, what a cache would hold, save and cost at each
# place where your model can be cut. It takes a function that returns the model and one that returns
# the data.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "mine.py").write_text("""
import torch
from torch import nn
from torch.utils.data import TensorDataset

def block(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )

def make_model():
    return nn.Sequential(
        block(3, 32), block(32, 32), block(32, 64, 2), block(64, 64), block(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )

def make_data():
    return TensorDataset(torch.rand(20_000, 3, 32, 32), torch.arange(20_000) % 10)
""")

# %%
command = [sys.executable, "-m", "egeria_cache.inspect", "plan", "mine:make_model",
           "--data", "mine:make_data", "--batch-size", "32", "--samples", "64"]  # fmt: skip
print(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# With `--json` the same comes for programs, to be drawn:

# %%
told = subprocess.run([*command, "--json"], cwd=folder, capture_output=True, text=True, check=True)
rows = json.loads(told.stdout)["boundaries"]
print(sorted(rows[0]))
