# Pairs of pictures through one net, and a contrastive loss.
import torch
from toys import Pictures, resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)


class Pairs(Dataset):
    def __init__(self, size):
        self.data = Pictures(size)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x1, y1 = self.data[index]
        x2, y2 = self.data[(index * 7 + 3) % len(self.data)]
        return x1, x2, float(y1 == y2)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        net = resnet()
        self.cnn = nn.Sequential(*list(net.children())[:-1])
        self.fc = nn.Sequential(nn.Linear(2 * net.fc.in_features, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward_once(self, x):
        return self.cnn(x).view(x.size(0), -1)

    def forward(self, input1, input2):
        return self.fc(torch.cat([self.forward_once(input1), self.forward_once(input2)], 1))


train_loader = DataLoader(Pairs(48), shuffle=True, batch_size=8)
model = SiameseNetwork()
model.cnn.requires_grad_(False)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    for img0, img1, label in train_loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(img0, img1).squeeze(1), label.float())
        loss.backward()
        optimizer.step()
    print(f"Epoch {epoch} loss {loss.item():.4f}")
