# Two processes under torchrun, each with its part of the data.
import os

import torch
import torch.distributed as dist
from toys import Pictures, resnet
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from egeria_cache import ActivationCache  # +


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    dataset = Pictures(64)
    sampler = DistributedSampler(dataset, shuffle=False)
    train_data = DataLoader(dataset, batch_size=8, shuffle=False, sampler=sampler)
    model = resnet()
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=1e-2)
    model = DDP(model)
    cache = ActivationCache(model, f"runs/{rank}", boundary="auto", loader=train_data)  # +
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for source, targets in train_data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(source), targets)
            loss.backward()
            optimizer.step()
        print(f"[rank {rank}] Epoch {epoch} | Loss {loss.item():.4f}")
    dist.barrier()


main()
