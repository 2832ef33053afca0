"""Ordinary programs, each run as people run it: plain, and with two lines for the cache.

A program is a file in `programs/`. Its lines that end in `# +` belong to the run with the cache,
those in `# -` to the plain one. The plain run has its frozen front in inference mode, as the
document of README's diff says; everything else is the program's own.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.scripts import Ran, launched, run_cells, run_file, run_kernel, side

__all__ = ["CORPUS", "Program", "Result", "run", "table"]

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One row of the table."""

    name: str
    shape: str
    """What people know it as."""
    samples: int
    """Of one epoch."""
    epochs: int = 3
    hits: int | None = None
    """Expected; by default all samples of all epochs but the first."""
    start: str = "file"
    """How: "file" in this process, "notebook", "kernel", or the launcher of processes."""
    file: str | None = None
    """Of the program, if it is not its name."""
    front: tuple[str, ...] = ()
    """Modules that are in inference mode in the plain run, too, where that changes anything."""
    modes: bool = False
    """Whether inference mode of the front changes its training, which is told once."""
    told: str | None = None
    """What Egeria rightly says, as a pattern; None: nothing."""
    needs: tuple[str, ...] = ()
    """Libraries."""
    default: bool = False
    """Whether it is always run: one for each way to start a program."""
    draws: bool = False
    """Whether its samples are random: each epoch has other draws, with a cache other ones."""
    rtol: float = 1e-5

    @property
    def path(self) -> Path:
        return PROGRAMS / f"{self.file or self.name}.py"

    @property
    def expected(self) -> int:
        return self.samples * (self.epochs - 1) if self.hits is None else self.hits

    @property
    def changed_lines(self) -> int:
        """How many lines the cache takes."""
        return len(re.findall(r"# \+$", self.path.read_text(), re.MULTILINE))

    @property
    def missing(self) -> list[str]:
        """Return the libraries that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass
class Result:
    """What both runs did."""

    plain: list[Ran]
    cached: list[Ran]

    @property
    def hits(self) -> int:
        return sum(ran.names["found_here"]["hits"] for ran in self.cached)

    @property
    def figures(self) -> list[dict[str, Any]]:
        return [ran.names["found_here"] for ran in self.cached]

    @property
    def told(self) -> list[str]:
        return [text for ran in self.cached for text in ran.told]

    @property
    def warned(self) -> list[str]:
        """Python's warnings that the plain run does not have."""
        known = {text for ran in self.plain for text in ran.warned}
        return [text for ran in self.cached for text in ran.warned if text not in known]

    @property
    def difference(self) -> float:
        """Return the largest relative difference of two losses."""
        pairs = [
            (a, b)
            for left, right in zip(self.plain, self.cached, strict=True)
            for a, b in zip(left.losses, right.losses, strict=True)
        ]
        return max((abs(a - b) / max(abs(a), 1e-3) for a, b in pairs), default=0.0)


def run(program: Program, directory: Path) -> Result:
    """Run a program both ways."""
    return Result(*(_run(program, directory / name, cached=name == "cached")
                    for name in ("plain", "cached")))  # fmt: skip


def _run(program: Program, place: Path, *, cached: bool) -> list[Ran]:
    place.mkdir(parents=True)
    shutil.copy(PROGRAMS / "toys.py", place)
    text = program.path.read_text()
    if cached:
        text = "import tests.ordinary.watched as _watched; _watched.watch()\n" + side(
            text, cached=True
        )
        text += "\nfound_here = _watched.found()\n"
    else:
        text = side(_held(text, program.front), cached=False)
    if program.start == "notebook":
        return [run_cells(text.split("# %%\n"), place)]
    if program.start == "kernel":
        return [run_kernel(text.split("# %%\n"), place)]
    path = place / f"{program.name}.py"
    path.write_text(text)
    if program.start == "file":
        return [run_file(path)]
    return launched(program.start, path, timeout_s=400)


def _held(text: str, front: tuple[str, ...]) -> str:
    """Put the frozen front into inference mode where the other run makes the cache."""
    if not front:
        return text
    names = ", ".join(map(repr, front))
    return re.sub(
        r"^( *)\w+ = ActivationCache\(([\w.]+),.*$",
        rf"\1__import__('tests.ordinary.watched', fromlist=['hold']).hold(\2, {names})",
        text, flags=re.MULTILINE,
    )  # fmt: skip


