"""Every block of code in README and docs/integrations.md runs as it stands there.

Of a diff both sides are run, in the surroundings that its reader is supposed to have: the losses
are the same, and what was stored is served.
"""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

import pytest
import torch

import egeria_cache
from egeria_cache import ActivationCache

ROOT = Path(__file__).resolve().parents[2]
PYTORCH = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.backbone(x))

    dataset = TensorDataset(torch.randn(160, 6), torch.arange(160) % 3)
    device, losses = "cpu", []
"""
FROZEN = """
    model = Net()
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
"""
EPOCHS = """
    for epoch in range(4):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if "cache" in globals():
            cache.flush()
"""
LLAMA = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    def llama():
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=12,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        ))

    rows, losses = torch.randint(3, 50, (40, 8)), []
    train = [{"input_ids": row, "labels": row} for row in rows]
    val = train[:16]
    args = TrainingArguments(
        "out", num_train_epochs=3, per_device_train_batch_size=8, logging_steps=1, seed=3,
        report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
    )
    model = llama()
    model.model.requires_grad_(False)
    model.model.layers[11].requires_grad_(True)
"""
LIGHTNING = (
    PYTORCH
    + """
    import functools
    from lightning.pytorch import LightningModule
    from lightning import pytorch

    class MyModule(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.net.backbone.requires_grad_(False)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.head.parameters(), lr=0.1)

    Trainer = functools.partial(
        pytorch.Trainer, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
"""
)
BLOCKS = {
    # (file, heading, number under it): what stands before it, and after it
    ("README.md", "The change to a training loop", 0): (PYTORCH + FROZEN, EPOCHS),
    ("README.md", "The change to a training loop", 1): (
        PYTORCH
        + """
    epochs, resnet = 3, Net
    """,
        "losses.append(loss.item())",
    ),
    ("docs/integrations.md", "Accelerate", 0): (
        PYTORCH
        + FROZEN
        + """
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    """,
        EPOCHS.replace("loss.backward()", "accelerator.backward(loss)"),
    ),
    ("docs/integrations.md", "HF Trainer", 0): (
        LLAMA,
        "losses += [log['loss'] for log in trainer.state.log_history if 'loss' in log]",
    ),
    ("docs/integrations.md", "HF Trainer", 1): (
        LLAMA
        + """
    from egeria_cache import ActivationCache
    from egeria_cache.integrations.transformers import EgeriaTrainer
    cache = ActivationCache(model, "runs/cache")
    """,
        "trainer.train()",
    ),
    ("docs/integrations.md", "Lightning", 0): (LIGHTNING, ""),
    ("docs/integrations.md", "Lightning", 1): (
        LIGHTNING
        + """
    from egeria_cache import ActivationCache
    from egeria_cache.integrations.lightning import EgeriaCallback
    cache = ActivationCache(MyModule(), "runs/cache")
    """,
        "",
    ),
    ("docs/integrations.md", "PEFT", 0): (
        LLAMA
        + """
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import DataLoader
    base, dataset = llama(), train
    """,
        """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for epoch in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if "cache" in globals():
            cache.flush()
    """,
    ),
    ("docs/integrations.md", "torchdata", 0): (
        PYTORCH
        + FROZEN
        + """
    from torchdata.stateful_dataloader import StatefulDataLoader
    from egeria_cache import ActivationCache, EgeriaLoader
    cache = ActivationCache(model, "runs/cache", boundary="auto")

    def train_step(batch):
        model(batch[0])
    """,
        """
    loader.load_state_dict(torch.load("loader.pt"))
    for epoch in range(3):
        cache.flush()
        for batch in loader:
            train_step(batch)
            losses.append(epoch)  # how many batches: the order of a shuffle is the loader's
    """,
    ),
    ("docs/integrations.md", "Notebooks", 0): (PYTORCH + FROZEN, EPOCHS),
}
ALONE = {("docs/integrations.md", "HF Trainer", 1), ("docs/integrations.md", "Lightning", 1)}
"""They save nothing of the losses that plain training has."""
UNSERVED = ALONE | {("README.md", "The change to a training loop", 1)}
"""With a controller, which freezes nothing in so few steps."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*tensorboardX:UserWarning", "ignore:.*does not have many workers",
    "ignore:.*in eval mode at the start of training", "ignore:'set_vital' is deprecated",
    "ignore:.*number of training batches", "ignore::DeprecationWarning",
    "ignore::FutureWarning:transformers.*", "ignore::UserWarning:peft.*",
    "ignore:.*LeafSpec:FutureWarning",
)  # fmt: skip


def blocks(name):
    """Return {(file, heading, number): (language, text)} of the blocks of Python."""
    found, heading = {}, ""
    pattern = r"^## (?P<heading>[^\n]*)$|^```(?P<language>diff|python)\n(?P<text>.*?)^```$"
    for one in re.finditer(pattern, (ROOT / name).read_text(), re.MULTILINE | re.DOTALL):
        if one["heading"]:
            heading = one["heading"]
        else:
            number = sum(key[1] == heading for key in found)
            found[name, heading, number] = one["language"], one["text"]
    return found


FOUND = blocks("README.md") | blocks("docs/integrations.md")


def sides(language, text):
    """Return a block before and after the change that it shows."""
    if language == "python":
        return "", text
    lines = text.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    return "\n".join(before), "\n".join(line[1:] for line in lines if not line.startswith("-"))


def run(key, side):
    opening, ending = (textwrap.dedent(part) for part in BLOCKS[key])
    torch.manual_seed(0)
    space = {"__name__": "document"}
    exec(compile("\n".join([opening, side, ending]), "_".join(map(str, key)), "exec"), space)
    return space


def test_every_block_has_its_surroundings():
    assert set(FOUND) == set(BLOCKS)


@pytest.mark.parametrize("key", BLOCKS, ids=lambda key: f"{key[1]} {key[2]}")
def test_a_block_of_the_documents_runs_as_it_stands(key, tmp_path, monkeypatch):
    for module in ("accelerate", "transformers", "lightning", "peft", "torchdata"):
        pytest.importorskip(module)
    # Steps as short as these do not pay, and the gate would say so.
    made = []

    def make(*args, **kwargs):
        made.append(ActivationCache(*args, **{"gate": "always", **kwargs}))
        return made[-1]

    monkeypatch.setattr(egeria_cache, "ActivationCache", functools.wraps(ActivationCache)(make))
    plain, cached = sides(*FOUND[key])
    losses = []
    for number, side in enumerate((plain, cached)):
        if key in ALONE and number == 0:
            continue
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        losses.append(run(key, side)["losses"])
    try:
        if key not in ALONE:
            assert len(losses[0]) > 0
            assert losses[1] == pytest.approx(losses[0], abs=1e-5)
        if key not in UNSERVED:
            assert made[-1].stats().hits > 0
    finally:
        for cache in made:
            cache.close()
