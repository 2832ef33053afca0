"""The processes of one run, as torchrun, torchx, Slurm or Ray started them; alone, one of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Ranks", "joined"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    per_node: int = 1
    """Processes on each machine."""

    @property
    def is_first(self) -> bool:
        """Whether this one writes the log and the checkpoint."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """Return this process's own, where a machine has several."""
        if self.world == 1 or device.type == "cpu" or device.index is not None:
            return device
        return torch.device(device.type, self.local_rank)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Let gradients be averaged over all processes."""
        return model if self.world == 1 else DistributedDataParallel(model)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over all processes; called by each of them."""
        if self.world == 1:
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.world

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value on the first process, an empty list elsewhere."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.gather_object(value, values if self.is_first else None)
        return values if self.is_first else []

    def wait(self) -> None:
        """Wait until all are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the group that the launcher describes in the environment; leave it at the end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank)
    is_ours = not dist.is_initialized()  # Ray has joined before us
    if is_ours:
        _join(world)
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield Ranks(dist.get_rank(), world, local_rank, per_node)
    finally:
        if is_ours:
            dist.destroy_process_group()


def _join(world: int) -> None:
    """Make the group of all processes; after an elastic restart, one that knows no former address.

    torchrun's own store outlives the processes: who reads another's address before that one has
    written its new one would wait for a process that is dead.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restarts is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group()
        return
    port = int(os.environ["MASTER_PORT"])
    kept = dist.TCPStore(os.environ["MASTER_ADDR"], port, world, is_master=False)
    store = dist.PrefixStore(f"train/restart-{restarts}", kept)
    dist.init_process_group(store=store, rank=int(os.environ["RANK"]), world_size=world)
