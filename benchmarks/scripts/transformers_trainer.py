"""Training with the Trainer of transformers: a small GPT-2 that starts from random weights."""

from events import FOLDER, Rounds  # isort: skip

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

OUTPUT = FOLDER / "transformers"


class Texts(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids = torch.randint(0, 128, (4096, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[number], "labels": self.ids[number]}


class Record(TrainerCallback):
    def on_train_begin(self, args, state, control, **more) -> None:
        self.rounds = Rounds()

    def on_step_end(self, args, state, control, **more) -> None:
        self.rounds.done()


def main() -> None:
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        OUTPUT,
        num_train_epochs=100_000,
        per_device_train_batch_size=4,
        save_steps=100,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts(), callbacks=[Record()])
    last = get_last_checkpoint(str(OUTPUT)) if OUTPUT.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
