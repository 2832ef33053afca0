# A probe with a prefetcher class, which changes its batches in place while it loads ahead.
import torch
import torch.nn as nn
from toys import Pictures, resnet
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class DataPrefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            return
        self.next_input = self.next_input.float().sub_(0.1).div_(1.2)

    def next(self):
        i, t = self.next_input, self.next_target
        if i is not None:
            self.preload()
        return i, (t if i is not None else None)


best_acc, start_epoch = 0, 0
torch.manual_seed(0)
trainloader, testloader = (
    DataLoader(Pictures(64), batch_size=8, shuffle=True, num_workers=0),
    DataLoader(Pictures(32, seed=8), batch_size=16),
)
net = resnet()
net.fc = nn.Linear(32, 4)
for name, child in list(net.named_children())[:6]:
    for p in child.parameters():
        p.requires_grad = False
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(
    [p for p in net.parameters() if p.requires_grad], 0.05, momentum=0.9, weight_decay=5e-4
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
cache = ActivationCache(net, "runs/cache", boundary="auto", loader=trainloader)  # +


def train(epoch):
    net.train()
    train_loss = correct = total = 0
    pf = DataPrefetcher(trainloader)
    inputs, targets = pf.next()
    while inputs is not None:
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        correct += outputs.max(1)[1].eq(targets).sum().item()
        total += targets.size(0)
        inputs, targets = pf.next()
    print(epoch, train_loss, correct / total)


def test(epoch):
    global best_acc
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            correct += net(inputs).max(1)[1].eq(targets).sum().item()
    if correct > best_acc:
        torch.save({"net": net.state_dict(), "acc": correct}, "ckpt.pth")
        best_acc = correct


for epoch in range(start_epoch, start_epoch + 4):
    train(epoch)
    test(epoch)
    scheduler.step()
