"""Transformers' Trainer with the kernels: one line more, use_kernels. Needs accelerate, as the Trainer does."""

from __future__ import annotations

import tempfile

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from fasttrain_kernels import use_kernels


def samples(count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Texts that count modulo 64."""
    starts = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(0))
    return [dict(input_ids=row, labels=row) for row in (starts + torch.arange(length)) % 64]


def main(steps: int = 20, *, kernels: bool = True) -> list[float]:
    torch.manual_seed(0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    )
    if kernels:
        use_kernels(model)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=3e-3,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=samples(16 * steps))
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print("loss:", ", ".join(f"{loss:.2f}" for loss in main()[::4]))
