"""A classifier with LoRA in the shape of a tutorial for Opacus, from which three lines differ."""

from contextlib import nullcontext  # was: import opacus.utils.batch_memory_manager as bmm

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from unison import PrivacyEngine  # was: from opacus import PrivacyEngine

EPOCHS, BATCH_SIZE, DELTA = 3, 32, 1e-3


def main() -> None:
    torch.manual_seed(0)
    words = torch.randint(2, 50, (256, 12))
    words[:, 0] = torch.randint(2, 4, (256,))  # the first word tells the class
    dataset = TensorDataset(words, torch.ones_like(words), words[:, 0] - 2)
    train_dataloader = DataLoader(dataset, batch_size=BATCH_SIZE)

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    model.train()
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_dataloader,
        target_delta=DELTA,
        target_epsilon=8.0,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    kw = {
        "data_loader": train_dataloader,
        "max_physical_batch_size": 16,
        "optimizer": optimizer,
    }
    for _ in range(EPOCHS):
        with nullcontext(kw["data_loader"]) as x:  # was: with bmm.BatchMemoryManager(**kw) as x:
            for ids, mask, labels in x:
                optimizer.zero_grad()
                model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
                optimizer.step()
    print(f"ε = {privacy_engine.get_epsilon(DELTA):.2f}")


if __name__ == "__main__":
    main()
