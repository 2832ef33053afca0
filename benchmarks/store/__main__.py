"""The store beside the parts it is made of, and beside what people use instead; all in one run.

    python -m benchmarks.store [--samples 2048] [--rounds 40] [--open-samples 10000000]
        [--directory /fast/disk] [--quick]

Every contestant stores the same activations of the same samples and reads the same random batches
of 128, after each sample was read once. Reads are in turns, batch by batch, from the page cache:
this measures the software, not the disk. Run by root, and not with --quick, it then empties the
machine's page cache before each read of some, beside threads that only read. Then small rows are
stored, in their order and shuffled, for what they take on disk; and millions of samples, to open
them, which takes most of the time. Writes
benchmarks/results/store.json and store.png (not with --quick). The contestants come with
`pip install '.[bench]'`; one that is missing is named.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import (
    Round,
    environment,
    in_turns,
    parser,
    percentiles_ms,
    publish,
    pyplot,
    seconds,
)

from .activations import conv_activations, transformer_activations
from .cold import measure_cold
from .contestants import (
    BATCH,
    CONTESTANTS,
    Contestant,
    Egeria,
    EgeriaRaw,
    Memmap,
    MemmapFound,
)
from .small import measure_open, measure_small
from .writing import measure_writing


def measure(rows: Tensor, place: Path, num_rounds: int, skipped: dict[str, str]) -> dict[str, Any]:
    """Return, per contestant, sizes, times and ratios for one kind of activation."""
    rng = np.random.default_rng(0)
    report: dict[str, Any] = {}
    entered: list[Contestant] = []
    for kind in CONTESTANTS:
        directory = place / kind.__name__
        directory.mkdir()
        one = kind(directory, rows)
        try:
            write_s = seconds(partial(one.write, rows))
        except ImportError as error:
            skipped[one.name] = str(error)
            continue
        os.sync()
        open_s = seconds(one.open)
        ids = rng.permutation(len(rows))[:BATCH]
        assert torch.equal(one.read(ids).view(torch.uint8), rows[ids].view(torch.uint8)), one.name
        first_s = seconds(partial(read_all, one))
        entered.append(one)
        report[one.name] = {
            "bytes_on_disk": one.bytes_on_disk(),
            "bytes_per_raw_byte": one.bytes_on_disk() / rows.nbytes,
            "write_mb_per_s": rows.nbytes / write_s / 1e6,
            "durable": one.durable,
            "open_ms": 1e3 * open_s,
            "first_read_gb_per_s": rows.nbytes / first_s / 1e9,
        }
    # Writes again, in pairs: the first ones also warmed the allocator and the disk's journal.
    report |= measure_writing(rows, place, num_pairs=7)

    def rounds() -> Iterator[Round]:
        for _ in range(num_rounds):
            ids = rng.permutation(len(rows))[:BATCH]
            order = rng.permutation(len(entered))  # no one always follows the same other
            yield {entered[index].name: partial(entered[index].read, ids) for index in order}

    times, work = in_turns(rounds())
    for one in entered:
        batch_gb = BATCH * one.row_bytes / 1e9
        report[one.name] |= {
            "read_gb_per_s": batch_gb / times.median(one.name),
            "processor_s_per_gb": work.median(one.name) / batch_gb,
            "read_ms": percentiles_ms(times[one.name]),
            "auto_is_faster_by": times.ratio(one.name, Egeria.name),
            "raw_is_faster_by": times.ratio(one.name, EgeriaRaw.name),
        }
    report["np_take_of_what_was_looked_up"] = times.ratio(Memmap.name, MemmapFound.name)
    report["cold"] = measure_cold(entered, place, num_rounds // 4)
    for one in entered:
        one.close()
    return report


def read_all(one: Contestant) -> None:
    """Read every row once, in order."""
    for start in range(0, one.num_samples, BATCH):
        one.read(np.arange(start, min(start + BATCH, one.num_samples)))


def plot(report: dict[str, Any], path: Path) -> None:
    """Save read throughput against bytes on disk, a panel per kind of activation."""
    kinds = report["results"]
    figure, panels = pyplot().subplots(1, len(kinds), figsize=(5 * len(kinds), 4.5), sharey=True)
    for panel, (kind, results) in zip(panels, kinds.items(), strict=True):
        for name, one in results.items():
            if not isinstance(one, dict) or "read_gb_per_s" not in one:
                continue
            mine = name.startswith("egeria")
            x, y = one["bytes_per_raw_byte"], one["read_gb_per_s"]
            panel.scatter(x, y, color="tab:red" if mine else "tab:gray", zorder=3 if mine else 2)
            panel.annotate(name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
        panel.set(title=kind, xlabel="bytes on disk / bytes of the tensors", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("random batches of 128, GB/s")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--samples", type=int, default=2048)
    options_of.add_argument("--rounds", type=int, default=40)
    options_of.add_argument("--open-samples", type=int, default=10_000_000)
    options_of.add_argument("--directory", type=Path, help="where to write; temporary")
    options = options_of.parse_args(argv)
    if options.quick:
        options.samples, options.rounds, options.open_samples = 512, 4, 100_000
    conv, transformer = conv_activations(options.samples), transformer_activations(options.samples)
    kinds = {
        "post-ReLU float32": conv,
        "post-ReLU bfloat16": conv.bfloat16(),
        "transformer float32": transformer,
        "transformer bfloat16": transformer.bfloat16(),
    }
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for kind, rows in kinds.items():
        with tempfile.TemporaryDirectory(dir=options.directory) as place:
            results[kind] = measure(rows, Path(place), options.rounds, skipped)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        counts = (2_000,) if options.quick else (20_000, 200_000)
        small = measure_small(Path(place), counts)
        opened = measure_open(Path(place), options.open_samples)
    cold = {kind: own.pop("cold") for kind, own in results.items()}
    report = {
        "environment": environment(seeds=1),
        "settings": {"samples": options.samples, "rounds": options.rounds, "batch": BATCH},
        "results": results,
        "cold_gb_per_s": {kind: own for kind, own in cold.items() if own},
        "small": small,
        "open": opened,
        "skipped": skipped,
    }
    publish("store", report, options, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
