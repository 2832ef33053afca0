# Detection: boxes of other numbers for each picture, in lists of dicts.
import torch
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache  # +


class Boxes(Dataset):
    def __init__(self, size):
        self.pictures = Pictures(size, side=32)
        generator = torch.Generator().manual_seed(3)
        counts = torch.randint(1, 5, (size,), generator=generator).tolist()
        self.boxes = [torch.rand(n, 2, generator=generator) * 24 for n in counts]

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, idx):
        image, label = self.pictures[idx]
        corner = self.boxes[idx]
        target = {
            "boxes": torch.cat([corner, corner + 8], dim=1),
            "labels": torch.full((len(corner),), label),
            "image_id": idx,
        }
        return image, target


def collate_fn(batch):
    images, targets = tuple(zip(*batch))
    return torch.stack(images), targets


class Detector(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        net = resnet()
        self.backbone = nn.Sequential(*list(net.children())[:-2])
        channels = net.fc.in_features
        self.classes = nn.Conv2d(channels, num_classes + 1, 1)
        self.boxes = nn.Conv2d(channels, 4, 1)

    def forward(self, images, targets):
        features = self.backbone(images)
        logits, regression = self.classes(features), self.boxes(features)
        side, cell = features.shape[-1], images.shape[-1] / features.shape[-1]
        classes = logits.new_zeros((len(images), side, side), dtype=torch.long)
        offsets = []
        for i, target in enumerate(targets):
            centers = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
            cells = (centers / cell).long().clamp(0, side - 1)
            classes[i, cells[:, 1], cells[:, 0]] = target["labels"] + 1
            here = regression[i, :, cells[:, 1], cells[:, 0]].t()
            offsets.append(F.smooth_l1_loss(here, target["boxes"] / 32))
        return {
            "loss_classifier": F.cross_entropy(logits, classes),
            "loss_box_reg": torch.stack(offsets).mean(),
        }


def train_one_epoch(model, optimizer, data_loader, epoch):
    model.train()
    for images, targets in data_loader:
        images = images.to("cpu")
        targets = [
            {k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in t.items()}
            for t in targets
        ]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    print(epoch, {k: round(v.item(), 3) for k, v in loss_dict.items()})


if __name__ == "__main__":
    torch.manual_seed(0)
    data_loader = DataLoader(Boxes(32), batch_size=8, shuffle=True, collate_fn=collate_fn)
    model = Detector()
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.0005)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=data_loader)  # +
    for epoch in range(3):
        train_one_epoch(model, optimizer, data_loader, epoch)
