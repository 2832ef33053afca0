# %% [markdown]
# # A linear probe on frozen features
#
# A new head is trained on a backbone that stays as it is. Two lines make the loader serve the
# backbone's output from the second epoch on. Both runs below start from the same weights and draw
# the same batches.

# %%
import copy
import tempfile
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
images = F.interpolate(images, size=32)
samples = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
held_out = images[1500:], torch.tensor(digits.target[1500:])

# %% [markdown]
# Any frozen model will do; here a small convolutional one at its random start, whose features are
# good enough for digits.


# %%
def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(block(1, 64), block(64, 128), block(128, 128), nn.Flatten())
        self.head = nn.Linear(128 * 4 * 4, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(0)
model = Probe()
_ = model.backbone.requires_grad_(False).eval()


# %%
def train(model, loader, epochs=12):
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.02, momentum=0.9)
    seconds, losses, start = [], [], time.perf_counter()
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    return seconds, losses, right


plain = copy.deepcopy(model)
torch.manual_seed(1)
plain_run = train(plain, DataLoader(samples, batch_size=50, shuffle=True))

# %% [markdown]
# And the same with the cache. A backbone as small as this one may not win back its proof, and on a
# fast machine nothing would be served; `gate="always"` does not wait to see:

# %%
torch.manual_seed(1)
scratch = tempfile.TemporaryDirectory()
cache = ActivationCache(model, scratch.name, boundary="auto", gate="always")
cached_run = train(model, EgeriaLoader(samples, batch_size=50, shuffle=True, cache=cache))
print(cache.report())
cache.close()

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for label, (seconds, losses, right) in (("plain", plain_run), ("cached", cached_run)):
    axes.plot(seconds, losses, marker="o", label=f"{label}: {right:.1%} of held-out digits right")
axes.set(xlabel="seconds", ylabel="loss of an epoch's last batch", yscale="log")
axes.legend()
figure.tight_layout()
