# A plain loop under Lightning Fabric.
import lightning as L
import torch
from toys import Pictures, resnet
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


def run():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1, verbose=False)
    train_loader = DataLoader(Pictures(48), batch_size=8, shuffle=True)
    train_loader = fabric.setup_dataloaders(train_loader)
    net = resnet()
    net.requires_grad_(False)
    net.fc.requires_grad_(True)
    optimizer = torch.optim.Adadelta(net.fc.parameters(), lr=1.0)
    model, optimizer = fabric.setup(net, optimizer)
    cache = ActivationCache(net, "runs/cache", boundary="auto", loader=train_loader)  # +
    for epoch in range(3):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        print(f"Train Epoch: {epoch} Loss: {loss.item():.6f}")


if __name__ == "__main__":
    run()
