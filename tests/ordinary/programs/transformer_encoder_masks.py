# torch's own TransformerEncoder with its defaults, padded batches and a padding mask.
import torch
from toys import sentences, tokenizer as load_tokenizer
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +

torch.manual_seed(0)
tokenizer = load_tokenizer()
texts, labels = sentences(48)
data = [(torch.tensor(tokenizer(text)["input_ids"]), label) for text, label in zip(texts, labels)]


def collate_batch(batch):
    text_list = pad_sequence([text for text, _ in batch], batch_first=True, padding_value=0)
    return text_list, torch.tensor([label for _, label in batch])


class TextModel(nn.Module):
    def __init__(self, vocab_size, d_model=32, nhead=4, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d_model, nhead, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        self.decoder = nn.Linear(d_model, 2)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0).sum(1) / (~padding).sum(1, keepdim=True)
        return self.decoder(x)


model = TextModel(len(tokenizer))
model.embedding.requires_grad_(False)
for layer in model.encoder.layers[:2]:
    layer.requires_grad_(False)
loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate_batch)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader)  # +

criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for epoch in range(3):
    model.train()
    total = 0.0
    for tokens, label in loader:
        optimizer.zero_grad()
        loss = criterion(model(tokens), label)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"| epoch {epoch} | loss {total / len(loader):.3f}")
