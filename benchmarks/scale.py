"""Many ranks on paper: where the bytes lie, what the network carries, when a cache pays.

    python -m benchmarks.scale

Arithmetic alone, no measurement: `hit_rates` says which part of an epoch finds its samples in a
directory of its node, `weigh` what an epoch then takes and carries. docs/scale.md has the tables;
the hit rates are checked against measured runs in tests/bench/test_scale.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Cluster", "Epoch", "Job", "hit_rates", "tables", "weigh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Machines that are alike."""

    nodes: int
    ranks_per_node: int
    disk_bytes: float
    """Of one node's local disk that the cache may take."""
    disk_read: float
    """Bytes per second of one node's disk, random records of this size."""
    network: float
    """Bytes per second of one node."""
    shared_read: float
    """Bytes per second that the shared file system gives to all nodes together."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node) < 1:
            raise ValueError("a cluster has at least one node and one rank on it")
        if min(self.disk_bytes, self.disk_read, self.network, self.shared_read) <= 0:
            raise ValueError("sizes and rates must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One epoch's work, the same on every rank."""

    samples: int
    activation_bytes: float
    """Of one sample at the boundary, as stored."""
    input_bytes: float
    """Of one sample on the shared file system."""
    front_s: float
    """Seconds of one rank for the frozen front's forward of one sample."""
    rest_s: float
    """Seconds of one rank for the rest of the step, per sample."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What an epoch takes once the caches have settled, and what computing everything does."""

    hit_rate: float
    stored_bytes_per_node: float
    stored_bytes: float
    disk_bytes: float
    """Read from local disks, all nodes together."""
    network_bytes: float
    """Samples fetched from the shared file system, all nodes together."""
    seconds: float
    """With the cache; compute, disk, and network overlap."""
    computed_s: float
    """Without a cache."""
    bound_by: str
    """"compute", "disk" or "network"."""

    @property
    def speedup(self) -> float:
        """Of an epoch, against computing everything."""
        return self.computed_s / self.seconds


def hit_rates(directories: int, epochs: int, *, affine: bool, share: float = 1.0) -> list[float]:
    """Return the expected hit rate of each epoch.

    A sample is found in an epoch if an earlier one brought it to this directory. With samples that
    stay (`affine`) the last epoch did; drawn anew in every epoch, it is one of D directories.

    Args:
        directories: D, each shared by ranks that see what the others commit.
        epochs: How many to tell.
        affine: Whether samples stay with their directory (`ShardAffineSampler`).
        share: Part of what is offered that a directory has room for; it is never evicted again.

    Raises:
        ValueError: An argument is out of its range.
    """
    if directories < 1 or epochs < 1 or not 0 <= share <= 1:
        raise ValueError(f"got {directories} directories, {epochs} epochs, a share of {share}")
    if affine:
        return [0.0 if epoch == 0 else share for epoch in range(epochs)]
    # What a directory is offered is 1 / D of the data in each epoch; it is full at its share of
    # all that it will ever be offered.
    return [min(1 - (1 - 1 / directories) ** epoch, share) for epoch in range(epochs)]


def weigh(cluster: Cluster, job: Job, *, affine: bool = True) -> Epoch:
    """Return an epoch of a job after many: one directory on each node."""
    offered = job.samples * job.activation_bytes / (cluster.nodes if affine else 1)
    stored = min(offered, cluster.disk_bytes)
    hit = stored / offered
    per_node = job.samples / cluster.nodes
    per_rank = per_node / cluster.ranks_per_node
    disk, fetched = per_node * hit * job.activation_bytes, per_node * (1 - hit) * job.input_bytes
    times = {
        "compute": per_rank * (job.rest_s + (1 - hit) * job.front_s),
        "disk": disk / cluster.disk_read,
        "network": _fetch_s(cluster, fetched),
    }
    bound_by = max(times, key=lambda name: times[name])
    return Epoch(
        hit_rate=hit,
        stored_bytes_per_node=stored,
        stored_bytes=stored * cluster.nodes,
        disk_bytes=disk * cluster.nodes,
        network_bytes=fetched * cluster.nodes,
        seconds=times[bound_by],
        computed_s=max(
            per_rank * (job.rest_s + job.front_s), _fetch_s(cluster, per_node * job.input_bytes)
        ),
        bound_by=bound_by,
    )


def _fetch_s(cluster: Cluster, per_node: float) -> float:
    return max(per_node / cluster.network, per_node * cluster.nodes / cluster.shared_read)


# ---- the tables of docs/scale.md ----------------------------------------------------------------

CLUSTER = Cluster(
    nodes=125, ranks_per_node=8, disk_bytes=3e12, disk_read=6e9, network=12.5e9, shared_read=500e9
)
"""A thousand accelerators, with one NVMe disk and 100 Gbit/s for each eight."""
JOB = Job(samples=100_000_000, activation_bytes=1e6, input_bytes=110e3, front_s=1.5e-3, rest_s=3e-3)
"""100 TB of activations; a third of the step is the frozen front."""


def variants() -> dict[str, tuple[Cluster, Job, bool]]:
    """Return what is compared: name -> (cluster, job, samples stay on their node)."""
    return {
        "samples stay on their node": (CLUSTER, JOB, True),
        "samples drawn anew (DistributedSampler)": (CLUSTER, JOB, False),
        "a quarter of the disk": (replace(CLUSTER, disk_bytes=0.2e12), JOB, True),
        "a slow disk, 1 GB/s": (replace(CLUSTER, disk_read=1e9), JOB, True),
        "the same, compressed to 0.6": (
            replace(CLUSTER, disk_read=1e9), replace(JOB, activation_bytes=0.6e6), True,
        ),
        "the same, cut earlier: 0.3 MB, half of the front": (
            replace(CLUSTER, disk_read=1e9),
            replace(JOB, activation_bytes=0.3e6, front_s=0.75e-3, rest_s=3.75e-3),
            True,
        ),
        "shared file system of 10 GB/s": (replace(CLUSTER, shared_read=10e9), JOB, True),
        "ten times the accelerators' speed": (
            CLUSTER, replace(JOB, front_s=0.15e-3, rest_s=0.3e-3), True,
        ),
    }  # fmt: skip


def table() -> str:
    """Return the variants as a Markdown table."""
    lines = [
        "| | hit rate | on each node | read from disks | from the shared file system | epoch | "
        "computed | speed-up | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (cluster, job, affine) in variants().items():
        e = weigh(cluster, job, affine=affine)
        lines.append(
            f"| {name} | {e.hit_rate:.2f} | {e.stored_bytes_per_node / 1e12:.2f} TB | "
            f"{e.disk_bytes / 1e12:.1f} TB | {e.network_bytes / 1e12:.1f} TB | {e.seconds:.0f} s | "
            f"{e.computed_s:.0f} s | {e.speedup:.2f}x | {e.bound_by} |"
        )
    return "\n".join(lines)


def tables(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0]
    ).parse_args(argv)
    print(table())
    print()
    for directories in (1, 2, 4, 125):
        rates = hit_rates(directories, 5, affine=False)
        print(f"{directories} directories, drawn anew: " + ", ".join(f"{r:.2f}" for r in rates))
    return 0


if __name__ == "__main__":
    raise SystemExit(tables())
