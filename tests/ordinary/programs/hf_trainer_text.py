# Text classification with the Trainer, evaluation and checkpoints at each epoch.
import numpy as np
from datasets import Dataset
from toys import bert_config, sentences, tokenizer as load_tokenizer
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,  # -
    TrainingArguments,
    set_seed,
)

from egeria_cache import ActivationCache  # +
from egeria_cache.integrations.transformers import EgeriaTrainer as Trainer  # +


def compute_metrics(eval_pred):
    predictions = np.argmax(eval_pred.predictions, axis=1)
    return {"accuracy": float((predictions == eval_pred.label_ids).mean())}


def main():
    set_seed(0)
    tokenizer = load_tokenizer()
    texts, labels = sentences(64)
    dataset = Dataset.from_dict({"text": texts, "label": labels})
    dataset = dataset.map(lambda x: tokenizer(x["text"], truncation=True), batched=True)
    split = dataset.train_test_split(test_size=16, seed=0)
    model = BertForSequenceClassification(bert_config(len(tokenizer)))
    for name, param in model.named_parameters():
        if name.startswith(("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1")):
            param.requires_grad = False
    args = TrainingArguments(
        output_dir="out", eval_strategy="epoch", save_strategy="epoch", learning_rate=2e-4,
        per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=3,
        weight_decay=0.01, report_to="none", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    cache = ActivationCache(model, "runs/cache", boundary="auto")  # +
    trainer = Trainer(
        model=model, args=args, train_dataset=split["train"], eval_dataset=split["test"],
        processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        cache=cache,  # +
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
