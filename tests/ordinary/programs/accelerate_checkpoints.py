# One of Accelerate's shapes: a loop with saved states and tracked figures.
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification
from transformers import get_linear_schedule_with_warmup

from egeria_cache import ActivationCache  # +


def get_dataloaders(accelerator, batch_size):
    tokenizer = load_tokenizer()

    def collate_fn(examples):
        pad_to_multiple_of = 8 if accelerator.mixed_precision != "no" else None
        return tokenizer.pad(
            examples, padding="longest", pad_to_multiple_of=pad_to_multiple_of, return_tensors="pt"
        )

    def encode(size, seed):
        texts, labels = sentences(size, seed=seed)
        return [{**tokenizer(t), "labels": y} for t, y in zip(texts, labels)]

    train = DataLoader(encode(48, 2), shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    val = DataLoader(encode(16, 3), shuffle=False, collate_fn=collate_fn, batch_size=batch_size)
    return train, val, len(tokenizer)


def training_function(args):
    accelerator = Accelerator(cpu=True, project_dir="runs")
    set_seed(42)
    train_dataloader, eval_dataloader, vocab_size = get_dataloaders(accelerator, 8)
    model = BertForSequenceClassification(bert_config(vocab_size))
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
        module.requires_grad_(False)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-4)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(train_dataloader) * 3)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state(f"runs/epoch_{epoch}")
        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += (predictions == references).sum().item()
        accelerator.print(f"epoch {epoch}: {right / 16:.3f}, loss {total_loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    training_function(parser.parse_args())
