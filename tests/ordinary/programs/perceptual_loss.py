# A perceptual loss: a frozen net of features sees outputs that train, and targets.
import torch
import torch.nn as nn
import torch.nn.functional as F
from toys import Pictures, resnet
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)
vgg = resnet()
vgg.fc = nn.Identity()
vgg.eval().requires_grad_(False)
ae = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))
loader = DataLoader(Pictures(64), 8, shuffle=True)
opt = torch.optim.Adam(ae.parameters(), 1e-2)
cache = ActivationCache(vgg, "runs/cache", boundary="auto", loader=loader)  # +
for ep in range(4):
    for x, _ in loader:
        rec = ae(x)
        loss = F.mse_loss(vgg(rec), vgg(x)) + F.l1_loss(rec, x)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(ep, loss.item())
