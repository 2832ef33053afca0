# A new head on a backbone's `forward_features`, inside a module of one's own.
import torch
from toys import Pictures, VisionTransformer
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)
backbone = VisionTransformer(num_classes=0)
for p in backbone.parameters():
    p.requires_grad = False
head = nn.Sequential(nn.LayerNorm(backbone.num_features), nn.Linear(backbone.num_features, 4))
loader = DataLoader(Pictures(64), batch_size=16, shuffle=True)
cache = ActivationCache(backbone, "runs/cache", boundary="auto", loader=loader)  # +
opt = torch.optim.AdamW(head.parameters(), lr=1e-2)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
for epoch in range(4):
    backbone.eval()
    head.train()
    for x, y in loader:
        logits = head(backbone.forward_features(x))
        loss = loss_fn(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: {loss.item():.3f}")
