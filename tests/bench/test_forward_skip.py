"""The benchmark of the paper's models: they are what was published, and a cell runs end to end."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.forward_skip.__main__ import plot
from benchmarks.forward_skip.bench import Bench
from benchmarks.forward_skip.cells import measure
from benchmarks.forward_skip.tasks import ALL, Shape, Task
from benchmarks.report.sections import section_of
from egeria_cache import ActivationCache, EgeriaLoader

PUBLISHED = {
    "ResNet-50": (25_557_032, 25_557_032),
    "MobileNetV2": (3_504_872, 3_504_872),
    "ResNet-56": (850_000, 860_000),
    "DeepLabv3": (42_004_074, 42_004_074),
    "Transformer-Base": (61_000_000, 65_000_000),
    "Transformer-Tiny": (2_400_000, 2_600_000),
    "BERT-Base": (109_482_240 - 590_592, 109_482_240),  # with and without the pooler
}


def small(task: Task) -> Shape:
    images = {"ResNet-50": 32, "MobileNetV2": 32, "ResNet-56": 16, "DeepLabv3": 33}
    return Shape(batch_size=2, size=images.get(task.name, 40))


@pytest.mark.parametrize("name", ALL)
def test_a_model_has_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = ALL[name].build()
    least, most = PUBLISHED[name]
    assert least <= sum(p.numel() for p in model.parameters()) <= most


@pytest.mark.parametrize("name", sorted(set(ALL) - {"Transformer-Base"}))  # tiny, they are alike
def test_hits_at_every_boundary_train_like_the_frozen_model(name, tmp_path):
    task = ALL[name]
    bench = Bench.make(task, small(task), torch.device("cpu"), 1, False, task.tiny)
    for boundary, stop in task.boundaries(bench.model).items():
        bench.model.freeze(stop)
        losses: list[float] = []
        with ActivationCache(bench.model, tmp_path / boundary, boundary, gate="always") as cache:
            loader = EgeriaLoader(bench.samples.rows, 2, cache=cache)
            for _ in range(2):
                torch.manual_seed(1)  # the dropout of what is trained
                for batch in loader:
                    loss = task.loss(bench.model(*bench.inputs(batch)), *batch[task.num_inputs :])
                    losses.append(loss.item())
                cache.flush()
            stats = cache.stats()
        assert stats.hits == len(bench.samples.rows)
        half = len(losses) // 2
        assert losses[half:] == pytest.approx(losses[:half], rel=1e-4)


def test_a_cell_is_measured_end_to_end(tmp_path):
    task = ALL["Transformer-Tiny"]
    bench = Bench.make(task, small(task), torch.device("cpu"), 1, False, task.tiny)
    cell = measure(bench, "decoder.0", 3, tmp_path)
    assert cell["all_hits"]
    assert cell["raw_bytes"] == 2 * 40 * 16 * 4  # two tensors cross: memory, and decoder states
    assert cell["codecs"]["raw"]["bytes"] >= cell["raw_bytes"]
    model = {"model": task.name, "batch_size": 2, "environment": {}, "cells": [cell]}
    report = {"models": [model]}
    section = section_of("forward_skip", report)
    assert section.tables[-1].rows[0][0] == "Transformer-Tiny (2)"
    assert "another form" not in section.findings[0]
    plot(report, tmp_path / "plot.png")
    json.dumps(report)
