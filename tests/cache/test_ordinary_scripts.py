"""Scripts as people write them, at module level: equal, served, and nothing said that is not so."""

import logging
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader, FrozenPrefix

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
torch.manual_seed(0)
inputs, labels = torch.randn(32, 6), torch.randint(3, (32,))
data = TensorDataset(inputs, labels)
losses = []
"""
TRAIN = """
model = Net()
model.front.requires_grad_(False).eval()
cache = attach(model)
loader = load(data, batch_size=8)
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    cache and cache.flush()
"""


def hold(model):
    """Do without a cache what a cache does to modes."""
    frozen = [
        module
        for module in (model.front, *model.modules())
        if not any(parameter.requires_grad for parameter in module.parameters())
        and next(module.parameters(), None) is not None
    ]
    FrozenPrefix(frozen, model=model)


def run(text, directory=None, boundary="auto", **given):
    """Run a script at module level, plainly or with a cache; return its names, and the stats."""
    made = []

    def attach(model):
        made.append(ActivationCache(model, directory, boundary, gate="always"))
        return made[-1]

    def load(data, **options):
        return EgeriaLoader(data, seed=0, cache=names["cache"], **options)

    plain = {"attach": hold, "load": DataLoader}
    names = plain if directory is None else {"attach": attach, "load": load}
    names |= {"__name__": "script", **given}
    try:
        exec(compile(textwrap.dedent(text), "script.py", "exec"), names)
        return names, made[0].stats() if made else None
    finally:
        for cache in made:
            cache.close()


def served(text, directory, caplog, *, plain=None, **given):
    """Run a script in both ways: losses are the same, and nothing is said; return the stats."""
    expected, _ = run(text if plain is None else plain, **given)
    with caplog.at_level(logging.WARNING, "egeria"):
        ours, stats = run(text, directory, **given)
    assert ours["losses"] == expected["losses"]
    assert not caplog.records
    return stats


SHADOWED = {
    "an attribute of the model": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.x, self.y, self.loss = 2.0, 3.0, 4.0
                self.front, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            def forward(self, inputs):
                return self.head(torch.tanh(self.front(inputs * self.x + self.y) * self.loss))
    """,
    "an attribute of what the front is given": """
        class Front(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.epoch = nn.Linear(6, 8), 0.5
            def forward(self, inputs):
                return torch.tanh(self.linear(inputs)) * self.epoch
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.front, self.head = Front(), nn.Linear(8, 3)
            def forward(self, inputs):
                return self.head(self.front(inputs))
    """,
}  # fmt: skip


@pytest.mark.parametrize("net", SHADOWED.values(), ids=SHADOWED)
def test_a_loops_variable_is_not_what_a_model_reads_of_the_same_name(net, directory, caplog):
    stats = served(BEGIN + textwrap.dedent(net) + TRAIN, directory, caplog)
    assert (stats.hits, stats.voided, stats.why_not) == (64, 0, None)


def test_a_global_that_the_front_does_read_counts_as_before(directory, caplog):
    text = (
        BEGIN
        + textwrap.dedent(SHADOWED["an attribute of the model"]).replace("* self.x", "* scale")
        + "scale = 2.0\n"
        + TRAIN.replace("for x, y in loader", "scale += 1\n    for x, y in loader")
    )
    plain, _ = run(text)
    ours, stats = run(text, directory)
    assert ours["losses"] == plain["losses"]
    assert stats.voided
    assert "(the global 'scale' changed)" in caplog.text


class Noise(nn.Module):
    def forward(self, x):
        return self._noisy(x) if self.training else x

    def _noisy(self, x):
        return x + torch.randn_like(x)


NECKS = {
    "a norm without parameters": (lambda: nn.BatchNorm1d(8, affine=False), "front"),
    "a dropout": (lambda: nn.Dropout(), "front"),
    "a module of one's own": (Noise, "front"),
    "a list of them": (lambda: nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.ReLU()), "front"),
    "between what is frozen": (
        lambda: nn.Sequential(nn.Dropout(), nn.Linear(8, 8).requires_grad_(False)),
        "neck.1",
    ),
}
PROBE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.neck, self.head = nn.Linear(6, 8), neck(), nn.Linear(8, 3)
    def forward(self, inputs):
        return self.head(self.neck(self.front(inputs)))
"""


@pytest.mark.parametrize("is_evaluated", [False, True], ids=["at once", "evaluated before"])
@pytest.mark.parametrize("case", NECKS)
def test_what_nobody_froze_behind_the_front_goes_on_training(case, is_evaluated, directory, caplog):
    neck, boundary = NECKS[case]
    text = BEGIN + PROBE + TRAIN
    if is_evaluated:
        text = text.replace("load(data, batch_size=8)", "load(data, batch_size=8)\nevaluate()")
    frozen = "model.neck.eval()" if boundary != "front" else ""
    text = text.replace(
        "    for x, y", f"    model.train(); model.front.eval(); {frozen}\n    for x, y"
    )
    evaluate = "def evaluate():\n    model.eval()\n    for x, y in loader: model(x)\n"
    text = text.replace("losses = []", f"losses = []\n{evaluate}")
    stats = served(text, directory, caplog, neck=neck)
    assert stats.boundary == boundary
    assert stats.hits >= 64


ENCODER = """
inputs = torch.randint(1, 50, (32, 10))
inputs[torch.arange(10)[None] >= torch.randint(3, 11, (32, 1))] = 0
data = TensorDataset(inputs, labels)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(16, 3)
        self.encoder.layers[0].requires_grad_(False)
    def forward(self, x):
        return self.head(self.encoder(self.front(x), src_key_padding_mask=x == 0).mean(1))
    __len__ = lambda self: 0
"""


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_an_encoder_takes_its_padding_mask_as_without_a_cache(directory, caplog):
    """Its first layer in inference mode must not send those that train down the nested path."""
    evaluate = (
        "    model.eval()\n    with torch.no_grad():\n        for x, y in loader:\n"
        "            losses.append(model(x).sum().item())\n    model.train()\n"
    )
    stats = served(BEGIN + ENCODER + TRAIN + evaluate, directory, caplog)
    assert (stats.boundary, stats.hits) == ("encoder.layers.0", 64)


def test_modes_that_a_trainer_restores_are_no_news(directory, caplog):
    """Lightning gives every module the mode that it had before a validation."""
    restore = "    for module in model.modules(): module.training = True\n"
    text = BEGIN + PROBE + TRAIN.replace("    for x, y", restore + "    for x, y")
    plain = text.replace(restore, "")
    stats = served(text, directory, caplog, plain=plain, neck=nn.Dropout)
    assert (stats.hits, stats.voided, stats.why_not) == (64, 0, None)
