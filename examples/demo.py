"""Egeria in three acts, on real data: each trained with plain PyTorch and with Egeria.

1. Fine-tune a model whose front is frozen: the cache carries every epoch but the first.
2. The same with images that are augmented at random: a draw of each is used for four epochs.
3. Train from scratch: the controller freezes what has converged, and says what that may cost.

The two runs of an act take turns, epoch by epoch. Killed in the middle, the same command goes on
where it was. Run `make demo`, or `python examples/demo.py --help`.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from demo_report import Board, print_story, save_figure
from demo_runs import ACTS, Act, Side, pretrained
from rich.console import Console

PRETRAINING_EPOCHS = 8


def play(act: Act, folder: Path, seed: int, weights: dict[str, Any], board: Board) -> Any:
    """Train both sides of one act in turns, and return their records: plain, Egeria."""
    sides = [Side(act, folder, seed, weights, egeria=egeria) for egeria in (False, True)]
    try:
        with board.act(act, [side.record.name for side in sides]) as bars:
            for side, bar in zip(sides, bars, strict=True):
                if side.resume():
                    bar.resumed(side.record)
            for number in range(act.epochs):
                for side, bar in zip(sides, bars, strict=True):
                    if len(side.record.seconds) > number:
                        continue
                    side.epoch(bar.advance)
                    bar.evaluated(side.record)
                    side.save()
    finally:
        for side in sides:
            side.close()
    return [asdict(side.record) for side in sides]


def main(argv: list[str] | None = None) -> int:
    """Run the demo and write `demo.json` and `demo.png`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [act.name for act in ACTS]
    parser.add_argument("--act", nargs="+", choices=names, default=names, help="these alone")
    parser.add_argument("--quick", action="store_true", help="two epochs an act; shows nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    torch.set_num_threads(1)  # small models; and a busy machine decides less
    # The plain runs keep the modes of their frozen fronts, too: nothing to say between the bars.
    logging.getLogger("egeria.modes").setLevel(logging.ERROR)
    console, out = Console(), args.out
    settings = {
        "acts": args.act,
        "seed": args.seed,
        "quick": args.quick,
        "torch": torch.__version__,
    }
    _prepare(out, settings)
    acts = [replace(act, epochs=2) if args.quick else act for act in ACTS if act.name in args.act]
    epochs = 1 if args.quick else PRETRAINING_EPOCHS
    board = Board(console)
    try:
        with board.steps("Preparing: a model learns the digits 0-4", epochs) as advance:
            weights = pretrained(out / f"pretrained-{epochs}.pt", epochs, advance)
        result: dict[str, Any] = {"settings": settings, "acts": []}
        for act in acts:
            plain, egeria = play(act, out / "state", args.seed, weights, board)
            result["acts"].append({"act": asdict(act), "plain": plain, "egeria": egeria})
            board.sentence(result["acts"][-1])
    except KeyboardInterrupt:
        console.print("\nStopped. The same command goes on from here.")
        return 130
    save_figure(out / "demo.png", result)
    (out / "demo.json").write_text(json.dumps(result, indent=1))
    print_story(console, result, out)
    (out / "state" / "finished").touch()
    return 0


def _leave() -> None:
    raise KeyboardInterrupt


def _prepare(out: Path, settings: dict[str, Any]) -> None:
    """Keep what an unfinished demo with these settings has left; else begin anew."""
    state, note = out / "state", out / "state" / "settings.json"
    is_same = note.exists() and json.loads(note.read_text()) == settings
    if state.exists() and (not is_same or (state / "finished").exists()):
        shutil.rmtree(state)
    state.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(settings))


if __name__ == "__main__":
    raise SystemExit(main())
