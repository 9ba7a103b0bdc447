"""Trains a tiny GPT-2 with the Trainer of transformers. Nothing in it is written for elastic-agent.

    elastic-agent --rdzv-endpoint host0:29400 --nnodes 1:4 --nproc-per-node 2 examples/transformers_train.py

Also runs under torchrun and plain python. With several machines, pass a shared folder as --output-dir.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

TOKENS = 64


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens, each the sum of the two before; the first two are different in each sequence."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = [*divmod(index, TOKENS)]
        while len(sequence) < 16:
            sequence.append((sequence[-2] + sequence[-1]) % TOKENS)
        tokens = torch.tensor(sequence)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="checkpoints")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per worker and step")
    parser.add_argument("--samples-per-step", type=int, help="constant, for any number of workers")
    parser.add_argument("--save-steps", type=int, default=100)
    options = parser.parse_args()
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    accumulate = (options.samples_per_step or 0) // (options.batch_size * workers)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=max(1, accumulate),
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_steps=50,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences(options.samples))
    trainer.train()


if __name__ == "__main__":
    main()
