# Segmentation in the form of the reference scripts: masks with a class to be ignored, poly rate.
import torch
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache  # +


class Masks(Dataset):
    def __init__(self, size, transforms=None):
        self.pictures, self.transforms = Pictures(size, side=32), transforms

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        image, label = self.pictures[index]
        mask = (image.mean(0) > 0).long() * (label + 1)
        mask[:2] = 255
        if self.transforms is not None:
            image, mask = self.transforms(image, mask)
        return image, mask


def cat_list(images, fill_value=0):
    max_size = tuple(max(s) for s in zip(*[img.shape for img in images]))
    batched = images[0].new(*(len(images), *max_size)).fill_(fill_value)
    for img, pad in zip(images, batched):
        pad[..., : img.shape[-2], : img.shape[-1]].copy_(img)
    return batched


def collate_fn(batch):
    images, targets = list(zip(*batch))
    return cat_list(images, fill_value=0), cat_list(targets, fill_value=255)


class FCN(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        net = resnet()
        self.backbone = nn.Sequential(*list(net.children())[:-2])
        inside = net.fc.in_features
        self.classifier = nn.Sequential(
            nn.Conv2d(inside, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Dropout(0.1), nn.Conv2d(8, num_classes, 1),
        )  # fmt: skip

    def forward(self, x):
        size = x.shape[-2:]
        x = self.classifier(self.backbone(x))
        return {"out": F.interpolate(x, size=size, mode="bilinear", align_corners=False)}


def criterion(inputs, target):
    return F.cross_entropy(inputs["out"], target, ignore_index=255)


def normalize(image, mask):
    return (image - 0.45) / 0.225, mask


def main():
    torch.manual_seed(0)
    data_loader = DataLoader(
        Masks(32, normalize), batch_size=8, shuffle=True, collate_fn=collate_fn, drop_last=True
    )
    model = FCN()
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    iters = len(data_loader)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=iters * 3, power=0.9)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=data_loader)  # +
    for epoch in range(3):
        model.train()
        for image, target in data_loader:
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"Epoch: [{epoch}] lr {scheduler.get_last_lr()[0]:.4f} loss {loss.item():.4f}")


main()
