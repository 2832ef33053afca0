# A causal language model with the Trainer: texts in blocks of one length.
import torch
from toys import sentences, tokenizer as load_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, default_data_collator
from transformers import Trainer, set_seed  # -

from egeria_cache import ActivationCache  # +
from egeria_cache.integrations.transformers import EgeriaTrainer as Trainer  # +
from transformers import set_seed  # +


def main():
    set_seed(5)
    tokenizer = load_tokenizer()
    ids = [i for text in sentences(80)[0] for i in tokenizer(text)["input_ids"]]
    blocks = [ids[i : i + 12] for i in range(0, 12 * 48, 12)]
    train = [{"input_ids": block, "labels": list(block)} for block in blocks]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=3, n_head=4,
                   bos_token_id=2, eos_token_id=3)
    )  # fmt: skip
    for part in (model.transformer.wpe, *model.transformer.h[:2]):
        part.requires_grad_(False)
    model.transformer.wte.requires_grad_(False)
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-3,
        gradient_accumulation_steps=2, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    cache = ActivationCache(model, "runs/cache", boundary="auto")  # +
    trainer = Trainer(
        model=model, args=args, train_dataset=train, data_collator=default_data_collator,
        cache=cache,  # +
    )  # fmt: skip
    print(trainer.train().training_loss)


if __name__ == "__main__":
    main()
