# Transfer learning as a LightningModule: the features are frozen, a classifier is trained.
import lightning as L
import torch
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class ImagenetTransferLearning(L.LightningModule):
    def __init__(self, num_target_classes=4):
        super().__init__()
        backbone = resnet()
        num_filters = backbone.fc.in_features
        self.feature_extractor = nn.Sequential(*list(backbone.children())[:-1])
        self.feature_extractor.requires_grad_(False)
        self.classifier = nn.Linear(num_filters, num_target_classes)

    def forward(self, x):
        self.feature_extractor.eval()
        with torch.no_grad():
            representations = self.feature_extractor(x).flatten(1)
        return self.classifier(representations)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.classifier.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(7, verbose=False)
    train_loader = DataLoader(Pictures(48), batch_size=8, shuffle=True)
    val_loader = DataLoader(Pictures(16, seed=4), batch_size=8)
    model = ImagenetTransferLearning()
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, train_loader, val_loader)
