# A plain loop that saves the model and its tokenizer after each epoch, and pushes it nowhere.
import torch
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithPadding,
    get_scheduler,
    set_seed,
)

from egeria_cache import ActivationCache  # +

set_seed(0)
tokenizer = load_tokenizer()
texts, labels = sentences(48)
dataset = [{**tokenizer(t), "labels": y} for t, y in zip(texts, labels)]
collator = DataCollatorWithPadding(tokenizer=tokenizer)
dataloader = DataLoader(dataset, shuffle=True, batch_size=8, collate_fn=collator)
model = BertForSequenceClassification(bert_config(len(tokenizer), layers=4))
for param in model.base_model.parameters():
    param.requires_grad = False
optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=5e-3)
lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=18)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=dataloader)  # +
for epoch in range(3):
    model.train()
    for batch in dataloader:
        batch = {k: v.to("cpu") for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    model.save_pretrained("output")
    tokenizer.save_pretrained("output")
    print(epoch, loss.item())
