"""Models and data sets that the tests of `cache-inspect plan` name on the command line."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


class Cnn(nn.Module):
    """A stem, two stages of two blocks, a head; dropout before the head."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.pool = nn.MaxPool2d(2)
        self.layer2 = nn.Sequential(Block(4), Block(4))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer2(self.pool(self.layer1(x)))
        return self.head(self.dropout(x.mean((2, 3))))


class Images(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 8, 8, generator=generator), index % 3


class Transformer(nn.Module):
    """A class token of the model's own, three encoder layers, a head, and its own loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Texts(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(20, (6,), generator=generator)
        return {"input_ids": ids, "labels": index % 2, "not_for_the_model": index}


class Restless(Images):
    """Every look at a sample gives another one."""

    num_looks = 0

    def __getitem__(self, index):
        Restless.num_looks += 1
        return torch.full((1, 8, 8), float(Restless.num_looks)), 0


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def cnn_model():
    torch.manual_seed(0)
    return Cnn()


def transformer_model():
    torch.manual_seed(0)
    return Transformer()


def classified(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def read(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["labels"])["loss"]


def cnn():
    return cnn_model(), DataLoader(Images(), 4), classified


def restless():
    return cnn_model(), DataLoader(Restless(), 4), classified


def streamed():
    return cnn_model(), DataLoader(Stream(), 4), classified


def transformer():
    return transformer_model(), DataLoader(Texts(), 4), read


def mistaken():
    return cnn_model(), DataLoader(Texts(), 4), classified


def silent():
    return cnn_model(), DataLoader(Images(), 4), lambda model, batch: None


def fails():
    raise KeyError("the weights")


number = 3
