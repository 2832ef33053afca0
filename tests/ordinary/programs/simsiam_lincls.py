# The linear evaluation of SimSiam's backbone: the optimizer is given the classifier alone.
import torch
from toys import Pictures, resnet
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


def main():
    torch.manual_seed(1)
    loader = DataLoader(Pictures(64), batch_size=16, shuffle=True, drop_last=True)
    backbone = resnet()
    classifier = nn.Linear(backbone.fc.in_features, 4)
    backbone.fc = nn.Identity()
    backbone.requires_grad_(False)
    cache = ActivationCache(backbone, "runs/cache", boundary="auto", loader=loader)  # +
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(4):
        backbone.eval()
        classifier.train()
        for images, labels in loader:
            classifier.zero_grad()
            with torch.no_grad():
                feature = backbone(images)
            preds = classifier(feature)
            loss = nn.functional.cross_entropy(preds, labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
