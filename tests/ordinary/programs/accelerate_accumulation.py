# Accelerate's gradient accumulation in its own form.
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from toys import Pictures, resnet
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


def training_function():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    train_dataloader = DataLoader(Pictures(48), shuffle=True, batch_size=8)
    model = resnet()
    for param in model.parameters():
        param.requires_grad = False
    for param in model.fc.parameters():
        param.requires_grad = True
    optimizer = torch.optim.Adam(params=model.parameters(), lr=3e-2 / 25)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-2, epochs=3, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, scheduler
    )
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
    for epoch in range(3):
        model.train()
        for step, (inputs, targets) in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = F.cross_entropy(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    training_function()
