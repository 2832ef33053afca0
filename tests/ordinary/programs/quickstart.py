# The shape of a first PyTorch program, with a part of the stack frozen.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)
training_data = TensorDataset(torch.randn(64, 1, 8, 8), torch.arange(64) % 10)
train_dataloader = DataLoader(training_data, batch_size=16)
for X, y in train_dataloader:
    print(f"Shape of X: {X.shape}, of y: {y.shape} {y.dtype}")
    break


class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.y = nn.Linear(32, 10)

    def forward(self, x):
        return self.y(self.body(self.flatten(x)))


model = NeuralNetwork()
model.body.requires_grad_(False)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.y.parameters(), lr=1e-2)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +


for t in range(4):
    print(f"Epoch {t + 1}\n-------------------------------")
    for batch, (X, y) in enumerate(train_dataloader):
        pred = model(X)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch % 2 == 0:
            print(f"loss: {loss.item():>7f}  [{(batch + 1) * len(X):>5d}/64]")
print("Done!")
