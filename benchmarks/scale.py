"""Many ranks on paper: where the bytes lie, what the network carries, when a cache pays.

    python -m benchmarks.scale [--plot]

Arithmetic alone, no measurement: `hit_rates` says which part of an epoch finds its samples in a
directory of its node, `weigh` what an epoch then takes and carries, `expect` what is left of that
with stragglers and machines that fail, whose steps `slowest` draws. docs/scale.md has the tables;
the hit rates are checked against measured runs in tests/bench/test_schedules.py. --plot writes
docs/scale.png.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import pyplot

__all__ = [
    "Cluster",
    "Epoch",
    "Expected",
    "Job",
    "Trouble",
    "expect",
    "hit_rates",
    "plot",
    "slowest",
    "tables",
    "weigh",
]

PAGES = Path(__file__).parents[1] / "docs"
INDEX_BYTES = 60
"""Of a sample in a generation's index: integers stored in shuffled order take 57 to 67, in their
own order 41. It lies in the page cache, as much of it as is asked for."""
TABLE_BYTES = 4
"""Of a sample in the table on each device."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What real machines add: none of them is as fast in every step, and some fail."""

    compute_jitter: float = 0.0
    """Standard deviation of a rank's step, as a part of it."""
    read_jitter: float = 0.0
    """The same of the time that a node's disk takes for the batches of a step."""
    slow_nodes: float = 0.0
    """Part of the nodes whose disks are slow for good."""
    slow_by: float = 1.0
    """How many times as long those take."""
    ring_batches: int = 5
    """Batches that are read ahead."""
    node_mtbf_s: float = math.inf
    """Mean seconds between two failures of one node; a new one takes its place."""
    lost_s: float = 0.0
    """Seconds that a failure costs with and without a cache: the restart, and half of what lies
    between two checkpoints."""

    def __post_init__(self) -> None:
        if min(self.compute_jitter, self.read_jitter, self.slow_nodes, self.lost_s) < 0:
            raise ValueError("nothing of this can be negative")
        if self.slow_by < 1 or self.slow_nodes > 1 or self.ring_batches < 1:
            raise ValueError("a slow disk takes at least as long, and something is read ahead")
        if self.node_mtbf_s <= 0:
            raise ValueError("the mean time between failures must be positive")


@dataclass(frozen=True, slots=True)
class Expected:
    """An epoch of many, with all that goes wrong."""

    seconds: float
    computed_s: float
    index_bytes: float
    """Of a node's index, in the page cache."""
    table_bytes: float
    """On each device, where the ring's table lies."""
    cold: float
    """Part of the time in which some node is new and computes, and all others wait for it."""

    @property
    def speedup(self) -> float:
        """Of an epoch, against computing everything under the same trouble."""
        return self.computed_s / self.seconds


def slowest(
    cluster: Cluster,
    trouble: Trouble,
    compute_s: float,
    read_s: float,
    *,
    steps: int = 256,
    seed: int = 0,
) -> float:
    """Return the mean step of ranks that wait for each other in each, in seconds.

    Each rank computes for a time of its own, and begins when its batch is there. A node's disk
    reads one step's batches after the other, at most `ring_batches` ahead. Times are log-normal.

    Args:
        cluster: How many nodes and ranks.
        trouble: How much they differ.
        compute_s: The mean of a rank's step.
        read_s: The mean of what a node's disk takes for a step's batches; 0 if nothing is read.
        steps: How many to play through.
        seed: Of what is drawn.
    """
    draw = np.random.default_rng(seed)
    slow = draw.random(cluster.nodes) < trouble.slow_nodes
    mean_read = read_s * np.where(slow, trouble.slow_by, 1.0)
    read, ended = np.zeros(cluster.nodes), [0.0] * (trouble.ring_batches + 1)
    for _ in range(steps):
        begin = np.maximum(read, ended[-trouble.ring_batches - 1])
        read = begin + mean_read * _varied(draw, trouble.read_jitter, cluster.nodes)
        shape = cluster.nodes, cluster.ranks_per_node
        own = compute_s * _varied(draw, trouble.compute_jitter, shape).max(axis=1)
        ended.append(float((np.maximum(read, ended[-1]) + own).max()))
    return ended[-1] / steps


def _varied(
    draw: np.random.Generator, deviation: float, shape: int | tuple[int, ...]
) -> np.ndarray:
    """Return factors of mean 1 and this standard deviation."""
    variance = math.log1p(deviation**2)
    return np.exp(draw.normal(-variance / 2, math.sqrt(variance), shape))


