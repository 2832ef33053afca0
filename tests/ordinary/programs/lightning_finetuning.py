# Lightning's BaseFinetuning: a frozen backbone, thawed by the callback after some epochs.
import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestone=4):
        super().__init__()
        self.milestone = milestone

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestone:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[-3:], optimizer=optimizer
            )


class TransferLearningModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        backbone = resnet()
        layers = list(backbone.children())[:-1]
        self.feature_extractor = nn.Sequential(*layers)
        self.fc = nn.Sequential(nn.Linear(backbone.fc.in_features, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        x = self.feature_extractor(x)
        return self.fc(x.view(x.size(0), -1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        train_loss = F.cross_entropy(self.forward(x), y)
        self.log("train_loss", train_loss, prog_bar=True)
        return train_loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        parameters = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.Adam(parameters, lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(3, verbose=False)
    train = DataLoader(Pictures(48), batch_size=8, shuffle=True)
    valid = DataLoader(Pictures(16, seed=4), batch_size=8)
    model = TransferLearningModel()
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train)  # +
    trainer = L.Trainer(
        max_epochs=6, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        callbacks=[MilestonesFinetuning()], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, train, valid)
