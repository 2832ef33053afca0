# %%
import copy
import time

import torch
from toys import Pictures, resnet
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +

# %%
image_datasets = {"train": Pictures(48), "val": Pictures(24, seed=9)}
dataloaders = {
    x: DataLoader(image_datasets[x], batch_size=4, shuffle=True) for x in ["train", "val"]
}
dataset_sizes = {x: len(image_datasets[x]) for x in ["train", "val"]}
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


# %%
def train_model(model, criterion, optimizer, scheduler, num_epochs=25):
    since = time.time()
    best, best_acc = copy.deepcopy(model.state_dict()), 0.0
    for epoch in range(num_epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running_loss, running_corrects = 0.0, 0
            for inputs, labels in dataloaders[phase]:
                inputs = inputs.to(device)
                labels = labels.to(device)
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
            if phase == "train":
                scheduler.step()
            epoch_loss = running_loss / dataset_sizes[phase]
            epoch_acc = running_corrects.double() / dataset_sizes[phase]
            print(f"{phase} Loss: {epoch_loss:.4f} Acc: {epoch_acc:.4f}")
            if phase == "val" and epoch_acc > best_acc:
                best_acc, best = epoch_acc, copy.deepcopy(model.state_dict())
    print(f"Training complete in {time.time() - since:.0f}s")
    model.load_state_dict(best)
    return model


# %%
torch.manual_seed(0)
model_conv = resnet(pretrained=True)
for param in model_conv.parameters():
    param.requires_grad = False
num_ftrs = model_conv.fc.in_features
model_conv.fc = nn.Linear(num_ftrs, 4)
model_conv = model_conv.to(device)
cache = ActivationCache(model_conv, "runs/cache", "auto", loader=dataloaders["train"])  # +

criterion = nn.CrossEntropyLoss()
optimizer_conv = optim.SGD(model_conv.fc.parameters(), lr=0.01, momentum=0.9)
exp_lr_scheduler = lr_scheduler.StepLR(optimizer_conv, step_size=2, gamma=0.1)

# %%
model_conv = train_model(model_conv, criterion, optimizer_conv, exp_lr_scheduler, num_epochs=3)
# %%
inputs, labels = next(iter(dataloaders["val"]))
print("predicted", model_conv(inputs).argmax(1).shape)
