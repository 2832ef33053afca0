"""Lightning's Trainer on a small network; as a script, on two processes.

python -m tests.helpers.lightning_loop ddp_spawn OUTPUT cached
"""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.integrations.lightning import EgeriaCallback
from egeria_core import FreezeController, StaticPolicy

NUM_SAMPLES, BATCH = 48, 8
LAYERS = ["backbone", "middle", "head"]


class Lit(LightningModule):
    """Three parts; notes every training loss."""

    def __init__(self, *, frozen=True):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.backbone.requires_grad_(not frozen)
        self.losses, self.val_losses = [], []

    def forward(self, x):
        return self.head(self.middle(self.backbone(x)))

    def training_step(self, batch, number):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.val_losses.append(F.cross_entropy(self(batch[0]), batch[1]).item())

    def predict_step(self, batch, number):
        return self(batch[0])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1)


def make(**kwargs):
    torch.manual_seed(0)
    return Lit(**kwargs)


def data():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return TensorDataset(features, torch.randint(3, (NUM_SAMPLES,), generator=generator))


def trainer(*callbacks, **kwargs):
    defaults = {
        "max_epochs": 3, "accelerator": "cpu", "devices": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "callbacks": list(callbacks),
    }  # fmt: skip
    return Trainer(**(defaults | kwargs))


class Report(Callback):
    """Writes what each rank has seen to a file of its own."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_epoch_end(self, trainer, pl_module):
        loader = trainer.train_dataloader
        cache = getattr(loader, "cache", None)
        if cache is not None:
            cache.flush()
        found = {
            "losses": pl_module.losses,
            "sampler": type(loader.sampler).__name__,
            "sample_id": getattr(getattr(loader, "sample_id", None), "__name__", None),
            "hits": 0 if cache is None else cache.stats().hits,
        }
        Path(self.directory, f"{trainer.global_rank}.json").write_text(json.dumps(found))


def stable_id(index):
    return f"sample {index}"


def controlled(cache, step=4):
    policy = StaticPolicy([(step, "backbone")])
    return EgeriaCallback(cache, partial(FreezeController, policy=policy, layers=LAYERS))


def main(strategy, output, what):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with_cache = what == "cached"
    model, callbacks = make(), [Report(output)]
    loader = DataLoader(data(), BATCH, shuffle=True)
    if with_cache:
        cache = ActivationCache(model, Path(output, "cache"), gate="always")
        callbacks.append(EgeriaCallback(cache, boundary="backbone"))
        loader = EgeriaLoader(
            data(), BATCH, shuffle=True, cache=cache, reuse=None, sample_id=stable_id
        )
    trainer(*callbacks, strategy=strategy, devices=2, max_epochs=4).fit(model, loader)
    if with_cache:
        cache.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
