"""Copies of a training in the agent's memory, as the ``Trainer`` of transformers takes them for a checkpoint.

In place of the folder of a checkpoint, the ``Trainer`` is given one that contains ``trainer_state.json`` alone. What it
would read from other files comes from the copy.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from elastic_agent.integrations.random_states import random_states, restore_random_state
from elastic_agent.integrations.transformers.position import STATE_FILE
from elastic_agent.survive.trainer import TrainingCopies


class TrainerMemory:
    """The copies of one call of ``Trainer.train``, and the one with which it continues, if any."""

    def __init__(self, training_id: str, than: int) -> None:
        """Look for a copy of a later step than ``than``; on all ranks alike."""
        self._copies = TrainingCopies(training_id)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._found = self._copies.newest(than)
        if self._found is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="elastic-agent-")
            Path(self._folder.name, STATE_FILE).write_text(json.dumps(self._found["trainer"]))

    @property
    def checkpoint(self) -> str | None:
        """The folder to continue from; None: there is no newer copy."""
        return self._folder.name if self._folder is not None else None

    def load_model(self, trainer: Any) -> None:
        """Load the weights."""
        assert self._found is not None
        trainer.model.load_state_dict(self._found["model"], strict=False)  # as from a checkpoint

    def load_optimizer(self, trainer: Any) -> None:
        """Load the states of the optimizer, of the scheduler and of the gradient scaler."""
        assert self._found is not None
        trainer.optimizer.load_state_dict(self._found["optimizer"])
        trainer.lr_scheduler.load_state_dict(self._found["scheduler"])
        if self._found["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(self._found["scaler"])

    def load_random_state(self, trainer: Any) -> None:
        """Continue the sequences of random numbers."""
        if self._found is not None:
            restore_random_state(self._found["random"], trainer.args.process_index, trainer.args.world_size)

    def step_done(self, trainer: Any) -> None:
        """Make a copy after a step, if one is due; all ranks call it after each."""
        if self._folder is not None:
            self._folder.cleanup()
            self._found = None
        # What is done at the end of an epoch or of the training comes after its last step.
        ends = trainer.control.should_training_stop or trainer.control.should_epoch_stop
        if ends or trainer.state.epoch == int(trainer.state.epoch):
            return
        if self._copies.is_due(trainer.state.global_step):
            trainer.store_flos()  # this and the next are collectives, to which all ranks have to come
            states = random_states()
            self._copies.make(trainer.state.global_step, lambda: _state_of(trainer, states))

    def end(self) -> None:
        """Forget the copies: the training is complete."""
        self._copies.end()


def _state_of(trainer: Any, states: list[dict[str, Any]]) -> dict[str, Any]:
    scaler = trainer.accelerator.scaler
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "trainer": _trainer_state(trainer),
        "random": states,
    }


def _trainer_state(trainer: Any) -> dict[str, Any]:
    """Return what ``trainer_state.json`` would contain."""
    states: dict[str, list[Any]] = {}
    for each in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(each, ExportableState):
            states.setdefault(type(each).__name__, []).append(each.state())
    known = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
    saved = {**vars(trainer.state), "stateful_callbacks": {**trainer.state.stateful_callbacks, **known}}
    names = {field.name for field in dataclasses.fields(trainer.state)}
    copied: dict[str, Any] = json.loads(json.dumps({name: saved[name] for name in names & saved.keys()}))
    return copied
