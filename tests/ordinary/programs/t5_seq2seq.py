# Summaries with T5 in the form of the examples: the collator is given the model.
import torch
from toys import sentences, tokenizer as load_tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration, set_seed

from egeria_cache import ActivationCache  # +


def main():
    set_seed(1)
    tokenizer = load_tokenizer()
    texts, _ = sentences(32, longest=14)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2,
                 num_heads=4, decoder_start_token_id=0, pad_token_id=0)
    )  # fmt: skip

    def preprocess(text):
        inputs = tokenizer(text, max_length=16, truncation=True)
        inputs["labels"] = tokenizer(" ".join(text.split()[::3]))["input_ids"]
        return inputs

    train_dataset = [preprocess(text) for text in texts]
    data_collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100)
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=data_collator, batch_size=8
    )
    for param in model.encoder.parameters():
        param.requires_grad = False
    model.shared.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_dataloader)  # +
    for epoch in range(3):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