def expect(
    cluster: Cluster, job: Job, trouble: Trouble, *, affine: bool = True, batch: int = 64
) -> Expected:
    """Return an epoch under trouble.

    A node that is new has an empty directory: until it has passed all of its samples it computes
    them, and the others wait for it in every step.

    Args:
        cluster: The machines.
        job: The work.
        trouble: What goes wrong.
        affine: Whether samples stay on their node.
        batch: Samples of a rank's step.
    """
    calm = weigh(cluster, job, affine=affine)
    num_steps = job.samples / (cluster.nodes * cluster.ranks_per_node * batch)
    front_s, rest_s = job.front_s * batch, job.rest_s * batch
    read_s = batch * cluster.ranks_per_node * calm.hit_rate * job.activation_bytes
    read_s /= cluster.disk_read
    served_s = slowest(cluster, trouble, rest_s + (1 - calm.hit_rate) * front_s, read_s)
    seconds = max(served_s * num_steps, calm.seconds)
    computed_s = max(slowest(cluster, trouble, rest_s + front_s, 0.0) * num_steps, calm.computed_s)
    cold = -math.expm1(-cluster.nodes * max(seconds, computed_s) / trouble.node_mtbf_s)
    failing = 1 + cluster.nodes * trouble.lost_s / trouble.node_mtbf_s
    stored = calm.hit_rate * job.samples / (cluster.nodes if affine else 1)
    return Expected(
        seconds=(seconds + cold * max(computed_s - seconds, 0.0)) * failing,
        computed_s=computed_s * failing,
        index_bytes=stored * INDEX_BYTES,
        table_bytes=job.samples * TABLE_BYTES,
        cold=cold,
    )


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


TROUBLE = Trouble(
    compute_jitter=0.02, read_jitter=0.5, slow_nodes=0.01, slow_by=2.0,
    node_mtbf_s=6334 * 3600.0, lost_s=900.0,
)  # fmt: skip
"""Steps that vary by 2 %, reads by half, one disk of a hundred at half its speed. 2,048 nodes of
eight failed 419 times in 54 days in the training of Llama 3 (arXiv:2407.21783): each every 6,334
hours. A quarter of an hour is lost with each."""
RANKS = (1, 4, 8, 32, 128, 512, 1000, 2000, 4000, 10_000)


def machines(ranks: int) -> Cluster:
    """Return a cluster of so many ranks, whose shared file system grows with it."""
    nodes, shared = max(1, ranks // CLUSTER.ranks_per_node), CLUSTER.shared_read / CLUSTER.nodes
    own = min(ranks, CLUSTER.ranks_per_node)
    return replace(CLUSTER, nodes=nodes, ranks_per_node=own, shared_read=shared * nodes)


def troubled() -> str:
    """Return what is expected with stragglers and failures as a Markdown table."""
    lines = [
        "| ranks | hit rate | epoch | speed-up, nothing goes wrong | with stragglers | "
        "and failures | some node is new | index of a node | table on a device |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        cluster = machines(ranks)
        calm, steady = weigh(cluster, JOB), replace(TROUBLE, node_mtbf_s=math.inf)
        both = expect(cluster, JOB, TROUBLE)
        lines.append(
            f"| {ranks:,} | {calm.hit_rate:.2f} | {both.seconds:,.0f} s | {calm.speedup:.2f}x "
            f"| {expect(cluster, JOB, steady).speedup:.2f}x | {both.speedup:.2f}x | "
            f"{100 * both.cold:.1f} % of the time | {both.index_bytes / 1e6:,.0f} MB | "
            f"{both.table_bytes / 1e6:,.0f} MB |"
        )
    return "\n".join(lines)


def plot(path: Path) -> None:
    """Draw speed-ups and the index over the number of ranks."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    ranks = sorted({round(10 ** (i / 6)) for i in range(25)})
    often = replace(TROUBLE, node_mtbf_s=TROUBLE.node_mtbf_s / 100)
    for label, affine, trouble in (
        ("nothing goes wrong", True, Trouble()),
        ("stragglers, and machines that fail", True, TROUBLE),
        ("... a hundred times as often", True, often),
        ("samples drawn anew (DistributedSampler)", False, TROUBLE),
    ):
        speed = [expect(machines(n), JOB, trouble, affine=affine).speedup for n in ranks]
        left.plot(ranks, speed, label=label, marker=".")
    left.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    left.set(xscale="log", xlabel="ranks", ylabel="speed-up of an epoch", ylim=(0.9, 1.6))
    left.legend(fontsize=8)
    seen = [expect(machines(n), JOB, TROUBLE) for n in ranks]
    right.plot(ranks, [e.index_bytes / 1e6 for e in seen], label="index of a node", marker=".")
    right.plot(ranks, [e.table_bytes / 1e6 for e in seen], label="table on a device", marker=".")
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="MB")
    right.legend(fontsize=8)
    figure.suptitle("100 million samples of 1 MB at the boundary, by arithmetic")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def tables(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    options_of = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0]
    )
    options_of.add_argument("--plot", action="store_true", help="draw docs/scale.png")
    options = options_of.parse_args(argv)
    print(table())
    print()
    print(troubled())
    print()
    for directories in (1, 2, 4, 125):
        rates = hit_rates(directories, 5, affine=False)
        print(f"{directories} directories, drawn anew: " + ", ".join(f"{r:.2f}" for r in rates))
    if options.plot:
        plot(PAGES / "scale.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(tables())
