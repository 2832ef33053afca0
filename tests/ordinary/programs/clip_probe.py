# A classifier on the image features of a CLIP-like model, which has two ways in.
import torch
from toys import Pictures, VisionTransformer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


class CLIP(nn.Module):
    def __init__(self, embed_dim=16, vocab_size=50):
        super().__init__()
        self.visual = VisionTransformer(num_classes=embed_dim)
        self.token_embedding = nn.Embedding(vocab_size, embed_dim)
        self.text_projection = nn.Linear(embed_dim, embed_dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def encode_image(self, image):
        return self.visual(image.float())

    def encode_text(self, text):
        return self.text_projection(self.token_embedding(text).mean(1))

    def forward(self, image, text):
        image = F.normalize(self.encode_image(image), dim=-1)
        text = F.normalize(self.encode_text(text), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


torch.manual_seed(0)
model = CLIP()
model.requires_grad_(False)
model.eval()
train = DataLoader(Pictures(64), batch_size=16, shuffle=True)
probe = nn.Linear(16, 4)
optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-2)
cache = ActivationCache(model, "runs/cache", "auto", loader=train, method="encode_image")  # +
for epoch in range(4):
    for images, labels in train:
        with torch.no_grad():
            features = model.encode_image(images)
            features /= features.norm(dim=-1, keepdim=True)
        loss = F.cross_entropy(100 * probe(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
