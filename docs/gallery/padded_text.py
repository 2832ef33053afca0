# %% [markdown]
# # Text, padded to the longest of each batch
#
# Sentences differ in length, and a batch is padded to its longest. Samples are stored without their
# padding, and padded again to the batch that they come in: no sample depends on its neighbours.
# The text is what every machine has: docstrings of Python's own library. The task is to tell which
# package one comes from; embeddings and lower layers are frozen.

# %%
import importlib
import inspect
import re
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from egeria_cache import ActivationCache, EgeriaLoader

PACKAGES = ("asyncio.base_events", "argparse", "tarfile", "logging", "mailbox", "unittest.mock")
samples, words = [], {}
for label, package in enumerate(PACKAGES):
    module = importlib.import_module(package)
    for _, kind in inspect.getmembers(module, inspect.isclass):
        for _, method in [("", kind), *inspect.getmembers(kind, inspect.isfunction)]:
            found = re.findall(r"\w+", inspect.getdoc(method) or "")[:64]
            if len(found) > 4:
                codes = [words.setdefault(word.lower(), len(words) + 1) for word in found]
                samples.append((torch.tensor(codes), label))
print(f"{len(samples)} samples of {min(len(s) for s, _ in samples)} to "
      f"{max(len(s) for s, _ in samples)} words")  # fmt: skip


def collate(batch):
    codes = pad_sequence([codes for codes, _ in batch], batch_first=True)
    return codes, torch.tensor([label for _, label in batch])


# %%
class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(len(words) + 1, width, padding_idx=0)
        layer = {"nhead": 4, "dim_feedforward": 256, "dropout": 0.0, "batch_first": True}
        self.lower = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(4))
        self.upper = nn.TransformerEncoderLayer(width, **layer)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, codes):
        padding, x = codes == 0, self.embedding(codes)
        for block in [*self.lower, self.upper]:
            x = block(x, src_key_padding_mask=padding)
        seen = (~padding).unsqueeze(2)
        return self.head((x * seen).sum(1) / seen.sum(1))


torch.manual_seed(0)
model = Classifier()
model.embedding.requires_grad_(False)
_ = model.lower.requires_grad_(False)

# %%
scratch = tempfile.TemporaryDirectory()
cache = ActivationCache(model, scratch.name, boundary="auto")
loader = EgeriaLoader(samples, batch_size=32, shuffle=True, collate_fn=collate, cache=cache)
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for epoch in range(5):
    total = 0.0
    for codes, labels in loader:
        loss = F.cross_entropy(model(codes), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / len(loader)
    print(f"epoch {epoch}  loss {total:.3f}  {cache.stats().hits} samples from the cache so far")
print(cache.report())
cache.close()
