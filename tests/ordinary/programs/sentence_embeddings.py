# Sentence embeddings: pairs, a mean over tokens, in-batch negatives.
import torch
from sentence_transformers import InputExample, SentenceTransformer, losses, models
from toys import bert_config, sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertModel, set_seed

from egeria_cache import ActivationCache  # +

set_seed(0)
tokenizer = load_tokenizer()
BertModel(bert_config(len(tokenizer))).save_pretrained("bert")
tokenizer.save_pretrained("bert")
word = models.Transformer("bert", max_seq_length=16)
model = SentenceTransformer(modules=[word, models.Pooling(32)], device="cpu")
for name, parameter in model.named_parameters():
    parameter.requires_grad = "encoder.layer.2" in name
first, second = sentences(32)[0], sentences(32, seed=9)[0]
examples = [InputExample(texts=[a, b]) for a, b in zip(first, second)]


def collate(batch):
    return [model.tokenize([e.texts[i] for e in batch]) for i in range(2)]


loader = DataLoader(examples, shuffle=True, batch_size=8, collate_fn=collate)
train_loss = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader)  # +
for epoch in range(3):
    model.train()
    for features in loader:
        loss = train_loss(features, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
