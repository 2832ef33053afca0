# Preference training in the form of TRL's trainers: the body and the head are called apart.
import torch
from toys import sentences, tokenizer as load_tokenizer
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from egeria_cache import ActivationCache  # +

set_seed(0)
tokenizer = load_tokenizer(padding_side="right")
texts, _ = sentences(32)
others, _ = sentences(32, seed=8)


def collate(pairs):
    chosen = tokenizer([a for a, _ in pairs], padding="max_length", max_length=16)
    rejected = tokenizer([b for _, b in pairs], padding="max_length", max_length=16)
    return {
        "input_ids": torch.tensor([[*c, *r] for c, r in zip(chosen["input_ids"],
                                                           rejected["input_ids"])]),
        "attention_mask": torch.tensor([[*c, *r] for c, r in zip(chosen["attention_mask"],
                                                                rejected["attention_mask"])]),
    }  # fmt: skip


dataloader = DataLoader(list(zip(texts, others)), batch_size=8, shuffle=True, collate_fn=collate)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)
)  # fmt: skip
model.model.embed_tokens.requires_grad_(False)
for layer in model.model.layers[:2]:
    layer.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=dataloader)  # +


def log_probabilities(batch):
    hidden = model.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    logits = model.lm_head(hidden[:, :-1])
    labels = batch["input_ids"][:, 1:]
    per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return -(per_token * batch["attention_mask"][:, 1:])


for epoch in range(3):
    model.train()
    for batch in dataloader:
        logps = log_probabilities(batch)
        chosen, rejected = logps[:, :15].sum(1), logps[:, 16:].sum(1)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print({"loss": round(loss.item(), 4), "epoch": epoch})
