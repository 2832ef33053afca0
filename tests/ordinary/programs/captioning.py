# Captions: a frozen CNN, and an LSTM over captions that the collate function sorts by length.
import torch
from toys import Pictures, resnet, sentences, tokenizer as load_tokenizer
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache  # +


class Captions(Dataset):
    def __init__(self, size, tokenizer):
        self.pictures = Pictures(size)
        self.captions = [tokenizer(text)["input_ids"] for text in sentences(size)[0]]

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, index):
        return self.pictures[index][0], torch.tensor(self.captions[index])


def collate_fn(data):
    data.sort(key=lambda x: len(x[1]), reverse=True)
    images, captions = zip(*data)
    images = torch.stack(images, 0)
    lengths = [len(cap) for cap in captions]
    targets = torch.zeros(len(captions), max(lengths)).long()
    for i, cap in enumerate(captions):
        targets[i, : lengths[i]] = cap[: lengths[i]]
    return images, targets, lengths


class EncoderCNN(nn.Module):
    def __init__(self, embed_size):
        super().__init__()
        net = resnet()
        self.resnet = nn.Sequential(*list(net.children())[:-1])
        self.linear = nn.Linear(net.fc.in_features, embed_size)
        self.bn = nn.BatchNorm1d(embed_size, momentum=0.01)

    def forward(self, images):
        with torch.no_grad():
            features = self.resnet(images)
        return self.bn(self.linear(features.reshape(features.size(0), -1)))


class DecoderRNN(nn.Module):
    def __init__(self, embed_size, hidden_size, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embed_size)
        self.lstm = nn.LSTM(embed_size, hidden_size, batch_first=True)
        self.linear = nn.Linear(hidden_size, vocab_size)

    def forward(self, features, captions, lengths):
        embeddings = torch.cat((features.unsqueeze(1), self.embed(captions)), 1)
        hiddens, _ = self.lstm(pack_padded_sequence(embeddings, lengths, batch_first=True))
        return self.linear(hiddens[0])


def main():
    torch.manual_seed(0)
    tokenizer = load_tokenizer()
    loader = DataLoader(Captions(32, tokenizer), 8, shuffle=True, collate_fn=collate_fn)
    encoder, decoder = EncoderCNN(16), DecoderRNN(16, 32, len(tokenizer))
    encoder.resnet.requires_grad_(False)
    cache = ActivationCache(encoder, "runs/cache", boundary="auto", loader=loader)  # +
    criterion = nn.CrossEntropyLoss()
    params = [*decoder.parameters(), *encoder.linear.parameters(), *encoder.bn.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3)
    for epoch in range(3):
        for images, captions, lengths in loader:
            targets = pack_padded_sequence(captions, lengths, batch_first=True)[0]
            loss = criterion(decoder(encoder(images), captions, lengths), targets)
            decoder.zero_grad()
            encoder.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch [{epoch}], Loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
