# Random crops and flips, as in every recipe: a head on frozen features.
import random

import torch
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for t in self.transforms:
            img = t(img)
        return img


class RandomCrop:
    def __init__(self, size, padding):
        self.size, self.padding = size, padding

    def __call__(self, img):
        img = F.pad(img, [self.padding] * 4)
        i, j = torch.randint(0, 2 * self.padding + 1, (2,)).tolist()
        return img[:, i : i + self.size, j : j + self.size]


class RandomHorizontalFlip:
    def __call__(self, img):
        return img.flip(-1) if random.random() < 0.5 else img


torch.manual_seed(0)
transform = Compose([RandomCrop(16, padding=2), RandomHorizontalFlip()])
trainset = Pictures(48, transform=transform)
trainloader = DataLoader(trainset, batch_size=8, shuffle=True)
net = resnet()
for p in net.parameters():
    p.requires_grad = False
net.fc = nn.Linear(net.fc.in_features, 4)
optimizer = torch.optim.SGD(net.fc.parameters(), lr=0.1, momentum=0.9)
cache = ActivationCache(net, "runs/cache", boundary="auto", loader=trainloader)  # +
for epoch in range(4):
    net.train()
    running_loss = 0.0
    for i, data in enumerate(trainloader, 0):
        inputs, labels = data
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"[{epoch + 1}] loss: {running_loss / (i + 1):.3f}")
