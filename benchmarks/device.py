"""A first run on an accelerator: is it right there, how fast is a step of hits, and what waits.

Right: losses of training with the cache beside those without, in several ways of using a device.
Fast: a step of hits beside a computed one and the oracle, which trains the rest alone on
activations that lie on the device. As the paper's figures 9 to 11 have it: what freezing saves of a
step and what skipping saves besides; bytes of gradients that ranks would exchange; steps and the
share of trained parameters as the frozen front grows. Models have random weights, samples are
random. Without an accelerator it runs on the CPU, tiny, and says so; on one it takes some minutes.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import environment, parser, publish, tell
from benchmarks.models import ResNet50
from egeria_cache import ActivationCache, CacheStats, EgeriaLoader
from egeria_cache.device import Lane, default_device, pins, runs_late, synchronize
from egeria_cache.prefetch.ring import Ring

COMPILED = ("ResNet-50", "GPT-2 small")
"""By the device's own compiler, which takes a minute for each; others by one that takes no time."""
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

    def model(self, device: torch.device, *, frozen: bool = True) -> nn.Module:
        """Return the model there; its front in inference mode, if it is frozen."""
        torch.manual_seed(0)
        model = self.make().to(device).train()
        for name in self.front if frozen else ():
            model.get_submodule(name).requires_grad_(False).eval()
        return model

    def fronts(self) -> list[Case]:
        """Return the same model with ever more of it frozen: a third of this front, two, all."""
        ends = [len(self.front) * third // 3 for third in (1, 2, 3)]
        return [replace(self, front=self.front[: max(end, 1)]) for end in ends]


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
plain: Around = contextlib.nullcontext


class Epoch(NamedTuple):
    """What an epoch took, and gave."""

    step_s: float
    losses: Tensor
    stats: CacheStats
    """Since the run began."""


def trained(case: Case, device: torch.device, gate: Any, num: int, epochs: int, around: Around,
            change: Callable[[nn.Module], None] = lambda model: None, *, flush: bool = False,
            ) -> Iterator[Epoch]:  # fmt: skip
    """Train; yield what came of each epoch.

    Args:
        case: What is trained.
        device: Where.
        gate: Of the cache; None: there is none, and nothing is frozen.
        num: Number of samples.
        epochs: Number of passes over them.
        around: Makes what stands around a forward.
        change: Called with the model first.
        flush: Wait with each batch until it is stored, so that none is dropped by a slow disk.
    """
    model = case.model(device, frozen=gate is not None)
    change(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    data = Random(num, case.shape, case.tokens)
    options: dict[str, Any] = {
        "shuffle": True, "generator": torch.Generator().manual_seed(1), "drop_last": True,
        "pin_memory": pins(device),
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,
        ActivationCache(
            model, Path(directory), None if gate is None else case.front[-1], gate=gate or "never"
        ) as cache,
    ):
        loader: Any = (
            DataLoader(data, case.batch, **options) if gate is None
            else EgeriaLoader(data, case.batch, cache=cache, seed=2, **options)
        )  # fmt: skip
        for _ in range(epochs):
            losses = []
            synchronize()
            started = time.perf_counter()
            for x, y in loader:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                with around():
                    loss = loss_of(model, x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                if flush:
                    cache.flush()
            synchronize()
            seconds = (time.perf_counter() - started) / max(len(losses), 1)
            cache.flush()
            yield Epoch(seconds, torch.stack(losses).float().cpu(), cache.stats())


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
    same: Callable[[Any], None] = lambda model: None  # noqa: E731
    kind = device.type

    def compiled(model: Any) -> None:
        torch._dynamo.config.recompile_limit = 64  # of all blocks
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
            runs[gate] = list(trained(case, where, gate, num, 3, around, change, flush=True))
        computed, cached = (torch.cat([epoch.losses for epoch in runs[g]]) for g in runs)
        worst = float(((computed - cached).abs() / computed.abs().clamp(min=1e-6)).max())
        found.append({
            "model": case.name, "way": way, "hits": runs["always"][-1].stats.hits,
            "of": 2 * (num // case.batch) * case.batch, "largest_difference": worst,
        })  # fmt: skip
    return found


def _keeping(module: nn.Module, args: Any, output: Tensor) -> None:
    """Have a module return from now on what it has just returned."""
    kept = output.detach().clone()
    module.forward = lambda *args, **kwargs: kept


def oracle(case: Case, device: torch.device, num_steps: int, around: Around) -> float:
    """Return the seconds of a step that trains the rest alone, on one batch's activations."""
    model = case.model(device)
    data = Random(case.batch, case.shape, case.tokens)
    x, y = (torch.stack(part).to(device) for part in zip(*map(data.__getitem__, range(case.batch)),
                                                         strict=True))  # fmt: skip
    with torch.no_grad(), around():
        for name in case.front:  # what is left of the front costs nothing
            module = model.get_submodule(name)
            module.register_forward_hook(_keeping)
        model(x)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)

    def step() -> None:
        with around():
            loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    times = []
    for _ in range(3):
        synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        times.append((time.perf_counter() - started) / num_steps)
    return statistics.median(times)


def autocast(device: torch.device) -> Around:
    """Return how steps are timed: on an accelerator as its users have them, in bf16."""
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=runs_late(device))


def _steps(case: Case, device: torch.device, gate: Any, num: int, epochs: int) -> list[Epoch]:
    return list(trained(case, device, gate, num, epochs, autocast(device)))


def _step_s(made: Sequence[Epoch]) -> float:
    """Return the seconds of a step once it is steady: the first epoch stores, the second fills."""
    return statistics.median([epoch.step_s for epoch in made[2:]])


def _trained_share(case: Case) -> float:
    """Return which part of the parameters is trained."""
    model = case.model(torch.device("cpu"))
    numbers = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, is_trained in numbers if is_trained) / sum(n for n, _ in numbers)


def fast(case: Case, device: torch.device, num: int, epochs: int) -> dict[str, Any]:
    """Time steps: all trained, the front frozen and computed, of hits, and the oracle's."""
    gates = {"trained": None, "computed": "never", "hit": "always"}
    runs = {name: _steps(case, device, gate, num, epochs) for name, gate in gates.items()}
    times = {name: _step_s(made) for name, made in runs.items()}
    best = oracle(case, device, max(num // case.batch, 1), autocast(device))
    stats, whole = runs["hit"][-1].stats, times["trained"]
    first = runs["hit"][0]
    gradients = 4 * sum(p.numel() for p in case.make().parameters())
    return {
        "model": case.name, "batch": case.batch,
        **{f"{name}_ms": 1e3 * one for name, one in times.items()}, "oracle_ms": 1e3 * best,
        "hit_vs_computed": times["computed"] / times["hit"],
        "hit_vs_oracle": times["hit"] / best,
        # Figure 9: of a step in which all is trained.
        "freezing_saves": 1 - times["computed"] / whole,
        "skipping_saves": (times["computed"] - times["hit"]) / whole,
        # What is paid for it: the first epoch, and bytes.
        "storing_ms": 1e3 * (first.step_s - first.stats.proof_s / max(num // case.batch, 1)),
        "proof_s": stats.proof_s,
        "stored_bytes_of_a_sample": stats.stored_bytes / max(stats.num_samples, 1),
        "bytes_of_a_sample": Random(1, case.shape, case.tokens).x.nbytes,
        # Figure 10: of gradients, that each rank of a data parallel job sends in a step.
        "gradient_bytes": gradients,
        "gradient_bytes_frozen": round(gradients * _trained_share(case)),
    }  # fmt: skip


def growing(case: Case, device: torch.device, num: int, epochs: int) -> list[dict[str, Any]]:
    """Time steps as the frozen front grows: what each of figure 11's decisions would bring."""
    return [
        {
            "model": one.name, "boundary": one.front[-1], "trained_share": _trained_share(one),
            "computed_ms": 1e3 * _step_s(_steps(one, device, "never", num, epochs)),
            "hit_ms": 1e3 * _step_s(_steps(one, device, "always", num, epochs)),
        }
        for one in case.fronts()
    ]  # fmt: skip


def waits(case: Case, device: torch.device, num: int) -> dict[str, Any]:
    """Count what makes the host wait in an epoch of hits and in a computed one."""
    found: dict[str, Any] = {"model": case.name}
    for gate, name in (("never", "computed"), ("always", "hits")):
        made = trained(case, device, gate, num, 3, plain)
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
    synchronize()
    started = time.perf_counter()
    for _ in range(8):
        there.copy_(source, non_blocking=True)
    synchronize()
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
    synchronize()
    ring.rows(index)
    with module.graph(graph):
        out = ring.rows(index)["a"]
    index.copy_(torch.tensor([0, 2, 9, 1], device=device))
    graph.replay()
    synchronize()
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
        "to_device_gb_per_s": (
            bandwidth(device, 1 << (22 if small else 28)) / 1e9 if runs_late(device) else None
        ),
        "right": [], "steps": [], "growing": [], "waits": [],
    }  # fmt: skip
    for case in cases(small):
        if case.name not in (options.model or names):
            continue
        tell(case.name)
        few, many = (case.batch * n for n in ((3, 3) if small else (6, 16)))
        backend = "inductor" if case.name in COMPILED and not small else "eager"
        report["right"] += right(case, device, few, backend)
        report["steps"].append(fast(case, device, many, 4 if small else 5))
        if case.name == names[0]:
            report["growing"] = growing(case, device, many, 4)
        if runs_late(device):
            report["waits"].append(waits(case, device, few))
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
