# %% [markdown]
# # A sweep over one cache
#
# Five learning rates for a new head. The frozen backbone and the data are the same for all of them,
# so what the first run stores serves the other four from their first epoch on.

# %%
import tempfile
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
samples = TensorDataset(F.interpolate(images, size=32), torch.tensor(digits.target))


def make_model():
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(1, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(128, 128, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    backbone.requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(128 * 4 * 4, 10))


# %%
scratch = tempfile.TemporaryDirectory()
runs = {}
for rate in (0.003, 0.01, 0.03, 0.1, 0.3):
    model, losses, start = make_model(), [], time.perf_counter()
    with ActivationCache(model, scratch.name, boundary="auto") as cache:
        loader = EgeriaLoader(samples, batch_size=50, shuffle=True, cache=cache)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=rate)
        for _ in range(4):
            total = 0.0
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() / len(loader)
            losses.append(total)
        runs[rate] = losses
        seconds, stats = time.perf_counter() - start, cache.stats()
    print(f"rate {rate:<5}  {seconds:4.1f} s  {stats.hits} of {stats.hits + stats.misses} samples "
          f"from the cache  last loss {losses[-1]:.3f}")  # fmt: skip

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for rate, losses in runs.items():
    axes.plot(range(1, len(losses) + 1), losses, marker="o", label=f"rate {rate}")
axes.set(xlabel="epoch", ylabel="mean training loss")
axes.legend()
figure.tight_layout()
