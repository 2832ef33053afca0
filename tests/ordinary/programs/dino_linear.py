# DINO's linear evaluation: features of the last layers, asked for under no_grad.
import torch
from toys import Pictures, VisionTransformer
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class LinearClassifier(nn.Module):
    def __init__(self, dim, num_labels=4):
        super().__init__()
        self.linear = nn.Linear(dim, num_labels)
        self.linear.weight.data.normal_(mean=0.0, std=0.01)
        self.linear.bias.data.zero_()

    def forward(self, x):
        return self.linear(x.view(x.size(0), -1))


def train(model, linear_classifier, optimizer, loader, epoch, n):
    linear_classifier.train()
    for inp, target in loader:
        inp = inp.to("cpu", non_blocking=True)
        with torch.no_grad():
            intermediate_output = model.get_intermediate_layers(inp, n)
            output = torch.cat([x[:, 0] for x in intermediate_output], dim=-1)
        output = linear_classifier(output)
        loss = nn.CrossEntropyLoss()(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"Epoch: [{epoch}] loss {loss.item():.4f}")


@torch.no_grad()
def validate_network(val_loader, model, linear_classifier, n):
    linear_classifier.eval()
    correct = 0
    for inp, target in val_loader:
        intermediate_output = model.get_intermediate_layers(inp, n)
        output = torch.cat([x[:, 0] for x in intermediate_output], dim=-1)
        correct += (linear_classifier(output).argmax(1) == target).sum().item()
    print(f"* Acc@1 {correct / len(val_loader.dataset):.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train_loader = DataLoader(Pictures(64), batch_size=16, shuffle=True)
    val_loader = DataLoader(Pictures(32, seed=5), batch_size=16)
    model = VisionTransformer(num_classes=0)
    model.eval()
    linear_classifier = LinearClassifier(model.embed_dim * 2)
    optimizer = torch.optim.SGD(linear_classifier.parameters(), 0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=0)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
    for epoch in range(4):
        train(model, linear_classifier, optimizer, train_loader, epoch, 2)
        scheduler.step()
        validate_network(val_loader, model, linear_classifier, 2)
