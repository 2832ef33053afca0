# Trainer collects the batches of a step before it uses any.
import torch
from toys import sentences, tokenizer as load_tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from egeria_cache import ActivationCache  # +
from egeria_cache.integrations.transformers import EgeriaTrainer as Trainer  # +

set_seed(0)
tokenizer = load_tokenizer()
texts, _ = sentences(48)
dataset = [tokenizer(t, padding="max_length", max_length=14, truncation=True) for t in texts]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=3, n_head=4, n_positions=32)
)
for part in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:2]):
    part.requires_grad_(False)
model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
cache = ActivationCache(model, "runs/cache", boundary="auto")  # +
trainer = Trainer(
    cache=cache,  # +
    model=model,
    args=TrainingArguments(
        "output",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=6,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="epoch",
    ),  # fmt: skip
    train_dataset=dataset,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
