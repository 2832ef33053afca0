# %% [markdown]
# # Hugging Face Trainer and PEFT
#
# LoRA adapters in the last two layers of a BERT: everything before them is frozen, and served.
# `EgeriaTrainer` takes the place of `Trainer`; everything else is as in any script. The model is
# made from a configuration, so that nothing is downloaded, and so small that a run of four epochs
# would hardly win back its proof: `gate="always"` does not wait to see.

# %%
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from transformers.utils import logging

from egeria_cache import ActivationCache
from egeria_cache.integrations.transformers import EgeriaTrainer

logging.set_verbosity_error()
torch.manual_seed(0)
config = BertConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
    intermediate_size=256, max_position_embeddings=64, num_labels=2,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
model.bert.requires_grad_(False)
adapters = LoraConfig(
    task_type="SEQ_CLS", target_modules=["query", "value"], layers_to_transform=[4, 5]
)
model = get_peft_model(model, adapters)
model.print_trainable_parameters()

# %% [markdown]
# Sentences of random words, of which some decide the label.


# %%
class Sentences(torch.utils.data.Dataset):
    def __init__(self, number):
        self.words = torch.randint(10, 1000, (number, 32))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": int((words < 200).sum() > 6),
        }


train, held_out = Sentences(800), Sentences(200)

# %%
scratch = tempfile.TemporaryDirectory()
cache = ActivationCache(model, f"{scratch.name}/cache", boundary="auto", gate="always")
arguments = TrainingArguments(
    output_dir=f"{scratch.name}/out", num_train_epochs=4, per_device_train_batch_size=32,
    per_device_eval_batch_size=50,
    learning_rate=2e-3, logging_strategy="epoch", eval_strategy="epoch", save_strategy="no",
    report_to=[], disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = EgeriaTrainer(
    model=model, args=arguments, train_dataset=train, eval_dataset=held_out, cache=cache
)
trainer.train()
for record in trainer.state.log_history:
    if "eval_loss" in record:
        print(f"epoch {record['epoch']:.0f}  held-out loss {record['eval_loss']:.4f}")
print(cache.report())
cache.close()
