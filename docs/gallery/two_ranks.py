# %% [markdown]
# # Two ranks
#
# DistributedDataParallel in two processes. `ShardAffineSampler` keeps each sample on its rank, so
# that each is computed once, by one rank, and is a hit from then on. The program:

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

program = Path(tempfile.mkdtemp()) / "ddp.py"
program.write_text("""
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from egeria_cache import ActivationCache, EgeriaLoader, ShardAffineSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
front = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
model = nn.Sequential(front.requires_grad_(False), nn.Linear(1024, 4))
samples = TensorDataset(torch.randn(1200, 512), torch.arange(1200) % 4)

cache = ActivationCache(model, f"{sys.argv[1]}/rank{rank}", boundary="auto", gate="always")
sampler = ShardAffineSampler(samples, 2, rank)
loader = EgeriaLoader(samples, batch_size=30, sampler=sampler, cache=cache)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.cross_entropy(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
stats = cache.stats()
print(f"rank {rank}: {stats.hits} of {stats.hits + stats.misses} samples from the cache, "
      f"weights {model[1].weight.sum().item():.6f}", flush=True)
cache.close()
dist.destroy_process_group()
""")

# %% [markdown]
# Both ranks end with the same weights, and compute their half of the samples once.

# %%
scratch = tempfile.TemporaryDirectory()
command = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    str(program), scratch.name,
]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
print("\n".join(sorted(done.stdout.splitlines())))
assert done.returncode == 0, done.stderr
