"""What stands around the documents' blocks of Python, for a reader and so for the test.

A block of a document without an entry here fails, and so does an entry without a block.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

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
CONTROLLED = """
    from egeria_cache import ActivationCache, EgeriaLoader
    model, epochs = Net(), 2
    cache = ActivationCache(model, "runs/cache")
    loader = EgeriaLoader(dataset, batch_size=32, cache=cache)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
RANK = """
    import os
    world_size, rank, epochs, batch_size = 1, 0, 3, 32
    os.environ["LOCAL_WORLD_SIZE"] = "1"
"""


@dataclass(frozen=True)
class Around:
    """What runs before a block and after it, in one namespace with it."""

    before: str
    after: str = ""
    needs: tuple[str, ...] = ()
    """Modules of others; without them the block is skipped."""
    plain: bool = True
    """It shows a change, and the side without the cache trains to the same losses."""
    served: bool = True
    """Samples come from the cache."""

    def code(self, block: str) -> str:
        """Return the whole of it."""
        return "\n".join([textwrap.dedent(self.before), block, textwrap.dedent(self.after)])


def shown(before: str, after: str = "", needs: tuple[str, ...] = ()) -> Around:
    """Return what stands around a block that shows no change, and from which nothing is served."""
    return Around(before, after, needs, plain=False, served=False)


CHANGE = "The change to a training loop"
INTEGRATIONS = "docs/integrations.md"
AROUND = {
    ("docs/augmentation.md", "Behind the boundary", 0): shown(
        "losses = []",
    ),
    # file, heading, number of the block among those of Python under it
    ("README.md", CHANGE, 0): Around(PYTORCH + FROZEN, EPOCHS),
    ("README.md", CHANGE, 1): Around(
        PYTORCH + FROZEN + "    loader = DataLoader(dataset, batch_size=16)\n", EPOCHS, served=False
    ),
    ("README.md", CHANGE, 2): Around(PYTORCH + FROZEN, EPOCHS),
    ("README.md", CHANGE, 3): Around(
        PYTORCH + "    epochs, resnet = 3, Net\n", "losses.append(loss.item())", served=False
    ),
    (INTEGRATIONS, "Accelerate", 0): Around(
        PYTORCH
        + FROZEN
        + """
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    """,
        EPOCHS.replace("loss.backward()", "accelerator.backward(loss)"),
        needs=("accelerate",),
    ),
    (INTEGRATIONS, "HF Trainer", 0): Around(
        LLAMA,
        "losses += [log['loss'] for log in trainer.state.log_history if 'loss' in log]",
        needs=("accelerate", "transformers"),
    ),
    (INTEGRATIONS, "HF Trainer", 1): shown(
        LLAMA
        + """
    from egeria_cache import ActivationCache
    from egeria_cache.integrations.transformers import EgeriaTrainer
    cache = ActivationCache(model, "runs/cache")
    """,
        "trainer.train()",
        needs=("accelerate", "transformers"),
    ),
    (INTEGRATIONS, "Lightning", 0): Around(LIGHTNING, needs=("lightning",)),
    (INTEGRATIONS, "Lightning", 1): shown(
        LIGHTNING
        + """
    from egeria_cache import ActivationCache
    from egeria_cache.integrations.lightning import EgeriaCallback
    cache = ActivationCache(MyModule(), "runs/cache")
    """,
        needs=("lightning",),
    ),
    (INTEGRATIONS, "PEFT", 0): Around(
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
        needs=("peft", "transformers"),
    ),
    (INTEGRATIONS, "torchdata", 0): Around(
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
        needs=("torchdata",),
    ),
    (INTEGRATIONS, "Notebooks", 0): Around(PYTORCH + FROZEN, EPOCHS),
    ("docs/README.md", "", 0): Around(PYTORCH + FROZEN, EPOCHS),
    ("docs/controller.md", "", 0): shown(
        PYTORCH
        + CONTROLLED
        + """
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    """,
        "assert controller.history[-1]['step'] <= epochs * len(loader)",
    ),
    ("docs/controller.md", "Fine-tuning: a static front, asked for beforehand", 0): shown(
        PYTORCH
        + CONTROLLED
        + """
    def accuracy(model):
        inputs, targets = dataset.tensors
        return (model(inputs).argmax(1) == targets).float().mean().item()
    """,
        """
    assert suggestion.trials and controller.policy.schedule == [(0, suggestion.boundary)]
    controller.close()
    """,
    ),
    ("docs/pipelines.md", "", 0): shown(
        PYTORCH
        + RANK
        + """
    from itertools import chain
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make_blocks():
        return [nn.Linear(6, 6) for _ in range(4)]
    """,
        "controller.close()",
    ),
    ("docs/cluster.md", "Which directory", 0): Around(
        PYTORCH
        + FROZEN
        + RANK
        + """
    from egeria_cache import ActivationCache
    cache = ActivationCache(model, "runs/cache", boundary="auto")
    """,
        """
    for epoch in range(epochs):
        cache.flush()
        for inputs, targets in loader:
            model(inputs)
    """,
        plain=False,
    ),
}
AROUND[("docs/extending.md", "A freezing policy", 0)] = shown(
    PYTORCH + CONTROLLED,
    """
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            controller.step(loss)
    assert controller.num_frozen == len(controller.boundaries) > 0
    controller.close()
    """,
)
AROUND[("docs/extending.md", "A data source", 0)] = Around(
    PYTORCH
    + FROZEN
    + """
    import os
    os.mkdir("samples")
    for number in range(40):
        torch.save((torch.randn(6), number % 3), f"samples/{number:02}.pt")
    """,
    """
    for epoch in range(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
        cache.flush()
    hits = cache.stats().hits
    torch.save((torch.randn(6), 0), "samples/00-and-a-half.pt")  # shifts all indices but one
    torch.save((torch.randn(6), 0), "samples/07.pt")
    os.utime("samples/07.pt", (1, 1))
    loader = EgeriaLoader(Folder("samples"), batch_size=41, cache=cache)
    for x, y in loader:
        model(x)
    assert cache.stats().hits - hits == 39
    """,
    plain=False,
)
EXCERPTS = {
    ("docs/cluster.md", "Ray Train", 0): "Ray Train is no package of the tests; where it is "
    "installed, tests/examples/test_launchers.py trains so"
}
"""Blocks that are not run, and why; they are compiled."""
