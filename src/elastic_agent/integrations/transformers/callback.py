"""The callback that the integration adds to every ``Trainer``."""

from __future__ import annotations

import os
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from elastic_agent import client
from elastic_agent.integrations.disabling import enabled
from elastic_agent.integrations.say import say
from elastic_agent.integrations.transformers.features import Feature
from elastic_agent.integrations.transformers.position import Position
from elastic_agent.worker_variables import GENERATION, TRANSFORMERS_DISABLE


class ElasticCallback(TrainerCallback, ExportableState):
    """Reports heartbeats, and on a notice has all ranks save at the same step and leave.

    Its state in a checkpoint's ``trainer_state.json`` is the run that saved it and the position in the epoch.
    """

    def __init__(self) -> None:
        from elastic_agent.integrations.transformers import install

        install()
        self.position: Position | None = None
        """Where training is in the epoch; None if the ``Trainer`` is left to determine it."""
        self.training = 0
        """Which of the script's calls of ``train`` it is."""
        active = GENERATION in os.environ
        self._features = enabled(os.environ, TRANSFORMERS_DISABLE, Feature)[0] if active else frozenset()
        self._agreement: client.Agreement | None = None
        self._notice: client.Notice | None = None
        self._micro_batches = 0

    def state(self) -> dict[str, Any]:
        """Of the checkpoint that is being saved."""
        saved = {
            "run_id": client.current().run_id,
            "training": self.training,
            "position": self.position and self.position.state_dict(),
        }
        return {"args": {}, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if Feature.NOTICES in self._features:
            self._agreement = client.Agreement()
        self._micro_batches = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._micro_batches += 1
        self._heartbeat()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.position is not None:
            self.position.advance(self._micro_batches + 1)
        self._micro_batches = 0
        self._heartbeat(state.global_step)
        self._notice = self._agreement.notice() if self._agreement is not None else None
        if self._notice is not None:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._heartbeat()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._heartbeat()
        if self._notice is None:
            return
        if state.is_world_process_zero:
            text = f"notice ({self._notice.reason}): saved step {state.global_step} to {args.output_dir}; leaving"
            say(text)
        client.leave()

    def _heartbeat(self, step: int | None = None) -> None:
        if Feature.HEARTBEATS in self._features:
            client.heartbeat(step)
