# Fine-tuning BERT for sentences with a plain loop; batches are padded to their longest.
import torch
from toys import sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    get_scheduler,
    set_seed,
)

from egeria_cache import ActivationCache  # +

set_seed(42)
tokenizer = load_tokenizer()
texts, labels = sentences(48)
encoded = [
    {**tokenizer(text, truncation=True, max_length=32), "labels": label}
    for text, label in zip(texts, labels)
]
train_dataloader = DataLoader(
    encoded, shuffle=True, batch_size=8, collate_fn=DataCollatorWithPadding(tokenizer)
)

config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64, num_labels=2,
)  # fmt: skip
model = BertForSequenceClassification(config)
for param in model.bert.embeddings.parameters():
    param.requires_grad = False
for layer in model.bert.encoder.layer[:3]:
    for param in layer.parameters():
        param.requires_grad = False

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
num_epochs = 3
lr_scheduler = get_scheduler(
    "linear", optimizer=optimizer, num_warmup_steps=0,
    num_training_steps=num_epochs * len(train_dataloader),
)  # fmt: skip
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model.to(device)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +

model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
