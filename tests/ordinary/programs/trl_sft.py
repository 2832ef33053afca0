# Supervised fine-tuning with TRL's SFTTrainer: prompts and completions, padded.
from datasets import Dataset
from toys import sentences, tokenizer as load_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer as Trainer

from egeria_cache import ActivationCache  # +
from egeria_cache.integrations.transformers import EgeriaTrainerMixin  # +

Trainer = type("Trainer", (EgeriaTrainerMixin, Trainer), {})  # +


def main():
    set_seed(1)
    tokenizer = load_tokenizer(eos_token="[SEP]")
    prompts, answers = sentences(48)[0], sentences(48, seed=4)[0]
    train = Dataset.from_list(
        [{"prompt": p + " ", "completion": a} for p, a in zip(prompts, answers)]
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                    num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
                    pad_token_id=tokenizer.pad_token_id)
    )  # fmt: skip
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    args = SFTConfig(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-3,
        logging_steps=1, save_strategy="epoch", report_to="none", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False, gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    cache = ActivationCache(model, "runs/cache", boundary="auto")  # +
    trainer = Trainer(
        model=model, args=args, train_dataset=train, processing_class=tokenizer,
        cache=cache,  # +
    )  # fmt: skip
    print(trainer.train().training_loss)


if __name__ == "__main__":
    main()
