# %% [markdown]
# # Lightning
#
# A `LightningModule` with a frozen backbone, its Trainer, and one callback. The callback sets the
# boundary when `fit` begins, logs hits, and keeps the place in the epoch in the checkpoints.

# %%
import logging
import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.integrations.lightning import EgeriaCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
images = F.interpolate(images, size=32)
targets = torch.tensor(digits.target)
train, held_out = (
    TensorDataset(images[:1500], targets[:1500]),
    TensorDataset(images[1500:], targets[1500:]),
)


# %%
class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128 * 8 * 8, 10)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, index):
        inputs, labels = batch
        return F.cross_entropy(self(inputs), labels)

    def validation_step(self, batch, index):
        inputs, labels = batch
        self.log("right", (self(inputs).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.01, momentum=0.9)


# %%
torch.manual_seed(0)
module = Digits()
scratch = tempfile.TemporaryDirectory()
with ActivationCache(module, f"{scratch.name}/cache") as cache:
    loader = EgeriaLoader(train, batch_size=50, shuffle=True, cache=cache)
    val_loader = EgeriaLoader(held_out, batch_size=50, cache=cache, name="val")
    trainer = Trainer(
        max_epochs=6, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[EgeriaCallback(cache, boundary="auto")],
    )  # fmt: skip
    trainer.fit(module, loader, val_loader)
    print(f"{trainer.callback_metrics['right']:.1%} of the held-out digits right")
    print(cache.report())
