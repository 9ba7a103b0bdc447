"""The callback that the integration adds to every ``Trainer``."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from elastic_agent import client
from elastic_agent.integrations import signature
from elastic_agent.integrations.patching import say
from elastic_agent.integrations.signature import Signature
from elastic_agent.integrations.trainings import Training, from_rank_0
from elastic_agent.integrations.transformers import install
from elastic_agent.integrations.transformers.position import Position, saved, trainer_state
from elastic_agent.integrations.transformers.private_names import Feature, why_not_in_memory

if TYPE_CHECKING:
    from elastic_agent.integrations.transformers.memory import TrainerMemory

FOLDER = "_elastic_agent"
"""In ``output_dir``, with the records: ``Trainer.push_to_hub`` leaves out what begins with an underscore."""

REMEDY = "trainer.train(resume_from_checkpoint=...)"

_NO_WEIGHTS = (
    "output_dir", "resume_from_checkpoint", "run_name", "project", "report_to", "disable_tqdm", "push_to_hub", "log_",
    "logging_", "hub_", "trackio_", "save_", "eval_", "do_", "include_", "debug", "skip_memory_metrics",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch", "dataloader_persistent", "ddp_timeout",
    "local_rank", "enable_jit_checkpoint", "per_device_eval_batch_size", "use_cpu",
)  # fmt: skip
"""Beginnings of names of ``TrainingArguments`` on which no weights depend."""


class ElasticCallback(TrainerCallback, ExportableState):
    """Reports steps, and on a notice has all ranks save at the same step and leave.

    Its state in a checkpoint's ``trainer_state.json`` is the position in the epoch.
    """

    def __init__(self) -> None:
        self._features = install()
        self.position: Position | None = None
        """The position of training in the epoch; None if the ``Trainer`` is left to determine it."""
        self.training: Training | None = None
        """Rank 0's record of the training; None if the training is none that could be continued."""
        self.memory: TrainerMemory | None = None
        """The training's copies in memory, on every rank; None if there are none to be made."""
        self.continues = False
        """The training is continued without the script's having said so."""
        self._agreement: client.Agreement | None = None
        self._notice: client.Notice | None = None
        self._micro_batches = 0

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint that is being saved."""
        return {
            "args": {},
            "attributes": {
                "saved": {
                    "position": self.position and self.position.state_dict(),
                    "training": self.training and self.training.id,
                }
            },
        }

    def begin_training(self, trainer: Any, named: Any) -> Any:
        """Begin a training, and return the checkpoint to continue it from: the script's, or if certain, the newest."""
        args, newest, copies = trainer.args, None, None
        if args.process_index == 0:
            facts = signature.described(_signature_of, trainer)
            self.training = Training(args.output_dir, FOLDER, client.current().run_id, facts)
            if named is None:
                self.training.explain(REMEDY)
                newest = _newest(self.training, args.output_dir)
            if Feature.MEMORY in self._features:
                copies_of = self.training.id_of_copies(named, lambda: why_not_in_memory(trainer))
                step = trainer_state(newest).get("global_step", 0) if copies_of and newest is not None else 0
                copies = copies_of, int(step)
        newest, copies = from_rank_0((newest, copies))
        if copies is not None:
            from elastic_agent.integrations.transformers.memory import TrainerMemory  # only if it is used

            memory = TrainerMemory(*copies)  # forgets the copies of another training
            self.memory = memory if copies[0] else None
            newest = memory.checkpoint or newest
        self.continues = named is None and newest is not None
        if self.continues and args.process_index == 0 and (self.memory is None or not self.memory.checkpoint):
            say(f"resuming from {newest}")
        return named if named is not None else newest

    def end_training(self) -> None:
        """Record that the training is complete: the script may now do what makes it skip it after a restart."""
        if self.training is not None:
            self.training.end()
        if self.memory is not None:
            self.memory.end()
            self.memory = None

    def left_by(self, error: BaseException) -> None:
        """Record that an exception, which the script may handle, has left the training."""
        if self.training is not None:
            self.training.left_by(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if Feature.NOTICES in self._features:
            self._agreement = client.Agreement()
        self._micro_batches = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._micro_batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.position is not None:
            self.position.advance(self._micro_batches + 1)
        self._micro_batches = 0
        if Feature.STEPS in self._features:
            client.report_step(state.global_step)
        self._notice = self._agreement.notice() if self._agreement is not None else None
        if self._notice is not None:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training is not None:
            self.training.add(f"checkpoint-{state.global_step}", None, state.global_step)
        if self._notice is None:
            return
        if state.is_world_process_zero:
            text = f"notice ({self._notice.reason}): saved step {state.global_step} to {args.output_dir}; leaving"
            say(text)
        client.leave()


def _newest(training: Training, output_dir: str) -> str | None:
    """Return the newest complete checkpoint that is certainly of this training; None if there is none."""
    if training.doubt:
        return None
    for path in (os.path.join(output_dir, name) for name in reversed(training.earlier)):
        if not trainer_state(path):
            continue
        if saved(path).get("training") == training.id:
            return path
        say(f"checkpoint {path} is not used: another training has overwritten it")
    return None


def _signature_of(trainer: Any) -> Signature:
    """Describe the training that ``train`` begins."""
    names = [
        field.name for field in dataclasses.fields(trainer.args) if not field.name.startswith(_NO_WEIGHTS)
    ]
    settings = {name: getattr(trainer.args, name) for name in names}
    return {
        **signature.of_seed(),
        **signature.of_values("arguments", settings),
        **signature.of_model(trainer.model),
        **signature.of_data("data", trainer.train_dataset),
        **signature.of_optimizers([trainer.optimizer] if trainer.optimizer is not None else []),
    }
