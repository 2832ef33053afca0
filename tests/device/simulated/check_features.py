"""Features, models, numbers and loops on a device: equal to the bit."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.device.backend import counts
from tests.device.simulated.runs import DEVICE, compared, moved, plain, run
from tests.helpers.nets import Net, make_net
from tests.helpers.runs import resumable

FIRST, SECOND = f"{DEVICE}:0", f"{DEVICE}:1"


def freeze_front(*names):
    def freezes(model, boundary):
        for name, parameter in model.named_parameters():
            frozen = any(name == n or name.startswith(n + ".") for n in names)
            parameter.requires_grad_(not frozen)

    return freezes


# ---- what is trained, and how ------------------------------------------------------------------


def numbers(dtype):
    to = lambda batch: [batch[0].to(DEVICE, dtype), batch[1].to(DEVICE)]  # noqa: E731
    return {"make": lambda: make_net().to(dtype), "to": to}


def channels_last():
    def to(batch):
        images, targets = moved(batch)
        return [(images.to(memory_format=torch.channels_last) - 0.1) / 0.7, targets]

    return {"to": to, "make": lambda: make_net().to(memory_format=torch.channels_last)}


def tensors_of_the_device():
    mean, std = torch.tensor([0.1], device=DEVICE), torch.tensor([0.7], device=DEVICE)

    def to(batch):
        images, targets = moved(batch)
        return [(images - mean[:, None, None]) / std[:, None, None], targets]

    return {"to": to}


class Dropping(nn.Module):
    """Draws behind the boundary, from the device's own generator."""

    def __init__(self):
        getattr(torch, DEVICE).manual_seed_all(11)
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.3))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 5), nn.Dropout(0.1))

    def forward(self, x):
        return self.head(F.relu(self.layer1(self.stem(x))).mean((2, 3)))


def compiled(block):
    def make():
        model = make_net()
        model.get_submodule(block).compile(backend="eager")
        return model

    return {"make": make}


class Placed(Net):
    """Its front on one device, the rest on another; it stays there."""

    def spread(self, first):
        self.names, self.first = ["stem", "layer1", "layer2", "layer3", "head"], first
        for i, name in enumerate(self.names):
            nn.Module.to(getattr(self, name), self.at(i))
        return self

    def at(self, i):
        return FIRST if i < self.first else SECOND

    def to(self, *args, **kwargs):
        return self

    def forward(self, x):
        x = F.relu(self.stem(x.to(self.at(0))))
        x = F.relu(self.layer1(x.to(self.at(1))))
        x = self.layer3(self.layer2(x.to(self.at(2))).to(self.at(3)))
        return self.head(F.relu(x).mean(dim=(2, 3)).to(self.at(4)))


def over_both(make, boundary="layer1", **others):
    to = lambda batch: [batch[0].to(FIRST), batch[1].to(SECOND)]  # noqa: E731
    return {"make": make, "boundary": boundary, "to": to} | others


RUNS = {
    "float64": lambda: numbers(torch.float64),
    "bfloat16": lambda: numbers(torch.bfloat16),
    "float16": lambda: numbers(torch.float16),
    "scaled losses": lambda: {"autocast": torch.float16, "scaled": True},
    "channels_last and arithmetic in the loop": channels_last,
    "arithmetic with tensors of the device": tensors_of_the_device,
    "dropout behind the boundary": lambda: {
        "make": Dropping, "freezes": freeze_front("stem", "layer1")
    },
    "compiled layer1": lambda: compiled("layer1"),
    "spread before layer2": lambda: over_both(lambda: Placed().spread(1), "layer2"),
    "spread at the boundary": lambda: over_both(lambda: Placed().spread(2)),
    **{
        f"a ring of {n}": lambda n=n: {
            "cache_kwargs": {"ring_batches": n}, "epochs": 4, "hits": 48 * 3
        } for n in (1, 2, 9)
    },
}  # fmt: skip


@pytest.mark.parametrize("what", RUNS)
def test_a_run_is_the_computed_one(tmp_path, what):
    compared(tmp_path, **{"hits": 48 * 2} | RUNS[what]())


