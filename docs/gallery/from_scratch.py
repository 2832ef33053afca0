# %% [markdown]
# # From scratch: the controller finds what has converged
#
# Nothing is frozen by hand. The controller watches how far each layer still moves, predicts what
# freezing it would cost, and freezes the front within a budget that you set. The cache follows.

# %%
import tempfile

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_core import FreezeController

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
samples = TensorDataset(F.interpolate(images, size=16), torch.tensor(digits.target))


def block(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )


torch.manual_seed(0)
model = nn.Sequential(
    block(1, 16, 1), block(16, 16, 1), block(16, 32, 2), block(32, 32, 1), block(32, 64, 2),
    block(64, 64, 1), nn.Flatten(), nn.Linear(64 * 16, 10),
)  # fmt: skip

# %% [markdown]
# The rate falls to zero over a known number of steps: from that the controller knows what is left
# to be gained.

# %%
epochs = 12
scratch = tempfile.TemporaryDirectory()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
cache = ActivationCache(model, scratch.name, gate="always")
loader = EgeriaLoader(samples, batch_size=50, shuffle=True, cache=cache)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
controller = FreezeController(
    model, optimizer, cache, lr_scheduler=schedule, total_steps=epochs * len(loader)
)
for epoch in range(epochs):
    model.train()
    total = 0.0
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        controller.step(loss)
        total += loss.item() / len(loader)
    print(f"epoch {epoch:2}  loss {total:.4f}  frozen up to {controller.boundary}")
print(cache.report())

# %%
figure, axes = plt.subplots(figsize=(6, 2.5))
moves = controller.history.of("boundary")
steps = [0, *(move["step"] for move in moves), epochs * len(loader)]
frozen = [0, *(move["num_frozen"] for move in moves), controller.num_frozen]
axes.step(steps, frozen, where="post")
axes.set(xlabel="training step", ylabel="frozen layers")
figure.tight_layout()
controller.close()
cache.close()