_BERT = ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1")
_RESNET = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")
CORPUS = [
    Program(name="moco_lincls", shape="MoCo's linear classifier", samples=64, epochs=4,
            default=True),
    Program(name="transfer_notebook", shape="torchvision's transfer learning", samples=48,
            start="notebook", default=True, front=_RESNET, modes=True),
    Program(name="gradual_unfreezing", shape="gradual unfreezing", samples=64, epochs=6, hits=192,
            front=_RESNET, modes=True),
    Program(name="hf_trainer_text", shape="BERT with Trainer, saved each epoch", samples=48,
            front=_BERT, needs=("transformers", "datasets"), modes=True),
    Program(name="accelerate_checkpoints", shape="Accelerate's checkpointing", samples=48,
            front=_BERT, needs=("transformers", "accelerate"), start="accelerate", default=True,
            modes=True),
    Program(name="transformer_encoder_masks", shape="torch's TransformerEncoder with masks",
            samples=48, front=("encoder.layers.0", "encoder.layers.1"), modes=True),
    Program(name="t5_seq2seq", shape="T5 with DataCollatorForSeq2Seq", samples=32,
            front=("encoder",), needs=("transformers",), modes=True),
    Program(name="captioning", shape="captions, sorted by the collate function", samples=32,
            front=("resnet",), modes=True),
    Program(name="skorch_net", shape="skorch's NeuralNetClassifier", samples=48,
            front=("features",), needs=("skorch",), modes=True),
    Program(name="unet_segmentation", shape="U-Net over a frozen encoder", samples=32,
            front=("stem", "down1", "down2"), modes=True),
    Program(name="fabric_loop", shape="a loop under Fabric", samples=48, front=_RESNET,
            needs=("lightning",), modes=True),
    Program(name="ignite_transfer", shape="ignite's supervised trainer", samples=48, front=_RESNET,
            needs=("ignite",), modes=True),
    Program(name="lora_classifier", shape="LoRA in the last layer", samples=48,
            front=tuple(f"base_model.model.{name}" for name in (*_BERT, "bert.encoder.layer.2")),
            needs=("transformers", "peft"), modes=True),
    Program(name="ddp_torchrun", shape="DDP under torchrun", samples=64, start="torchrun",
            default=True, front=tuple(f"module.{name}" for name in _RESNET), modes=True),
    Program(name="dino_linear", shape="DINO's linear evaluation, intermediate layers", samples=64,
            epochs=4, hits=176, default=True),
    Program(name="clip_probe", shape="a probe on CLIP's `encode_image`", samples=64, epochs=4),
    Program(name="timm_features", shape="a head on `forward_features`", samples=64, epochs=4,
            hits=176),
    Program(name="detection", shape="detection, boxes in lists", samples=32, front=("backbone",),
            modes=True),
    Program(name="lightning_finetuning", shape="Lightning's BaseFinetuning", samples=48, epochs=6,
            front=("feature_extractor",), needs=("lightning",)),
    Program(name="random_augmentation", shape="random crops and flips", samples=48, epochs=4,
            hits=108, front=_RESNET, told="draw", draws=True, modes=True),
    Program(name="masked_language", shape="masked language modelling", samples=32, hits=0,
            needs=("transformers",), told="draws random numbers|loaded again|depends on the rest"),
    Program(name="trl_sft", shape="TRL's SFTTrainer", samples=48, hits=88,
            needs=("transformers", "datasets", "trl")),
    Program(name="sentence_embeddings", shape="sentence-transformers' pairs", samples=32,
            front=tuple(f"0.model.{name.removeprefix('bert.')}" for name in _BERT),
            needs=("sentence_transformers",), modes=True),
    Program(name="transfer_kernel", file="transfer_notebook", samples=48,
            shape="transfer learning in a notebook's kernel", start="kernel", front=_RESNET,
            needs=("nbclient", "ipykernel"), modes=True),
    Program(name="perceptual_loss", shape="a perceptual loss", samples=64, epochs=4),
    Program(name="fgsm", shape="adversarial training", samples=64, hits=0, front=_RESNET,
            told="requires grad", modes=True),
    Program(name="quickstart", shape="a first program", samples=64, epochs=4, start="python",
            default=True),
]  # fmt: skip


def table() -> str:
    """Return the table of docs/ordinary.md."""
    lines = ["| program | as | lines added | samples served | |", "|---|---|---|---|---|"]
    for program in CORPUS:
        served = f"{program.expected} of {program.samples * program.epochs}"
        notes = [
            "modes" if program.modes else "",
            "fresh draws" if program.draws else "",
            "refused, rightly" if program.told and not program.expected else "",
        ]
        lines.append(
            f"| {program.shape} | {program.start} | {program.changed_lines} "
            f"| {served} | {'; '.join(filter(None, notes))} |"
        )
    return "\n".join(lines) + "\n"
