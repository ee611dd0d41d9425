"""Supervised fine-tuning in the shape of TRL's example; three lines differ from what TRL runs."""

import sys

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from unison import Privacy  # new
from unison.hf import PrivateSFTTrainer as SFTTrainer  # was: from trl import SFTTrainer


def main(output_dir: str) -> None:
    # A tiny model and data set in the place of what one downloads.
    letters = {letter: number for number, letter in enumerate("?.abcdefghijklmnopqrstuvwxyz ")}
    backend = Tokenizer(models.WordLevel(letters, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="?", pad_token="?", eos_token="."
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(letters),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )
    dataset = Dataset.from_list(
        [{"prompt": "say ", "completion": "ho" * (1 + n % 3)} for n in range(64)]
    )

    training_args = SFTConfig(
        output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        max_length=16,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
        privacy=Privacy(epsilon=8.0, delta=1e-3, accountant="rdp"),  # new
    )
    trainer.train()
    trainer.save_model(output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
