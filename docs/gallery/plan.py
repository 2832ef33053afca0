# %% [markdown]
# # What would it bring me?
#
# `cache-inspect plan` measures, before any training, what a cache would hold and save at each
# place where your model can be cut. It takes a function that returns what your training script
# makes: the model, the loader, and a step that gives the loss.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

folder = Path(tempfile.mkdtemp())
(folder / "mine.py").write_text("""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def block(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )

def make_model():
    return nn.Sequential(
        block(3, 32), block(32, 32, 2), block(32, 64), block(64, 64, 2), block(64, 128, 2),
        nn.Flatten(), nn.Linear(128 * 16, 10),
    )

def make():
    data = TensorDataset(torch.rand(20_000, 3, 32, 32), torch.arange(20_000) % 10)
    return make_model(), DataLoader(data, batch_size=32), step

def step(model, batch):
    images, targets = batch
    return nn.functional.cross_entropy(model(images), targets)
""")

# %% [markdown]
# On a terminal it prints a table, with a recommendation on top. With `--json` the same comes for
# programs, to be drawn:

# %%
command = [
    sys.executable, "-m", "egeria_cache.inspect", "plan", "mine:make", "--boundaries", "^[135]$",
    "--json",
]  # fmt: skip
told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
plan = json.loads(told.stdout)
print(f"recommended: cut at {plan['recommended']}")
for one in plan["prospects"]:
    print(
        f"cut at {one['boundary']}: {one['step_skipped']:4.0%} of a step saved, "
        f"{one['stored_bytes'] / 1e3:.1f} kB a sample"
    )

# %%
figure, axes = plt.subplots(figsize=(6, 3))
names = [one["boundary"] for one in plan["prospects"]]
errors = [100 * one["step_error"] for one in plan["prospects"]]
axes.bar(names, [100 * one["step_skipped"] for one in plan["prospects"]], yerr=errors, capsize=4)
for index, one in enumerate(plan["prospects"]):
    axes.annotate(f"{one['set_bytes'] / 1e6:,.0f} MB", (index, 2), ha="center", color="white")
axes.set(xlabel="cut at", ylabel="% of a step that a hit saves", ylim=(0, 110))
figure.tight_layout()
