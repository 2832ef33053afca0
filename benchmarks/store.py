"""The store beside the parts it is made of, and beside what people use instead; all in one run.

    python benchmarks/store.py [--samples 2048] [--rounds 40] [--directory /fast/disk]

Every contestant stores the same activations of the same samples and reads the same random batches
of 128. Reads are interleaved, batch by batch, and a ratio is the median over pairs taken in the
same instant, so that a busy machine disturbs both alike. Results: benchmarks/results/store.json and
store.png. Reads come from the page cache: this measures the software, not the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_environment import environment
from store_contestants import BATCH, CONTESTANTS, BareLmdb, Contestant, Egeria, EgeriaRaw
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"


# -- activations -----------------------------------------------------------------------------


def conv_activations(num_samples: int) -> Tensor:
    """Post-ReLU output of residual blocks on crops of photographs: (N, 32, 16, 16), 32 KiB each."""
    from sklearn.datasets import load_sample_images

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(32, 32, 3, 1, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, 1, 1, bias=False),
            nn.BatchNorm2d(32),
        )

    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
    blocks = [block() for _ in range(3)]
    photographs = [
        torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        for image in load_sample_images().images
    ]
    out = []
    with torch.no_grad():
        for start in range(0, num_samples, BATCH):
            crops = []
            for one in range(start, min(start + BATCH, num_samples)):
                photograph = photographs[one % len(photographs)]
                top, left = (
                    int(torch.randint(0, limit - 32, ())) for limit in photograph.shape[1:]
                )
                crops.append(photograph[:, top : top + 32, left : left + 32])
            x = stem(torch.stack(crops))
            for one_block in blocks:
                x = (x + one_block(x)).relu()
            out.append(x)
    return torch.cat(out)


def transformer_activations(num_samples: int) -> Tensor:
    """Output of two pre-norm blocks on random tokens: (N, 64, 128), 32 KiB each."""
    torch.manual_seed(0)
    embedding = nn.Embedding(1000, 128)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    positions = torch.randn(64, 128)
    with torch.no_grad():
        return torch.cat(
            [
                encoder(embedding(torch.randint(0, 1000, (BATCH, 64))) + positions)
                for _ in range(0, num_samples, BATCH)
            ]
        )[:num_samples]


# -- measuring -------------------------------------------------------------------------------


def measure(rows: Tensor, place: Path, num_rounds: int) -> dict[str, Any]:
    """Return, per contestant, sizes, times and ratios for one kind of activation."""
    rng = np.random.default_rng(0)
    report: dict[str, Any] = {}
    entered: list[Contestant] = []
    for kind in CONTESTANTS:
        directory = place / kind.__name__
        directory.mkdir()
        one = kind(directory, rows)
        start_s = time.perf_counter()
        one.write(rows)
        write_s = time.perf_counter() - start_s
        os.sync()
        start_s = time.perf_counter()
        one.open()
        open_s = time.perf_counter() - start_s
        ids = rng.permutation(len(rows))[:BATCH]
        assert torch.equal(one.read(ids).view(torch.uint8), rows[ids].view(torch.uint8)), one.name
        entered.append(one)
        report[one.name] = {
            "bytes_on_disk": one.bytes_on_disk(),
            "bytes_per_raw_byte": one.bytes_on_disk() / rows.nbytes,
            "write_mb_per_s": rows.nbytes / write_s / 1e6,
            "durable": one.durable,
            "open_ms": 1e3 * open_s,
        }
    # Writes again, in pairs: the first ones also warmed the allocator and the disk's journal.
    report["write_ratio_to_bare_lmdb"] = write_ratio(rows, place, num_pairs=5)
    times_s: dict[str, list[float]] = {one.name: [] for one in entered}
    for _ in range(num_rounds):
        ids = rng.permutation(len(rows))[:BATCH]
        for index in rng.permutation(len(entered)):
            one = entered[index]
            start_s = time.perf_counter()
            one.read(ids)
            times_s[one.name].append(time.perf_counter() - start_s)
    ours = {name: np.array(times_s[name]) for name in (Egeria.name, EgeriaRaw.name)}
    for one in entered:
        mine = np.array(times_s[one.name])
        batch_bytes = BATCH * one.row_bytes
        report[one.name] |= {
            "read_gb_per_s": batch_bytes / float(np.median(mine)) / 1e9,
            "read_ms": {
                f"p{percent}": 1e3 * float(np.percentile(mine, percent)) for percent in (50, 90, 99)
            },
            "auto_is_faster_by": float(np.median(mine / ours[Egeria.name])),
            "raw_is_faster_by": float(np.median(mine / ours[EgeriaRaw.name])),
        }
        one.close()
    return report


def write_ratio(rows: Tensor, place: Path, num_pairs: int) -> float:
    """Return the median of (bare LMDB's time / ours) to commit the same batches, raw."""
    ratios = []
    for pair in range(num_pairs):
        seconds = []
        for kind in (BareLmdb, EgeriaRaw) if pair % 2 else (EgeriaRaw, BareLmdb):
            directory = place / f"{kind.__name__}-again"
            directory.mkdir()
            start_s = time.perf_counter()
            kind(directory, rows).write(rows)
            seconds.append((kind.__name__, time.perf_counter() - start_s))
            shutil.rmtree(directory)
        taken = dict(seconds)
        ratios.append(taken["BareLmdb"] / taken["EgeriaRaw"])
    return float(np.median(ratios))


def draw(report: dict[str, Any], path: Path) -> None:
    """Save read throughput against bytes on disk, a panel per kind of activation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(report), figsize=(5 * len(report), 4.5), sharey=True)
    for panel, (kind, results) in zip(panels, report.items(), strict=True):
        for name, one in results.items():
            if not isinstance(one, dict):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; temporary")
    options = parser.parse_args()
    conv, transformer = (
        make(options.samples) for make in (conv_activations, transformer_activations)
    )
    kinds = {
        "post-ReLU float32": conv,
        "post-ReLU bfloat16": conv.bfloat16(),
        "transformer float32": transformer,
        "transformer bfloat16": transformer.bfloat16(),
    }
    report = {}
    for kind, rows in kinds.items():
        with tempfile.TemporaryDirectory(dir=options.directory) as place:
            report[kind] = measure(rows, Path(place), options.rounds)
        print(f"\n{kind}: writes {report[kind]['write_ratio_to_bare_lmdb']:.2f}x of bare LMDB")
        header = f"  {'':22s}{'GB/s':>7s}{'p99 ms':>8s}{'bytes':>7s}{'write MB/s':>11s}"
        print(header + "  auto, raw faster by")
        for name, one in report[kind].items():
            if isinstance(one, dict):
                print(
                    f"  {name:22s}{one['read_gb_per_s']:7.2f}{one['read_ms']['p99']:8.1f}"
                    f"{one['bytes_per_raw_byte']:7.3f}{one['write_mb_per_s']:11.0f}"
                    f"  {one['auto_is_faster_by']:8.2f} {one['raw_is_faster_by']:8.2f}"
                )
    RESULTS.mkdir(exist_ok=True)
    settings = {
        "command": " ".join(["python", *sys.argv]),
        "samples": options.samples,
        "rounds": options.rounds,
        "batch": BATCH,
        "seed": 0,
    }
    content = {"environment": environment(), "settings": settings, "results": report}
    (RESULTS / "store.json").write_text(json.dumps(content, indent=2) + "\n")
    draw(report, RESULTS / "store.png")


if __name__ == "__main__":
    main()
