# A tagger over frozen word vectors and a frozen first LSTM; sequences of one length.
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from egeria_cache import ActivationCache  # +

torch.manual_seed(1)


class LSTMTagger(nn.Module):
    def __init__(self, embedding_dim, hidden_dim, vocab_size, tagset_size):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_dim)
        self.lstm1 = nn.LSTM(embedding_dim, hidden_dim, batch_first=True)
        self.lstm2 = nn.LSTM(hidden_dim, hidden_dim, batch_first=True)
        self.hidden2tag = nn.Linear(hidden_dim, tagset_size)

    def forward(self, sentence):
        x = self.word_embeddings(sentence)
        x, _ = self.lstm1(x)
        x, _ = self.lstm2(x)
        return F.log_softmax(self.hidden2tag(x), dim=-1)


words = torch.randint(40, (48, 10))
tags = words % 5
loader = DataLoader(TensorDataset(words, tags), batch_size=8, shuffle=True)
model = LSTMTagger(16, 24, 40, 5)
model.word_embeddings.requires_grad_(False)
model.lstm1.requires_grad_(False)
loss_function = nn.NLLLoss()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader)  # +
for epoch in range(3):
    for sentence, tags in loader:
        model.zero_grad()
        tag_scores = model(sentence)
        loss = loss_function(tag_scores.flatten(0, 1), tags.flatten())
        loss.backward()
        optimizer.step()
    print(epoch, f"{loss.item():.4f}")
