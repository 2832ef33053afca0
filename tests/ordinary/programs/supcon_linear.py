# SupContrast's linear stage: an encoder in eval mode whose output is detached, frozen by nothing.
import torch
from toys import Pictures, resnet
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class SupConResNet(nn.Module):
    def __init__(self, feat_dim=16):
        super().__init__()
        self.encoder = resnet()
        dim_in = self.encoder.fc.in_features
        self.encoder.fc = nn.Identity()
        self.head = nn.Sequential(
            nn.Linear(dim_in, dim_in), nn.ReLU(inplace=True), nn.Linear(dim_in, feat_dim)
        )

    def forward(self, x):
        return nn.functional.normalize(self.head(self.encoder(x)), dim=1)


def train(train_loader, model, classifier, criterion, optimizer, epoch):
    model.eval()
    classifier.train()
    for idx, (images, labels) in enumerate(train_loader):
        with torch.no_grad():
            features = model.encoder(images)
        output = classifier(features.detach())
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def validate(val_loader, model, classifier):
    model.eval()
    classifier.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in val_loader:
            correct += (classifier(model.encoder(images)).argmax(1) == labels).sum().item()
    return correct / len(val_loader.dataset)


def main():
    torch.manual_seed(0)
    train_loader = DataLoader(Pictures(64), batch_size=16, shuffle=True)
    val_loader = DataLoader(Pictures(32, seed=5), batch_size=16, shuffle=False)
    model, criterion = SupConResNet(), nn.CrossEntropyLoss()
    classifier = nn.Linear(32, 4)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
    for epoch in range(1, 5):
        loss = train(train_loader, model, classifier, criterion, optimizer, epoch)
        val_acc = validate(val_loader, model, classifier)
        print(f"Train epoch {epoch}, loss {loss:.4f}, val accuracy {val_acc:.2f}")


if __name__ == "__main__":
    main()
