# Accelerate's experiment tracking: a tracker of one's own, logs of every step, checkpoints.
import json

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from toys import Pictures, resnet
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class JsonTracker(GeneralTracker):
    name = "json"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name):
        super().__init__()
        self.run_name, self.values = run_name, []

    @property
    def tracker(self):
        return self.values

    @on_main_process
    def store_init_configuration(self, values):
        self.values.append(dict(values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.values.append({**values, "step": step})

    @on_main_process
    def finish(self):
        with open("log.json", "w") as file:
            json.dump(self.values, file)


config = {"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 8}
tracker = JsonTracker("run")
accelerator = Accelerator(cpu=True, log_with=tracker)
accelerator.init_trackers("toys", config)
set_seed(config["seed"])
data = Pictures(48)


def collate_fn(examples):
    if accelerator.is_main_process:
        pictures = torch.stack([x for x, _ in examples])
    return pictures, torch.tensor([y for _, y in examples])


train_dataloader = DataLoader(
    data, shuffle=True, collate_fn=collate_fn, batch_size=config["batch_size"]
)
model = resnet()
for name, parameter in model.named_parameters():
    parameter.requires_grad = name.startswith(("layer4", "fc"))
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
overall_step = 0
for epoch in range(config["num_epochs"]):
    model.train()
    total_loss = 0
    for step, (x, y) in enumerate(train_dataloader):
        loss = F.cross_entropy(model(x), y)
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        overall_step += 1
        accelerator.log({"step_loss": loss.item()}, step=overall_step)
    accelerator.log({"train_loss": total_loss.item() / len(train_dataloader)}, step=epoch)
    accelerator.save_state(f"epoch_{epoch}")
accelerator.end_training()
