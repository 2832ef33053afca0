# Fine-tuning from the top: one more stage is thawed every second epoch.
import torch
import torch.nn.functional as F
from toys import Pictures, resnet
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)
dataset = Pictures(64)
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model = resnet()
stages = [model.fc, model.layer4, model.layer3]


def set_trainable(modules):
    for p in model.parameters():
        p.requires_grad = False
    for module in modules:
        for p in module.parameters():
            p.requires_grad = True


def param_groups(modules, lr):
    return [{"params": m.parameters(), "lr": lr / 2**i} for i, m in enumerate(modules)]


cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader)  # +
for phase in range(len(stages)):
    set_trainable(stages[: phase + 1])
    optimizer = torch.optim.Adam(param_groups(stages[: phase + 1], 1e-3))
    for epoch in range(2):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(f"phase {phase} epoch {epoch} loss {total / len(dataset):.4f}")
