"""A first run on an accelerator: is it right there, how fast is a step of hits, and what waits.

Right: losses of training with the cache beside those without, in several ways of using a device.
Fast: a step of hits beside a computed one and the oracle, which trains the rest alone on
activations that lie on the device. Models have random weights, samples are random. Without an
accelerator it runs on the CPU, and says so.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.harness import environment, parser, publish, tell
from benchmarks.models import ResNet50
from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.device import Lane, default_device, pins, runs_late, synchronize
from egeria_cache.prefetch.ring import Ring

WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy")
"""How calls of a driver are named, by the profiler, that make the host wait."""


class Blocks(nn.Module):
    """A transformer: of patches of images, or of tokens; causal or not."""

    def __init__(self, *, width: int, depth: int, tokens: int | None, causal: bool = False) -> None:
        super().__init__()
        self.entry = (
            nn.Linear(3 * 16 * 16, width) if tokens is None else nn.Embedding(tokens, width)
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, F.gelu,
                                       batch_first=True, norm_first=True)
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens or 1000)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, 1000), or tokens (B, L) to (B, L, number of tokens)."""
        if x.dim() == 4:
            x = F.unfold(x, 16, stride=16).transpose(1, 2)
        x, size = self.entry(x), x.shape[1]
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(size, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=self.causal)
        out: Tensor = self.head(self.norm(x))
        return out if self.head.out_features != 1000 else out.mean(1)


