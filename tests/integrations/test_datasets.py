"""Hugging Face data sets: what is corrected between two runs is not served as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

pytest.importorskip("datasets")

import datasets as hf

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.steps import take_step

N = 24
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _quiet():
    hf.disable_progress_bars()


def table():
    generator = torch.Generator().manual_seed(0)
    return hf.Dataset.from_dict(
        {
            "features": torch.randn(N, 6, generator=generator).tolist(),
            "label": torch.randint(3, (N,), generator=generator).tolist(),
        }
    )


def corrected(data):
    """Correct two labels, which no sample of a few would show."""
    return data.map(
        lambda row, i: {"label": (row["label"] + 1) % 3 if i in (5, 17) else row["label"]},
        with_indices=True,
    )


def refeatured(data):
    return data.map(
        lambda row, i: {"features": [0.0] * 6 if i == 11 else row["features"]}, with_indices=True
    )


class Wrapped(Dataset):
    """What people write around a data set."""

    def __init__(self, data):
        self.data = data.with_format("torch")

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def on_disk(tmp_path):
    def save_and_load(data):
        path = tmp_path / f"data-{data._fingerprint}"
        data.save_to_disk(path)
        return hf.load_from_disk(path).with_format("torch")

    return save_and_load


WAYS = {
    "formatted": lambda data: data.with_format("torch"),
    "transformed": lambda data: data.with_transform(
        lambda rows: {key: torch.tensor(values) for key, values in rows.items()}
    ),
    "selected": lambda data: data.with_format("torch").select(range(4, N)),
    "shuffled": lambda data: data.with_format("torch").shuffle(seed=3),
    "wrapped": Wrapped,
    "a subset": lambda data: Subset(data.with_format("torch"), range(4, N)),
}


def train(loader, cache=None, model=None, epochs=2):
    model = model or make()
    optimizer, losses = torch.optim.SGD(model[2].parameters(), 0.1), []
    for _ in range(epochs):
        for batch in loader:
            loss = take_step(F.cross_entropy(model(batch["features"]), batch["label"]), optimizer)
            losses.append(loss.item())
        if cache is not None:
            cache.flush()
    return losses


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def cached_run(directory, data):
    """Train as in a process of its own; return the losses and the hits of the first epoch."""
    model = make()
    with ActivationCache(model, directory, "1", gate="always") as cache:
        loader = EgeriaLoader(data, 4, cache=cache)
        losses = train(loader, cache, model, epochs=1)
        first = cache.stats().hits
        return losses + train(loader, cache, model, epochs=1), first


def plain_run(data):
    model, loader = make(), DataLoader(data, 4)
    return train(loader, None, model, 1) + train(loader, None, model, 1)


@pytest.mark.parametrize("way", [*WAYS, "from disk"])
@pytest.mark.parametrize("change", [corrected, refeatured])
def test_a_second_run_with_corrected_data_has_its_own_losses(tmp_path, way, change):
    make_data = on_disk(tmp_path) if way == "from disk" else WAYS[way]
    cache = tmp_path / "cache"
    losses, hits = cached_run(cache, make_data(table()))
    assert hits == 0
    assert losses == pytest.approx(plain_run(make_data(table())), rel=1e-5)

    again, hits = cached_run(cache, make_data(table()))
    assert hits > 0  # the same data are found again
    assert again == pytest.approx(losses, rel=1e-5)

    found, hits = cached_run(cache, make_data(change(table())))
    expected = plain_run(make_data(change(table())))
    assert expected != pytest.approx(losses, rel=1e-3)  # it makes a difference
    assert found == pytest.approx(expected, rel=1e-5)
    assert hits == 0
