# LoRA on the last layers of a BERT, the rest as it is.
import torch
from peft import LoraConfig, TaskType, get_peft_model
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, set_seed

from egeria_cache import ActivationCache  # +

set_seed(0)
tokenizer = load_tokenizer()
texts, labels = sentences(48)
examples = [{"text": t, "label": y} for t, y in zip(texts, labels)]


def collate_fn(examples):
    batch = tokenizer([e["text"] for e in examples], padding="longest", return_tensors="pt")
    batch["labels"] = torch.tensor([e["label"] for e in examples])
    return batch


train_dataloader = DataLoader(examples, shuffle=True, collate_fn=collate_fn, batch_size=8)
model = BertForSequenceClassification(bert_config(len(tokenizer), layers=4))
peft_config = LoraConfig(
    task_type=TaskType.SEQ_CLS, r=4, lora_alpha=16, lora_dropout=0.0,
    target_modules=["query", "value"], layers_to_transform=[3],
)  # fmt: skip
model = get_peft_model(model, peft_config)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=3e-3)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
for epoch in range(3):
    model.train()
    for step, batch in enumerate(train_dataloader):
        batch.to("cpu")
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} {loss.item():.4f}")