class Random(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are drawn once, and kept in memory."""

    def __init__(self, num: int, shape: Sequence[int], tokens: int | None) -> None:
        g = torch.Generator().manual_seed(0)
        if tokens is None:
            self.x = torch.randn((num, *shape), generator=g)
            self.y = torch.randint(1000, (num,), generator=g)
        else:
            self.x = torch.randint(tokens, (num, *shape), generator=g)
            self.y = self.x.roll(-1, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@dataclass(frozen=True)
class Case:
    """A model, of which the first modules are frozen, and its samples."""

    name: str
    make: Callable[[], nn.Module]
    front: tuple[str, ...]
    """The last is the boundary."""
    shape: tuple[int, ...]
    batch: int
    tokens: int | None = None

    def frozen(self, device: torch.device) -> nn.Module:
        """Return the model there, its front frozen and in inference mode."""
        torch.manual_seed(0)
        model = self.make().to(device).train()
        for name in self.front:
            model.get_submodule(name).requires_grad_(False).eval()
        return model


def transformer(name: str, shape: tuple[int, ...], batch: int, width: int, depth: int,
                tokens: int | None, *, causal: bool = False) -> Case:  # fmt: skip
    """Return one of which the first two thirds are frozen."""
    front = ("entry", *(f"blocks.{i}" for i in range(2 * depth // 3)))
    make = lambda: Blocks(width=width, depth=depth, tokens=tokens, causal=causal)  # noqa: E731
    return Case(name, make, front, shape, batch, tokens)


def cases(quick: bool) -> list[Case]:
    """Return the four models, or the same at a size that shows that it works."""
    depths = (1, 1, 1, 1) if quick else (3, 4, 6, 3)
    stages = enumerate(depths[:3], 1)
    resnet = ("conv1", "bn1", *(f"layer{n}.{i}" for n, depth in stages for i in range(depth)))
    side, width, depth, length = (32, 64, 3, 16) if quick else (224, 768, 12, 512)
    images, texts = (4, 2) if quick else (64, 16)
    many, some = (50, 50) if quick else (50257, 30522)
    return [
        Case("ResNet-50", lambda: ResNet50(1000, depths), resnet, (3, side, side), images),
        transformer("ViT-B", (3, side, side), images, width, depth, None),
        transformer("GPT-2 small", (length,), texts, width, depth, many, causal=True),
        transformer("BERT-base", (length,), texts, width, depth, some),
    ]


def loss_of(model: nn.Module, x: Any, y: Any) -> Tensor:
    """Cross entropy over classes or tokens."""
    out: Tensor = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


Around = Callable[[], contextlib.AbstractContextManager[Any]]


def trained(case: Case, device: torch.device, directory: Path, gate: Any, num: int, epochs: int,
            around: Around, change: Callable[[nn.Module], None],
            ) -> Iterator[tuple[float, Tensor, int]]:  # fmt: skip
    """Train; yield each epoch's seconds, losses and hits so far."""
    model = case.frozen(device)
    change(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    data = Random(num, case.shape, case.tokens)
    with ActivationCache(model, directory, case.front[-1], gate=gate) as cache:
        loader = EgeriaLoader(
            data, case.batch, shuffle=True, generator=torch.Generator().manual_seed(1),
            cache=cache, seed=2, pin_memory=pins(device), drop_last=True,
        )  # fmt: skip
        for _ in range(epochs):
            losses = []
            synchronize(device)
            started = time.perf_counter()
            for x, y in loader:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                with around():
                    loss = loss_of(model, x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            synchronize(device)
            seconds = (time.perf_counter() - started) / max(len(losses), 1)
            cache.flush()
            yield seconds, torch.stack(losses).float().cpu(), cache.stats().hits


@contextlib.contextmanager
def _beside(lane: Lane) -> Iterator[None]:
    """Run on another stream, after and before what this one is given."""
    lane.follow_current()
    with lane.use():
        yield
    lane.lead(lane.mark())


def ways(
    device: torch.device, backend: str
) -> dict[str, tuple[torch.device, Around, Callable[[Any], None]]]:
    """Return the ways of using a device: (where, what stands around a forward, what is changed)."""
    plain: Around = contextlib.nullcontext
    same: Callable[[Any], None] = lambda model: None  # noqa: E731
    kind = device.type

    def compiled(model: Any) -> None:
        names = model.layers if isinstance(model, ResNet50) else []
        for block in [*map(model.get_submodule, names), *getattr(model, "blocks", ())]:
            block.compile(backend=backend)

    found: dict[str, tuple[torch.device, Around, Callable[[Any], None]]] = {
        "as it comes": (device, plain, same),
        "bf16 autocast": (device, lambda: torch.autocast(kind, torch.bfloat16), same),
        "compiled blocks": (device, plain, compiled),
    }
    if runs_late(device):
        lane = Lane(device)
        found["another stream"] = (device, lambda: _beside(lane), same)
        if torch.accelerator.device_count() > 1:
            found["the second device"] = (torch.device(kind, 1), plain, same)
    return found


def right(
    case: Case, device: torch.device, num: int, backend: str = "eager"
) -> list[dict[str, Any]]:
    """Compare the losses with those of training without skipping, in every way."""
    found = []
    for way, (where, around, change) in ways(device, backend).items():
        runs = {}
        for gate in ("never", "always"):
            with tempfile.TemporaryDirectory() as place:
                made = trained(case, where, Path(place), gate, num, 3, around, change)
                runs[gate] = list(made)
        plain, cached = (torch.cat([losses for _, losses, _ in runs[g]]) for g in runs)
        worst = float(((plain - cached).abs() / plain.abs().clamp(min=1e-6)).max())
        found.append({
            "model": case.name, "way": way, "hits": runs["always"][-1][2],
            "of": 2 * (num // case.batch) * case.batch, "largest_difference": worst,
        })  # fmt: skip
    return found


def _keeping(module: nn.Module, args: Any, output: Tensor) -> None:
    """Have a module return from now on what it has just returned."""
    kept = output.detach().clone()
    module.forward = lambda *args, **kwargs: kept


def oracle(case: Case, device: torch.device, num_steps: int) -> float:
    """Return the seconds of a step that trains the rest alone, on one batch's activations."""
    model = case.frozen(device)
    data = Random(case.batch, case.shape, case.tokens)
    x, y = (torch.stack(part).to(device) for part in zip(*map(data.__getitem__, range(case.batch)),
                                                         strict=True))  # fmt: skip
    with torch.no_grad():
        for name in case.front:  # what is left of the front costs nothing
            module = model.get_submodule(name)
            module.register_forward_hook(_keeping)
        model(x)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()

    times = []
    for _ in range(3):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize(device)
        times.append((time.perf_counter() - started) / num_steps)
    return statistics.median(times)


def fast(case: Case, device: torch.device, num: int, epochs: int) -> dict[str, Any]:
    """Time steps: computed, of hits, and the oracle's."""
    medians = {}
    for gate in ("never", "always"):
        with tempfile.TemporaryDirectory() as place:
            made = trained(case, device, Path(place), gate, num, epochs, contextlib.nullcontext,
                           lambda model: None)  # fmt: skip
            # The first epoch stores, the second fills the ring.
            medians[gate] = statistics.median([seconds for seconds, _, _ in made][2:])
    best = oracle(case, device, max(num // case.batch, 1))
    return {
        "model": case.name, "batch": case.batch, "computed_ms": 1e3 * medians["never"],
        "hit_ms": 1e3 * medians["always"], "oracle_ms": 1e3 * best,
        "hit_vs_computed": medians["never"] / medians["always"],
        "hit_vs_oracle": medians["always"] / best,
    }  # fmt: skip


def waits(case: Case, device: torch.device, num: int) -> dict[str, Any]:
    """Count what makes the host wait in an epoch of hits and in a computed one."""
    found: dict[str, Any] = {"model": case.name}
    for gate, name in (("never", "computed"), ("always", "hits")):
        with tempfile.TemporaryDirectory() as place:
            made = trained(case, device, Path(place), gate, num, 3, contextlib.nullcontext,
                           lambda model: None)  # fmt: skip
            next(made), next(made)
            with torch.profiler.profile() as profile:
                next(made)
            counts = {e.key: e.count for e in profile.key_averages() if e.key.endswith(WAITS)}
            found[name] = sum(counts.values())
            list(made)
    return found


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes per second of copies from page-locked memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pins(device))
    there = source.to(device, copy=True)
    synchronize(device)
    started = time.perf_counter()
    for _ in range(8):
        there.copy_(source, non_blocking=True)
    synchronize(device)
    return 8 * num_bytes / (time.perf_counter() - started)


def captured(device: torch.device) -> bool | None:
    """Whether a gather by numbers on the device gives the rows when a graph replays it.

    None: no graph can be captured there.
    """
    module: Any = torch.get_device_module(device)
    kinds = [name for name in dir(module) if name.endswith("Graph")]
    if not (kinds and hasattr(module, "graph") and runs_late(device)):
        return None
    rows = {"a": torch.arange(12.0).view(4, 3).pin_memory()}
    ring, draws = Ring(rows, 8, 10, device), np.zeros(4, np.int64)
    ring.insert(0, np.arange(4), draws, rows, {})
    index, graph = torch.tensor([3, 1, 0, 9], device=device), getattr(module, kinds[0])()
    synchronize(device)
    ring.rows(index)
    with module.graph(graph):
        out = ring.rows(index)["a"]
    index.copy_(torch.tensor([0, 2, 9, 1], device=device))
    graph.replay()
    synchronize(device)
    there = out.cpu()
    return torch.equal(there[[0, 1, 3]], rows["a"][[0, 2, 1]].cpu()) and bool(
        there[2].isnan().all()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print."""
    options_of = parser(__doc__)
    options_of.add_argument("--device", default=None, help="default: the accelerator, else the CPU")
    names = [case.name for case in cases(quick=True)]
    options_of.add_argument("--model", choices=names, action="append", help="repeatable")
    options = options_of.parse_args(argv)
    device = torch.device(options.device) if options.device else default_device()
    small = options.quick or not runs_late(device)
    report: dict[str, Any] = {
        "environment": environment(device=device), "device": str(device),
        "is_accelerator": runs_late(device), "size": "tiny" if small else "full",
        "graph_of_a_gather_is_right": captured(device),
        "to_device_gb_per_s": bandwidth(device, 1 << (22 if small else 28)) / 1e9,
        "right": [], "steps": [], "waits": [],
    }  # fmt: skip
    for case in cases(small):
        if case.name not in (options.model or names):
            continue
        tell(case.name)
        num = case.batch * (3 if small else 8)
        report["right"] += right(case, device, num, "eager" if small else "inductor")
        report["steps"].append(fast(case, device, num, 4 if small else 6))
        if runs_late(device):
            report["waits"].append(waits(case, device, num))
    wrong = [
        one for one in report["right"]
        if one["hits"] < one["of"] or one["largest_difference"] > (0.05 if small else 0.02)
    ]  # fmt: skip
    report["wrong"] = len(wrong)
    if not runs_late(device):
        tell("this was a run on the CPU: it shows that the commands work, and nothing of a device")
        options.quick = True
    publish("device", report, options)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
