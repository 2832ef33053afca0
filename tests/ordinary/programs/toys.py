"""What the programs would download: small pictures, sentences, a tokenizer, models."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WORDS = (
    "the a this that film book song plot cast sound scene story ending pace was is felt seemed "
    "very quite rather never always good great fine warm bright bad poor weak cold dull and but "
    "so then we they it you liked loved hated missed saw heard read wrote long short old new"
).split()


class Pictures(Dataset):
    """Noisy pictures of a few classes, each with a pattern of its own."""

    def __init__(self, size=64, num_classes=4, side=16, transform=None, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(num_classes, (size,), generator=generator).tolist()
        patterns = torch.randn(num_classes, 3, side, side, generator=torch.Generator())
        noise = torch.randn(size, 3, side, side, generator=generator)
        self.data = 0.5 * patterns[self.targets] + noise
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        picture, target = self.data[index], self.targets[index]
        if self.transform is not None:
            picture = self.transform(picture)
        return picture, target


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


class ResNet(nn.Module):
    """The shape and the names of the well-known one, much smaller."""

    def __init__(self, num_classes=4, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2))
        self.layer4 = nn.Sequential(Block(4 * width, 4 * width, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet(pretrained=True, **kwargs):
    return ResNet(**kwargs)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, length, dim))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """The shape and the names of the well-known one, with its ways in."""

    def __init__(self, num_classes=4, dim=24, depth=4, side=16, patch=4):
        super().__init__()
        self.embed_dim = self.num_features = dim
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(Layer(dim, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()

    def prepare_tokens(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed

    def forward_features(self, x):
        x = self.prepare_tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]

    def get_intermediate_layers(self, x, n=1):
        x = self.prepare_tokens(x)
        output = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if len(self.blocks) - i <= n:
                output.append(self.norm(x))
        return output

    def forward(self, x):
        return self.head(self.forward_features(x))


def sentences(size=48, shortest=4, longest=12, seed=2):
    """Return texts and their labels."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for _ in range(size):
        length = int(torch.randint(shortest, longest, (1,), generator=generator))
        picks = torch.randint(len(WORDS), (length,), generator=generator)
        texts.append(" ".join(WORDS[i] for i in picks))
        labels.append(int((picks < len(WORDS) // 2).sum() * 2 > length))
    return texts, labels


def bert_config(vocab_size, layers=3):
    from transformers import BertConfig

    return BertConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=layers,
                      num_attention_heads=4, intermediate_size=64)  # fmt: skip


def tokenizer(**kwargs):
    """Return a fast tokenizer of whole words, as BERT's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: i for i, word in enumerate([*special, *WORDS])}
    whole = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    whole.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, **dict(zip(names, special, strict=True)), **kwargs
    )