WAYS = {
    "kind": lambda part: part.to(DEVICE),
    "index": lambda part: part.to(FIRST),
    "non_blocking": lambda part: part.to(torch.device(DEVICE, 0), non_blocking=True),
    "method": lambda part: getattr(part, DEVICE)(),
    "method with index": lambda part: getattr(part, DEVICE)(0, non_blocking=True),
    "like": lambda part: part.to(torch.empty(0, dtype=part.dtype, device=DEVICE)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_move_a_batch(tmp_path, way):
    stats = compared(tmp_path, hits=48 * 2, to=lambda batch: list(map(WAYS[way], batch)))
    assert stats.refetched == stats.audited


def test_a_device_that_is_not_the_first(tmp_path):
    settings = {"make": lambda: Placed().spread(0), "to": lambda batch: moved(batch, SECOND)}
    before = counts(all_threads=True).across
    compared(tmp_path, hits=48 * 2, **settings)
    assert counts(all_threads=True).across == before


class Ahead:
    """Moves the next batch to the device, on a stream of its own, before this one is used."""

    def __init__(self, loader, depth=1):
        self.loader, self.depth = loader, depth

    def __iter__(self):
        stream, current = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
        waiting = []
        for batch in self.loader:
            torch.accelerator.set_stream(stream)
            there = moved(batch, non_blocking=True)
            torch.accelerator.set_stream(current)
            waiting.append((there, stream.record_event()))
            if len(waiting) > self.depth:
                yield self._waited(*waiting.pop(0), current)
        for batch, event in waiting:
            yield self._waited(batch, event, current)

    @staticmethod
    def _waited(batch, event, current):
        current.wait_event(event)
        return batch


@pytest.mark.parametrize(
    ("depth", "workers", "moves"),
    [(1, 0, None), (3, 0, None), (1, 2, None), (1, 0, {9: "layer2", 20: None}),
     (1, 2, {9: "layer2", 20: None})],
)  # fmt: skip
def test_a_wrapper_that_prefetches_to_the_device(tmp_path, depth, workers, moves):
    settings = {
        "wrap": lambda loader: Ahead(loader, depth), "to": lambda batch: batch, "moves": moves,
        "epochs": 5, "pin_memory": True, "num_workers": workers,
    }  # fmt: skip
    assert compared(tmp_path, **settings).hits > 48


# ---- what changes under way --------------------------------------------------------------------


def adding(how):
    def on_step(step, model, cache):
        if step == 13:
            with torch.no_grad():
                how(model.stem[0].weight).add_(1.0)

    return {"epochs": 5, "on_step": on_step}


def test_a_write_past_the_counters_is_seen_on_the_device(tmp_path, caplog):
    """`p.data` moves no version counter: the guard compares elements without waiting for them."""
    settings = adding(lambda weight: weight.data)
    with caplog.at_level(logging.WARNING, "egeria"):
        cached = run(tmp_path, gate="always", **settings)
    assert "the content of a parameter or buffer of the prefix was changed" in caplog.text
    # Seen one batch later; from then on all is computed with the new weights.
    assert cached[0][:13] == plain(**settings)[0][:13]
    assert 12 < cached[2].hits < 48 * 4
    assert cached[2].voided > 0


def test_a_step_of_the_optimizer_on_the_prefix_voids_it_at_once(tmp_path):
    assert compared(tmp_path, **adding(lambda weight: weight)).voided > 0


@pytest.mark.parametrize("cut", [3, 9, 18])
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path, cut):
    options = {"epochs": 4, "place": DEVICE, "reuse": None}
    whole, *_ = resumable(tmp_path / "whole", gate="never", **options)
    first, _, state = resumable(tmp_path / "parts", until=cut, **options)
    second, stats, _ = resumable(tmp_path / "parts", state=state, **options)
    torch.testing.assert_close(first + second, whole, rtol=1e-5, atol=1e-6)
    assert stats.hits > 0
