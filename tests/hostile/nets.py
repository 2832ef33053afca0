"""Small networks and data sets for hostile loops: large enough to go wrong visibly."""

from __future__ import annotations

import io

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

NUM_SAMPLES = 24


class Net(nn.Module):
    """early -> middle (the boundary) -> late -> head, over rows of six numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.early = nn.Linear(6, width)
        self.middle = nn.Linear(width, width)
        self.late = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(2)

    def front(self, x):
        return self.middle(torch.tanh(self.early(x)))

    def back(self, h):
        return self.head(torch.tanh(self.late(torch.tanh(h))))

    def forward(self, x):
        return self.back(self.front(x))


def net(base: type[nn.Module] = Net, **members):
    """Return a model of a class of its own: functions become its methods, the rest attributes."""
    methods = {name: members.pop(name) for name in METHODS if name in members}
    model = type("Own", (base,), methods)()
    for name, value in members.items():
        setattr(model, name, value)
    return model


METHODS = ("front", "back", "forward")


def layered(act, **members):
    """Return a net whose first layer is of a class of its own, and gives `act(layer, output)`."""

    def forward(self, x):
        return act(self, nn.Linear.forward(self, x))

    return net(early=type("Early", (nn.Linear,), {"forward": forward, **members})(6, 8))


class ConvNet(nn.Module):
    """stem (convolution, BatchNorm, dropout) -> body (the boundary) -> head, over small images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)
        )
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6), nn.ReLU())
        self.classify = nn.Linear(6, 3)

    def forward(self, x):
        return self.classify(self.head(self.body(self.stem(x))).mean((2, 3)))


class Tokens(nn.Module):
    """embed -> block (the boundary) -> late -> head, over sequences of token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.late = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, mask=None):
        h = self.block(self.embed(tokens), src_key_padding_mask=mask)
        return self.head(torch.tanh(self.late(h)).mean(1))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(n: int = NUM_SAMPLES, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, 6, generator=seeded(seed))


def labels(n: int = NUM_SAMPLES, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, (n,), generator=seeded(seed))


def rows(n: int = NUM_SAMPLES, seed: int = 1) -> TensorDataset:
    return TensorDataset(inputs(n, seed), labels(n, seed + 1))


def images(n: int = NUM_SAMPLES) -> TensorDataset:
    return TensorDataset(torch.randn(n, 2, 8, 8, generator=seeded(3)), labels(n))


def sentences(n: int = NUM_SAMPLES) -> TensorDataset:
    return TensorDataset(torch.randint(11, (n, 5), generator=seeded(4)), labels(n))


class Pairs(Dataset):
    """Rows and labels that a script may change while it runs."""

    def __init__(self, n: int = NUM_SAMPLES, transform=None) -> None:
        self.x, self.y = inputs(n), labels(n)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x = self.x[index]
        return (x if self.transform is None else self.transform(x)), self.y[index]


def made(get, n: int = NUM_SAMPLES, **state):
    """Return a data set of a class of its own, with a state: `get(data, index)` is a sample."""
    data = type("Own", (Pairs,), {"__getitem__": get})(n)
    vars(data).update(state)
    return data


class Normed(Net):
    """A front with LayerNorm and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))


class Residual(nn.Module):
    """What an adapter is: a small trained detour, open from the start."""

    def __init__(self, inner: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.inner = inner if inner is not None else nn.Identity()
        self.down = nn.Linear(width, 2)
        self.up = nn.Linear(2, width)

    def forward(self, x):
        h = self.inner(x)
        return h + self.up(torch.tanh(self.down(h)))


class Scale:
    """A transform with a setting; its words do not show it."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


class Collate:
    """A collate function with a setting."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, samples):
        x, y = default_collate(samples)
        return x * self.scale, y


def saved(value) -> io.BytesIO:
    """Return what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
