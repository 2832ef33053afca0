"""A small network, a data set with random augmentation, and a plain training loop to compare."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.helpers.steps import take_step

PREFIXES = {
    None: [], "stem": ["stem"],
    "layer1": ["stem", "layer1"], "layer2": ["stem", "layer1", "layer2"],
}  # fmt: skip


class Net(nn.Module):
    """Four parts; BatchNorm and dropout in the front, BatchNorm behind."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Dropout(0.2)
        )
        self.layer2 = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU())
        self.layer3 = nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.layer1(x))
        x = self.layer3(self.layer2(x))
        return self.head(F.relu(x).mean(dim=(2, 3)))


class Images(Dataset):
    """Random images; each access adds noise from torch's global generator."""

    def __init__(self, n=48, noise=0.3):
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(n, 1, 10, 10, generator=generator)
        self.targets = torch.randint(5, (n,), generator=generator)
        self.noise = noise
        self.num_loaded = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.num_loaded += 1
        image = self.images[index]
        if self.noise:
            image = image + self.noise * torch.randn_like(image)
        return image, self.targets[index]


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net()


def freeze(model, boundary):
    """Freeze up to `boundary`, thaw the rest: what a person or the controller does."""
    for name, module in model.named_children():
        frozen = name in PREFIXES[boundary]
        for parameter in module.parameters():
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None


def frozen_net(boundary="layer1"):
    model = make_net()
    freeze(model, boundary)
    return model


def train_steps(model, loader, optimizer, epochs=1, on_step=None):
    """An ordinary loop. Returns the loss of every step and the gradients of the last."""
    losses = []
    for _ in range(epochs):
        model.train()
        for images, targets in loader:
            loss = take_step(F.cross_entropy(model(images), targets), optimizer)
            losses.append(loss.item())
            if on_step is not None:
                on_step(len(losses))
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return losses, gradients


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
