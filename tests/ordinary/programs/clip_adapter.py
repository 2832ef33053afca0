# An adapter behind CLIP, whose `encode_image` casts to its own dtype.
import torch
import torch.nn as nn
import torch.nn.functional as F
from toys import Pictures, resnet
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = resnet()
        self.visual.fc = nn.Linear(32, 16)
        self.token = nn.Embedding(20, 16)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.6)

    @property
    def dtype(self):
        return self.visual.conv1.weight.dtype

    def encode_image(self, image):
        return self.visual(image.type(self.dtype))

    def encode_text(self, text):
        return self.token(text).mean(1)

    def forward(self, image, text):
        i, t = (
            F.normalize(self.encode_image(image), dim=-1),
            F.normalize(self.encode_text(text), dim=-1),
        )
        return self.logit_scale.exp() * i @ t.t(), None


class Adapter(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(c, c // 4, bias=False), nn.ReLU(), nn.Linear(c // 4, c, bias=False), nn.ReLU()
        )

    def forward(self, x):
        return self.fc(x)


torch.manual_seed(0)
model = CLIP().eval()
adapter = Adapter(16)
loader = DataLoader(Pictures(64), 8, shuffle=True, num_workers=0)
text = torch.randint(0, 20, (4, 5))
opt = torch.optim.AdamW(adapter.parameters(), 1e-2, eps=1e-4)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 32)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader)  # +
with torch.no_grad():
    tf = F.normalize(model.encode_text(text), dim=-1)
for epoch in range(4):
    adapter.train()
    for images, target in loader:
        with torch.no_grad():
            f = model.encode_image(images)
            f = f / f.norm(dim=-1, keepdim=True)
        f = 0.2 * adapter(f) + 0.8 * f
        loss = F.cross_entropy(100.0 * f @ tf.t(), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    print(epoch, loss.item())
