"""A small GPT-2 with Hugging Face's Trainer: accumulation, cosine schedule, evaluation, early stop.

On as many ranks as there are.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Text(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 50, (count, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    set_seed(3)
    config = GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[1]}.run",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=2,
        save_steps=3,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Text(50, 1),
        eval_dataset=Text(12, 2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=50)],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        torch.save([model.state_dict(), losses, metrics["eval_loss"]], sys.argv[1])


if __name__ == "__main__":
    main()
