# Metric learning: triplets are mined in the batch, over a frozen trunk.
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from toys import Pictures, resnet
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = resnet()
        size = self.trunk.fc.in_features
        self.trunk.fc = nn.Identity()
        self.embedder = nn.Linear(size, 16)

    def forward(self, x):
        return self.embedder(self.trunk(x))


def train(model, loss_func, mining_func, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, labels) in enumerate(train_loader):
        optimizer.zero_grad()
        embeddings = model(data)
        indices_tuple = mining_func(embeddings, labels)
        loss = loss_func(embeddings, labels, indices_tuple)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(f"Epoch {epoch} Iteration {batch_idx}: Loss = {loss}, "
                  f"Number of mined triplets = {mining_func.num_triplets}")  # fmt: skip


torch.manual_seed(0)
train_loader = DataLoader(Pictures(64), batch_size=16, shuffle=True)
model = Net()
model.trunk.requires_grad_(False)
optimizer = torch.optim.Adam(model.embedder.parameters(), lr=0.01)
distance = distances.CosineSimilarity()
reducer = reducers.ThresholdReducer(low=0)
loss_func = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducer)
mining_func = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
for epoch in range(1, 4):
    train(model, loss_func, mining_func, train_loader, optimizer, epoch)
