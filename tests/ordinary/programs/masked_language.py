# Masked language modelling: the collator masks tokens at random, so that nothing can be reused.
import torch
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, set_seed

from egeria_cache import ActivationCache  # +

set_seed(0)
tokenizer = load_tokenizer()
dataset = [tokenizer(t, padding="max_length", max_length=14, truncation=True)
           for t in sentences(32)[0]]  # fmt: skip
collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
dataloader = DataLoader(dataset, shuffle=True, batch_size=8, collate_fn=collator)
model = BertForMaskedLM(bert_config(len(tokenizer)))
model.bert.encoder.layer[0].requires_grad_(False)
for name, p in model.bert.embeddings.named_parameters():
    p.requires_grad_(False)
model.cls.predictions.decoder.weight = torch.nn.Parameter(
    model.cls.predictions.decoder.weight.detach().clone()
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=dataloader)  # +
for epoch in range(3):
    model.train()
    for batch in dataloader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
