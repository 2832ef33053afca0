# Segmentation: a frozen encoder with skip connections, and a decoder that is trained.
import torch
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache  # +


class Masks(Dataset):
    def __init__(self, size):
        self.pictures = Pictures(size)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, idx):
        image, _ = self.pictures[idx]
        return {"image": image, "mask": (image.mean(0) > 0).long()}


class UNet(nn.Module):
    def __init__(self, n_classes=2):
        super().__init__()
        net = resnet()
        self.n_classes = n_classes
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu)
        self.down1, self.down2 = nn.Sequential(net.maxpool, net.layer1), net.layer2
        self.up1, self.up2 = nn.Conv2d(16 + 8, 8, 3, padding=1), nn.Conv2d(8 + 8, 8, 3, padding=1)
        self.outc = nn.Conv2d(8, n_classes, 1)

    def forward(self, x):
        x1 = self.stem(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = F.relu(self.up1(torch.cat([F.interpolate(x3, scale_factor=2), x2], dim=1)))
        x = F.relu(self.up2(torch.cat([F.interpolate(x, scale_factor=2), x1], dim=1)))
        return self.outc(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    train_loader = DataLoader(Masks(32), shuffle=True, batch_size=8)
    model = UNet()
    for part in (model.stem, model.down1, model.down2):
        part.requires_grad_(False)
    optimizer = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
    for epoch in range(3):
        model.train()
        epoch_loss = 0
        for batch in train_loader:
            images, true_masks = batch["image"], batch["mask"]
            assert images.shape[1] == 3
            masks_pred = model(images)
            loss = F.cross_entropy(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        print(f"epoch {epoch}: {epoch_loss / len(train_loader):.4f}")
