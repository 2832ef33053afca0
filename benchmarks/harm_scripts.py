"""What the controller costs scripts as people write them: the final losses, beside plain training.

    python -m benchmarks.harm_scripts [--seeds 5] [--only NAME,NAME] [--quick]

Five small scripts in the shapes of public examples, changed by nothing but the controller's lines:
a convolutional net with dropout under Adadelta and a step decay, a character model like minGPT, an
LSTM tagger, a ResNet with SGD and a cosine, a vision transformer with AdamW and one cycle. Each is
trained plainly, with the controller given the scheduler, and given total_steps alone. `chance` is
how far a plain run goes astray whose weights were moved by a millionth after a tenth of its steps.
Writes benchmarks/results/harm_scripts.json (not with --quick).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, StepLR

from benchmarks.harm.models import VisionTransformer
from benchmarks.harm.policy import saved_steps
from benchmarks.harness import environment, parser, publish, tell
from benchmarks.time_to_accuracy.images import ResNet, digits
from benchmarks.time_to_accuracy.text import VOCABULARY, Block, read_source, windows
from egeria_core import FreezeController
from egeria_core.policies import BudgetPolicy

BUDGET = 0.01
MODES = ("scheduler", "total_steps")
Parts = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Script:
    """One program."""

    data: Callable[[], Parts]
    """Training and test samples: inputs and targets."""
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler]
    """Of the optimizer and the number of its own steps."""
    steps: int = 240
    per_epoch: int | None = None
    """Optimizer steps between two of the scheduler; None: it is stepped each time."""
    batch_size: int = 16
    clip: float | None = None


class Convolutions(nn.Module):
    """Images (B, 1, 28, 28) to logits: two convolutions and two dense layers, dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32 * 144, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        logits: Tensor = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return logits


