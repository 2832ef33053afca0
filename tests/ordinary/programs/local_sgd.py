# Accelerate's local SGD, with trackers.
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from toys import sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from egeria_cache import ActivationCache  # +


def training_function():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    set_seed(42)
    tokenizer = load_tokenizer()
    texts, labels = sentences(48)
    rows = [{**tokenizer(t), "labels": y} for t, y in zip(texts, labels)]

    def collate_fn(examples):
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    train_dataloader = DataLoader(rows, shuffle=True, collate_fn=collate_fn, batch_size=8)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=4,
                   num_attention_heads=4, intermediate_size=64)
    )  # fmt: skip
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(train_dataloader) * 3)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
    for epoch in range(3):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True
        ) as local_sgd:
            for step, batch in enumerate(train_dataloader):
                batch.to(accelerator.device)
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    training_function()
