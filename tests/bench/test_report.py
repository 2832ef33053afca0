"""README says what the results' files say, and the page shows all of them."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.report.__main__ import main
from benchmarks.report.highlights import highlights
from benchmarks.report.page import render
from benchmarks.report.readme import block
from benchmarks.report.sections import KNOWN, read_reports, read_sections

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ENVIRONMENT = {
    "command": "python -m benchmarks.x --seeds 3", "date": "2026-11-20T10:00:00", "cpu": "A chip",
    "cpus": 2, "threads": 1, "torch": "2.13.0", "python": "3.11.7", "seeds": [0, 1, 2],
}  # fmt: skip
CELL = {
    "boundary": "layer2.3", "share": 0.45, "step_s": {"full": 1.5}, "frozen_vs_full": 0.7,
    "hit_vs_full": 0.5, "oracle_vs_full": 0.48, "hit_vs_oracle": 1.08, "stored_bytes": 3e5,
    "stored_vs_input": 2.1, "data_set_bytes": 3.9e11, "break_even_epoch": None,
    "gate": {"skips": True, "right": False},
}  # fmt: skip
FORWARD_SKIP = {
    "models": [
        {"model": "ResNet-50", "batch_size": 16, "environment": ENVIRONMENT,
         "cells": [CELL, CELL | {"share": 0.7, "hit_vs_oracle": 1.01, "break_even_epoch": 2.5}]}
    ]
}  # fmt: skip
SPREAD = {"median": 1.2, "mean": 1.25, "std": 0.1, "least": 1.1, "most": 1.4}
REACH = {"reached": 2, "seconds": SPREAD, "speedup": SPREAD, "pooled": 1.1}
TIME_TO_ACCURACY = {
    "environment": ENVIRONMENT,
    "tasks": {
        "digits": {
            "title": "Digits", "metric": "accuracy", "findings": ["static: at most 1.30x"],
            "summary": {
                "methods": {
                    "egeria+cache": {
                        "seeds": [0, 1, 2], "final": SPREAD, "seconds": SPREAD,
                        "total_speedup": SPREAD, "frozen_forward": 0.4, "hit_rate": 0.3,
                        "bytes_on_disk": 12_000_000, "time_to_strict": REACH,
                        "time_to_relaxed": REACH,
                    }
                },
                "plain_stopped": {"final": SPREAD},
            },
        },
        "text": {"title": "Text", "summary": None},
    },
    "sweeps": {
        "digits-sweep": {
            "title": "Sweep",
            "summary": dict.fromkeys(
                ("uncached_s", "cached_s", "speedup", "best_uncached", "best_cached"), SPREAD
            ) | {"bytes_on_disk": 1000, "seeds": [0]},
        }
    },
    "verdicts": [
        {"what": "digits: egeria+cache", "target": 1.43, "measured": 1.2, "clock": 1.3,
         "per_seed": 1.5, "reached": "2 of 3 seeds", "deviations_worse": -0.4, "cut_short": 0.0,
         "cut_short_deviations_worse": 1.2},
        {"what": "eight runs", "target": 4.0, "measured": 4.5, "per_seed": 4.5, "reached": "1"},
    ],
}  # fmt: skip
ACT = {
    "title": "Fine-tuning", "epochs": 12, "plain_s": 9.0, "egeria_s": 3.0, "speedup": 3.0,
    "plain_accuracy": 0.99, "egeria_accuracy": 0.99, "hits": 900, "samples": 1000,
    "bytes_on_disk": 36_600_000,
}  # fmt: skip
DEMO = {
    "environment": ENVIRONMENT | {"seeds": [0]}, "settings": {}, "repeats": 3, "acts": [
        ACT | {"largest_loss_difference": 0.0},
        ACT | {"title": "From scratch", "moves": [[540, "layer2.2"]], "predicted_cost": 0.004,
               "measured_cost": 0.0051},
    ],
}  # fmt: skip


def sections_of(directory, **files):
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return {section.name: section for section in read_sections(directory)}


def test_documents_are_what_the_results_say(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_readme_has_five_figures_each_with_its_command():
    rows = highlights(read_reports(RESULTS)).strip().splitlines()[2:]
    assert len(rows) == 5
    assert all(re.fullmatch(r"\| .+ \| .*\d.* \| `python -m benchmarks\..+` \|", r) for r in rows)


def test_every_known_file_is_shown_by_its_own_section():
    for section in read_sections(RESULTS):
        if section.name not in KNOWN:
            continue
        assert section.tables, section.name
        assert not any("another form" in finding for finding in section.findings), section.name
        for table in section.tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what refers to elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.references = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "link", "br", "source"):
            self.open.append(tag)
        self.references += [value for key, value in attrs if key in ("src", "srcset", "href")]
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_refers_to_nothing_else():
    sections = read_sections(RESULTS)
    text = render(sections, RESULTS)
    page = Page()
    page.feed(text)
    assert page.open == []
    anchors = {f"#{section.name}" for section in sections}
    assert anchors <= set(page.references)
    kinds = "#", "data:image/png;base64,", "data:image/svg+xml;base64,"
    assert all(r.startswith(kinds) for r in page.references)
    images = [r for r in page.references if r.startswith(kinds[1])]
    assert len(images) == len(list(RESULTS.glob("*.png")))
    drawn = [r for r in page.references if r.startswith(kinds[2])]
    assert len(drawn) == len(set(drawn)) == 6  # three pictures, light and dark
    for one in drawn:
        svg = base64.b64decode(one.partition(",")[2]).decode()
        assert not re.search(r"<script|href=\"http(?!://www.w3)", svg)
    assert "url(" not in text
    assert "@import" not in text


def test_missed_targets_are_called_missed(tmp_path):
    found = sections_of(
        tmp_path, forward_skip=FORWARD_SKIP, time_to_accuracy=TIME_TO_ACCURACY, demo=DEMO
    )
    text = block(list(found.values()))
    assert "at least 0.952x, measured 0.926x (ResNet-50 at layer2.3, the worst of 2): " in text
    assert "**missed**" in text
    assert "right in 0 of 2" in text
    assert (
        "| digits: egeria+cache | at least 1.43x | 1.20x | **missed** | 1.30x | 1.50x "
        "| 2 of 3 seeds | -0.4 | not reached | +1.2 |"
    ) in text
    assert "| eight runs | at least 4.00x | 4.50x | met | - | 4.50x | 1 | - | - | - |" in text
    assert "| Fine-tuning | 9.0 s | 3.0 s | 3.00x | 99.0 %, 99.0 % | 90 % | 36.6 MB |" in text
    assert "is that of plain PyTorch to the bit" in text
    assert "From scratch: predicted cost 0.0040 nats, measured +0.0051." in text
    assert "`python -m benchmarks.x --seeds 3`: A chip, 2 CPUs, 1 thread, torch 2.13.0" in text
    assert "2026-11-20, seeds 0-2" in text
    page = render(list(found.values()), tmp_path)
    assert "<strong>missed</strong>" in page
    assert "plain, stopped at egeria+cache" in page
