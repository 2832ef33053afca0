"""Random draws that change nothing that the front reads: it is served, and they stay fresh."""

import logging
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.samples import DEFAULT_REUSE
from tests.helpers.steps import take_step

SIZE = 48


class Noisy(Dataset):
    """Images, prompts and labels, of which some are drawn at random, now and then."""

    def __init__(self, drawn, chance=0.5):
        made = torch.Generator().manual_seed(0)
        self.images = torch.rand(SIZE, 3, 8, 8, generator=made)
        self.drawn, self.chance = drawn, chance

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        image, prompt, label = self.images[index], 0, index % 4
        if random.random() < self.chance and "image" in self.drawn:
            image = image.flip(-1)
        if random.random() < 0.5:
            if "prompt" in self.drawn:
                prompt = random.randrange(5)
            if "label" in self.drawn:
                label = random.randrange(4)
        return image, prompt, label


class Model(nn.Module):
    """A frozen front, and a head that is given a prompt; `mixes` lets the front read it, too."""

    def __init__(self, mixes=False):
        super().__init__()
        self.mixes = mixes
        self.front = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
        self.prompts, self.head = nn.Embedding(5, 144), nn.Linear(144, 4)
        self.front.requires_grad_(False)

    def forward(self, images, prompts):
        if self.mixes:
            images = images + prompts[:, None, None, None]
        return self.head(self.front(images) + self.prompts(prompts))


def train(data, where, *, epochs=4, mixes=False, state=None, stop=None, gate="always", **options):
    """Train, and return the losses, the cache's figures, and the state after `stop` batches."""
    torch.manual_seed(0)
    model, losses, taken = Model(mixes), [], None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    cache = where and ActivationCache(
        model, where, boundary="auto", gate=gate, audit_rate=options.pop("audit_rate", 0.0)
    )
    loader = EgeriaLoader(
        data, 8, sampler=list(range(SIZE)), cache=cache or None, seed=3, **options
    )
    if state is not None:
        loader.load_state_dict(state["loader"])
        model.load_state_dict(state["model"])
    for _ in range(epochs):
        for images, prompts, labels in loader:
            loss = take_step(F.cross_entropy(model(images, prompts), labels), optimizer)
            losses.append(loss.item())
            if len(losses) == stop:
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                taken = {"loader": loader.state_dict(), "model": weights}
        if cache:
            cache.flush()
    stats = cache and cache.stats()
    if cache:
        cache.close()
    return losses, stats, taken


@pytest.mark.parametrize("drawn", ["label", "prompt", "prompt and label"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.cases(3)
def test_draws_stay_fresh_and_the_front_is_served(tmp_path, caplog, drawn, workers):
    data = Noisy(drawn)
    expected, _, _ = train(data, None, num_workers=workers)
    with caplog.at_level(logging.INFO, "egeria"):
        losses, stats, _ = train(data, tmp_path, num_workers=workers, audit_rate=0.5)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
    assert (stats.hits, stats.audit_failures, stats.why_not) == (3 * SIZE, 0, None)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert sum("change nothing that the frozen front reads" in m for m in caplog.messages) == 1
    again, stats, _ = train(data, tmp_path, num_workers=workers)
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-7)
    assert stats.hits > 3 * SIZE


@pytest.mark.parametrize(
    ("drawn", "mixes"), [("image", False), ("prompt", True), ("nothing", False)]
)
def test_what_the_front_may_read_is_drawn_in_turns(tmp_path, caplog, drawn, mixes):
    """Draws that change nothing in a few samples may do so in others."""
    _, stats, _ = train(Noisy(drawn), tmp_path, mixes=mixes, epochs=3)
    assert any(
        f"One draw of each is kept, used for {DEFAULT_REUSE} epochs" in m for m in caplog.messages
    )
    assert stats.hits > SIZE


@pytest.mark.parametrize("workers", [0, 2])
def test_a_draw_that_changes_the_front_after_all_is_served_no_stale_row(tmp_path, caplog, workers):
    """One image in fifty is flipped: the few samples that are tried at first do not show it."""
    caplog.set_level(logging.INFO, "egeria")
    torch.manual_seed(0)
    model = Model()
    with ActivationCache(model, tmp_path, boundary="auto", gate="always") as cache:
        data = Noisy("image label", chance=0.02)
        loader = EgeriaLoader(data, 8, cache=cache, seed=3, num_workers=workers)
        for _ in range(6):
            for images, prompts, _ in loader:
                served, seen = model(images, prompts), torch.from_numpy(images.numpy().copy())
                expected = model.head(model.front(seen) + model.prompts(prompts))
                torch.testing.assert_close(served, expected)
            cache.flush()
        stats = cache.stats()
    assert sum("change nothing that the frozen front reads" in m for m in caplog.messages) == 1
    assert stats.hits > 0
    assert stats.reuse == {"train": DEFAULT_REUSE}


def test_a_run_resumed_in_mid_epoch_goes_on_with_fresh_draws(tmp_path):
    data = Noisy("prompt and label")
    whole, _, state = train(data, tmp_path / "a", stop=9)
    rest, stats, _ = train(data, tmp_path / "b", state=state, epochs=3)
    torch.testing.assert_close(rest, whole[9:], rtol=1e-6, atol=1e-7)
    assert stats.hits > SIZE
