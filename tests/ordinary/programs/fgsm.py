# Adversarial examples, each made from the gradient of its picture.
import torch
import torch.nn as nn
from toys import Pictures, resnet
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)
loader = DataLoader(Pictures(64), batch_size=8, shuffle=True)
model = resnet()
model.fc = nn.Linear(model.fc.in_features, 4)
for n, p in model.named_parameters():
    p.requires_grad = n.startswith("fc")
opt = torch.optim.SGD(model.fc.parameters(), 0.05)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader)  # +
for epoch in range(3):
    model.train()
    for x, y in loader:
        x.requires_grad_(True)
        loss = nn.functional.cross_entropy(model(x), y)
        (g,) = torch.autograd.grad(loss, x)
        adv = (x + 0.03 * g.sign()).detach()
        loss = nn.functional.cross_entropy(model(adv), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(loss.item())
