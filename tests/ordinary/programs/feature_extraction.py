# A net of `features` and `classifier`, as VGG has them; the classifier is replaced.
import torch
from toys import Pictures
from torch import nn, optim
from torch.utils.data import DataLoader, random_split

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)


class VGG(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        layers = []
        for inside, outside in ((3, 8), (8, 16), (16, 32)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(128, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, num_classes)
        )

    def forward(self, x):
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x)


data = Pictures(80)
train_set, test_set = random_split(data, [64, 16])
trainloader = DataLoader(train_set, batch_size=16, shuffle=True)
testloader = DataLoader(test_set, batch_size=16)
net = VGG()
for param in net.features.parameters():
    param.requires_grad = False
net.classifier[-1] = nn.Linear(64, 4)
cache = ActivationCache(net, "runs/cache", boundary="auto", loader=trainloader)  # +
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(net.classifier.parameters(), lr=0.001)
for epoch in range(4):
    net.train()
    running_loss = 0.0
    for i, data in enumerate(trainloader, 0):
        inputs, labels = data
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    net.eval()
    with torch.no_grad():
        correct = sum((net(x).argmax(1) == y).sum().item() for x, y in testloader)
    print(f"[{epoch + 1}] loss: {running_loss / 4:.3f} accuracy: {correct / 16:.3f}")
