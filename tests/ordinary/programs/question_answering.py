# Questions and contexts, padded to one length; start and end are learnt.
import torch
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertForQuestionAnswering, default_data_collator, set_seed

from egeria_cache import ActivationCache  # +

set_seed(0)
tokenizer = load_tokenizer()
questions, _ = sentences(32, 3, 6, seed=7)
contexts, _ = sentences(32, 8, 14, seed=8)
features = []
for i, (question, context) in enumerate(zip(questions, contexts)):
    row = tokenizer(
        question, context, max_length=24, truncation="only_second", padding="max_length",
        return_token_type_ids=True,
    )  # fmt: skip
    first = row["token_type_ids"].index(1)
    features.append({**row, "start_positions": first + i % 3, "end_positions": first + 3 + i % 2})
train_dataloader = DataLoader(
    features, shuffle=True, collate_fn=default_data_collator, batch_size=8
)
config = bert_config(len(tokenizer))
model = BertForQuestionAnswering(config)
for name, p in model.named_parameters():
    p.requires_grad = name.startswith(("bert.encoder.layer.2", "qa_outputs"))
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
for epoch in range(3):
    model.train()
    for step, batch in enumerate(train_dataloader):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} loss {loss.item():.4f}")
