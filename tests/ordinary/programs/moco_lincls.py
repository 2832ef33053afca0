# A linear classifier on a frozen, self-supervised ResNet.
import torch
from torch import nn
from torch.utils.data import DataLoader
from toys import Pictures, resnet

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)


def accuracy(output, target):
    return 100.0 * (output.argmax(1) == target).float().mean().item()


def train(loader, model, criterion, optimizer, epoch):
    # The backbone stays in eval mode: its running statistics are part of the features.
    model.eval()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 0:
            print(f"Epoch: [{epoch}][{i}] Loss {loss.item():.4e} Acc@1 {accuracy(output, target)}")


@torch.no_grad()
def validate(loader, model, criterion):
    model.eval()
    correct = total = 0
    for images, target in loader:
        output = model(images)
        correct += (output.argmax(1) == target).sum().item()
        total += len(target)
    print(f" * Acc@1 {100 * correct / total:.3f}")


model = resnet(num_classes=4)
for name, param in model.named_parameters():
    if name not in ["fc.weight", "fc.bias"]:
        param.requires_grad = False
model.fc.weight.data.normal_(mean=0.0, std=0.01)
model.fc.bias.data.zero_()

criterion = nn.CrossEntropyLoss()
parameters = list(filter(lambda p: p.requires_grad, model.parameters()))
assert len(parameters) == 2
optimizer = torch.optim.SGD(parameters, lr=3.0, momentum=0.9, weight_decay=0.0)

train_loader = DataLoader(Pictures(64), batch_size=16, shuffle=True, pin_memory=False)
val_loader = DataLoader(Pictures(32, seed=5), batch_size=16, shuffle=False)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +

for epoch in range(4):
    train(train_loader, model, criterion, optimizer, epoch)
    validate(val_loader, model, criterion)
