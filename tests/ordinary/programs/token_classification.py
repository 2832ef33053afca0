# Named entities: token classification with the collator of the examples.
import torch
from toys import sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification
from transformers import DataCollatorForTokenClassification, set_seed

from egeria_cache import ActivationCache  # +


def tokenize_and_align_labels(tokenizer, text):
    words = text.split()
    encoded = tokenizer(words, is_split_into_words=True, truncation=True)
    tags = [len(word) % 3 for word in words]
    encoded["labels"] = [-100 if i is None else tags[i] for i in encoded.word_ids()]
    return dict(encoded)


def main():
    set_seed(3)
    tokenizer = load_tokenizer()
    train_dataset = [tokenize_and_align_labels(tokenizer, t) for t in sentences(48)[0]]
    collator = DataCollatorForTokenClassification(tokenizer)
    train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=collator, batch_size=8)
    model = BertForTokenClassification(
        BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=3,
                   num_attention_heads=4, intermediate_size=64, num_labels=3)
    )  # fmt: skip
    model.bert.requires_grad_(False)
    model.bert.encoder.layer[-1].requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
    for epoch in range(3):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: {outputs.loss.item():.4f}")


if __name__ == "__main__":
    main()