class CharacterModel(nn.Module):
    """Codes (B, T) to logits (B, T, C): embeddings, a dropout, blocks with one each, a head."""

    def __init__(self, width: int = 48, length: int = 32, rate: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(1, length, width))
        self.drop = nn.Dropout(rate)
        self.blocks = nn.Sequential(
            *(nn.Sequential(Block(width, 4, causal=True), nn.Dropout(rate)) for _ in range(3))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits."""
        x = self.drop(self.tokens(codes) + self.position[:, : codes.shape[1]])
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Tagger(nn.Module):
    """Words (B, T) to logits (B, T, tags): an embedding, two LSTMs, a dense layer."""

    def __init__(self, words: int = 40, tags: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 24)
        self.first = nn.LSTM(24, 32, batch_first=True)
        self.second = nn.LSTM(32, 32, batch_first=True)
        self.tag = nn.Linear(32, tags)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits."""
        states, _ = self.first(self.embedding(words))
        states, _ = self.second(states)
        logits: Tensor = self.tag(states)
        return logits


def noisy_digits() -> Parts:
    """Digits of 28 x 28 pixels under noise, so that they are not learnt whole."""

    def part(train: bool) -> tuple[Tensor, Tensor]:
        images, targets = digits(28, range(10), train=train)
        generator = torch.Generator().manual_seed(int(train))
        return images + 0.5 * torch.randn(images.shape, generator=generator), targets

    return part(True), part(False)


def small_digits() -> Parts:
    """Digits of 16 x 16 pixels."""
    return digits(16, range(10), train=True), digits(16, range(10), train=False)


def characters() -> Parts:
    """Windows of source code, and the same one character on."""
    text = windows(read_source(("argparse", "ast", "difflib", "inspect")), 33, 1600)
    pairs = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return (pairs[0][::2], pairs[1][::2]), (pairs[0][1::4], pairs[1][1::4])


def tagged_words() -> Parts:
    """Sentences in which a word's tag depends on the tag before it, and on chance."""
    generator = torch.Generator().manual_seed(0)
    tag_of = torch.randint(6, (40, 6), generator=generator)

    def part(count: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(40, (count, 16), generator=generator)
        tags, now = torch.zeros_like(words), torch.zeros(count, dtype=torch.long)
        for place in range(words.shape[1]):
            now = tag_of[words[:, place], now % 3]
            tags[:, place] = now
        wrong = torch.rand(tags.shape, generator=generator) < 0.05
        return words, torch.where(wrong, torch.zeros_like(tags), tags)

    return part(1024), part(512)


def warm_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Rise linearly over a tenth of the steps, then fall to a tenth."""

    def factor(step: int) -> float:
        if step < steps / 10:
            return (step + 1) / (steps / 10)
        done = (step - steps / 10) / (0.9 * steps)
        return max(0.1, 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    return LambdaLR(optimizer, factor)


SCRIPTS = {
    "digits, Adadelta, StepLR": Script(
        data=noisy_digits,
        model=Convolutions,
        optimizer=lambda m: torch.optim.Adadelta(m.parameters(), 1.0),
        scheduler=lambda o, steps: StepLR(o, 1, 0.7),
        per_epoch=40,
    ),
    "characters, AdamW, warm-up and cosine": Script(
        data=characters,
        model=CharacterModel,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.1),
        scheduler=warm_cosine,
        clip=1.0,
    ),
    "tags, LSTM, SGD, StepLR": Script(
        data=tagged_words,
        model=Tagger,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.5, 0.9),
        scheduler=lambda o, steps: StepLR(o, 2, 0.5),
        per_epoch=40,
    ),
    "digits, ResNet, SGD, cosine": Script(
        data=small_digits,
        model=lambda: ResNet(num_blocks=1, width=8),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9, weight_decay=5e-4),
        scheduler=lambda o, steps: CosineAnnealingLR(o, steps),
    ),
    "digits, transformer, AdamW, one cycle": Script(
        data=small_digits,
        model=lambda: VisionTransformer(4, 32),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), 2e-3, weight_decay=0.05),
        scheduler=lambda o, steps: OneCycleLR(o, 2e-3, steps),
    ),
}


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def train(script: Script, seed: int, mode: str) -> dict[str, Any]:
    """Run a script: "plain", "chance", or with the controller told of the end in one of MODES."""
    (inputs, targets), test = script.data()
    torch.manual_seed(seed)
    model = script.model()
    optimizer = script.optimizer(model)
    scheduler = script.scheduler(optimizer, script.steps // (script.per_epoch or 1))
    controller = None
    if mode in MODES:
        told = scheduler if mode == "scheduler" else None
        controller = FreezeController(model, optimizer, total_steps=script.steps, lr_scheduler=told)
    order = torch.Generator().manual_seed(seed)
    for step in range(script.steps):
        if mode == "chance" and step == script.steps // 10:
            _shake(model)
        rows = torch.randperm(len(inputs), generator=order)[: script.batch_size]
        torch.manual_seed(10**6 * (seed + 1) + step)  # of dropout: alike in all modes
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model(inputs[rows]), targets[rows])
        loss.backward()
        if script.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), script.clip)
        optimizer.step()
        if script.per_epoch is None or (step + 1) % script.per_epoch == 0:
            scheduler.step()
        if controller is not None:
            controller.step(loss)
    return _outcome(model, controller, (inputs[:512], targets[:512]), test)


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1 + 1e-6 * torch.randn(p.shape))


@torch.no_grad()
def _outcome(
    model: nn.Module, controller: FreezeController | None, *parts: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    model.eval()
    names = ("train", "test")
    found: dict[str, Any] = {
        name: float(loss_of(model(x), y)) for name, (x, y) in zip(names, parts, strict=True)
    }
    if controller is not None:
        assert isinstance(controller.policy, BudgetPolicy)
        found["predicted"] = controller.policy.spent
        found["moves"] = [list(move) for move in controller.schedule()]
        found["saved"] = saved_steps(controller.history)
        controller.close()
    return found


def summarise(runs: dict[str, list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Return the mean harm of each mode over the seeds, its error, and whether it is too much."""
    rows: dict[str, Any] = {}
    for mode in ("chance", *MODES):
        row: dict[str, Any] = {}
        for part in ("train", "test"):
            pairs = zip(runs[mode], runs["plain"], strict=True)
            harms = [one[part] - plain[part] for one, plain in pairs]
            error = statistics.stdev(harms) / len(harms) ** 0.5 if len(harms) > 1 else 0.0
            row |= {
                part: statistics.fmean(harms),
                f"{part}_error": error,
                f"{part}_worst": max(harms),
            }
        if mode != "chance":
            row["predicted"] = statistics.fmean(run["predicted"] for run in runs[mode])
            row["saved"] = statistics.fmean(run["saved"] for run in runs[mode]) / steps
            row["frozen"] = sum(bool(run["moves"]) for run in runs[mode])
            row["missed"] = max(row["train"], row["test"]) > BUDGET
        rows[mode] = {key: float(f"{value:.3g}") if isinstance(value, float) else value
                      for key, value in row.items()}  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=5)
    options_of.add_argument("--only", default="", help="comma-separated beginnings of names")
    options = options_of.parse_args(argv)
    torch.set_num_threads(1)
    wanted = tuple(options.only.split("/"))
    seeds = 1 if options.quick else options.seeds
    scripts: dict[str, Any] = {}
    for name, script in SCRIPTS.items():
        if not name.startswith(wanted):
            continue
        script = replace(script, steps=40) if options.quick else script
        runs: dict[str, list[dict[str, Any]]] = {}
        for mode in ("plain", "chance", *MODES):
            tell(f"{name}: {mode}")
            runs[mode] = [train(script, seed, mode) for seed in range(seeds)]
        rows = summarise(runs, script.steps)
        scripts[name] = rows
        for mode in MODES:
            row = rows[mode]
            missed = (
                f"MISSED: above the budget of {BUDGET}" if row["missed"] else "within the budget"
            )
            tell(f"{name}, {mode}: train {row['train']:+.4f}, test {row['test']:+.4f}: {missed}")
    records = [
        {"script": name, "told": mode} | row
        for name, rows in scripts.items()
        for mode, row in rows.items()
    ]
    report = {"environment": environment(seeds), "budget": BUDGET, "scripts": records}
    publish("harm_scripts", report, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
