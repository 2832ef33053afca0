# Multiple choice: each sample is several sentences, flattened and padded by the collator.
from dataclasses import dataclass

import torch
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertForMultipleChoice, set_seed

from egeria_cache import ActivationCache  # +


@dataclass
class DataCollatorForMultipleChoice:
    tokenizer: object

    def __call__(self, features):
        labels = [feature.pop("label") for feature in features]
        batch_size, num_choices = len(features), len(features[0]["input_ids"])
        flattened = [
            [{k: v[i] for k, v in feature.items()} for i in range(num_choices)]
            for feature in features
        ]
        flattened = sum(flattened, [])
        batch = self.tokenizer.pad(flattened, padding=True, return_tensors="pt")
        batch = {k: v.view(batch_size, num_choices, -1) for k, v in batch.items()}
        batch["labels"] = torch.tensor(labels, dtype=torch.int64)
        return batch


class Swag:
    def __init__(self, size, tokenizer):
        contexts, labels = sentences(size)
        endings = [sentences(size, seed=20 + i)[0] for i in range(3)]
        self.rows = [
            dict(tokenizer([c] * 3, [e[i] for e in endings], truncation=True, max_length=24))
            for i, c in enumerate(contexts)
        ]
        self.labels = [label + i % 2 for i, label in enumerate(labels)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {**self.rows[index], "label": self.labels[index]}


set_seed(0)
tokenizer = load_tokenizer()
train_dataloader = DataLoader(
    Swag(24, tokenizer), shuffle=True, batch_size=4,
    collate_fn=DataCollatorForMultipleChoice(tokenizer),
)  # fmt: skip
model = BertForMultipleChoice(bert_config(len(tokenizer)))
model.bert.embeddings.requires_grad_(False)
model.bert.encoder.layer[:2].requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-4)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
for epoch in range(3):
    model.train()
    total_loss = 0
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {total_loss.item() / len(train_dataloader):.4f}")
