"""The callback that the integration adds to every ``Trainer``."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from typing import Any

from elastic_agent import client
from elastic_agent.integrations.inspection import loaded
from elastic_agent.integrations.lightning import private_names, world_change
from elastic_agent.integrations.lightning.checkpoints import RunCheckpoints
from elastic_agent.integrations.lightning.features import Feature
from elastic_agent.integrations.lightning.notices import PacedAgreement
from elastic_agent.integrations.lightning.samples import Samples
from elastic_agent.integrations.say import say

_FITS = itertools.count()
"""Calls of ``fit`` in this process: the n-th continues from checkpoints of the n-th."""

STATE = "elastic_agent"
"""Under which key a checkpoint contains :meth:`TrainerHooks.on_save_checkpoint`'s values."""


def make_callback(features: frozenset[Feature]) -> Any:
    """A callback for whichever of Lightning's two distributions is loaded."""
    bases = [sys.modules[root].Callback for root in loaded(private_names.PYTORCHES)]
    kind = type("ElasticAgentCallback", (TrainerHooks, *bases), {})
    return kind(features)


class TrainerHooks:
    """What the integration does at Lightning's hooks, and at the methods that ``private_names`` adapts."""

    is_elastic_agent = True

    def __init__(self, features: frozenset[Feature]) -> None:
        self._features = features
        self._agreement: PacedAgreement | None = None
        self._checkpoints: RunCheckpoints | None = None
        self._at: str | None = None
        self._restored: dict[str, Any] = {}
        self._validated = False
        self._bar_to_continue = False
        self.samples = Samples({})

    # -- Lightning's hooks -----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # First, so that what other callbacks save at the end of a step has this step's samples.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)
        if stage == "fit":
            self._restored = {}
            self.samples = Samples({})
            self._checkpoints = RunCheckpoints(trainer.default_root_dir, client.current().run_id, next(_FITS))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if Feature.NOTICES in self._features:
            self._agreement = PacedAgreement()
        if self._restored.get("at") == "epoch":
            private_names.begin_next_epoch(trainer)
        self._validated = bool(self._restored.get("validated"))
        world_change.restore_random_state(self._restored, trainer.global_rank, trainer.world_size)
        if private_names.restarted_mid_epoch(trainer):
            self._bar_to_continue = Feature.PROGRESS_BAR in self._features
            if self.samples.continued:
                private_names.set_batches_done(trainer, self.samples.batches_done())
                # Lightning does not know that the sampler has a state.
                warnings.filterwarnings(
                    "ignore", "You're resuming from a checkpoint that ended before the epoch"
                )
        if self.samples.refusal and trainer.is_global_zero:
            say(self.samples.refusal)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        if self._bar_to_continue:
            self._bar_to_continue = False
            private_names.continue_progress_bar(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.samples.step_done()
        self._heartbeat(trainer.global_step)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._heartbeat()

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        self._heartbeat()

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        self._heartbeat()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state: dict[str, Any] = {"world_size": trainer.world_size, "sampler": self.samples.state()}
        if self._at is not None:
            state["at"] = self._at
            state["validated"] = self._at == "step" and private_names.validated_last(trainer)
            state["random"] = world_change.random_states(trainer.world_size)
        checkpoint[STATE] = state

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(STATE, {})
        self.samples = Samples(self._restored)
        saved_in = self._restored.get("world_size", trainer.world_size)
        same_in_every_world = isinstance(trainer.limit_train_batches, int)
        if Feature.WORLD in self._features and "loops" in checkpoint and not same_in_every_world:
            batches = private_names.current_batches(checkpoint["loops"])
            world_change.translate_batches(batches, saved_in, trainer.world_size)

    def _heartbeat(self, step: int | None = None) -> None:
        if Feature.HEARTBEATS in self._features:
            client.heartbeat(step)

    # -- from adapted methods --------------------------------------------------------------------

    def take_validated(self) -> bool:
        """Whether the step after which training was left had been validated; once."""
        validated, self._validated = self._validated, False
        return validated

    def after_step(self, trainer: Any, *, complete: bool) -> None:
        """A batch within an epoch is done; ``complete`` if no gradients are being accumulated."""
        self._leave_on_notice(trainer, "step", complete=complete)

    def after_epoch(self, trainer: Any) -> None:
        """An epoch is done."""
        self._leave_on_notice(trainer, "epoch", complete=True)

    def _leave_on_notice(self, trainer: Any, at: str, *, complete: bool) -> None:
        if self._agreement is None or self._checkpoints is None:
            return
        notice = self._agreement.notice()
        if notice is None or not complete:
            return
        self._at = at
        path = self._checkpoints.on_notice(trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            private_names.after_saves(trainer, self._checkpoints.add, path)
            private_names.after_saves(trainer, self._checkpoints.remove_older_on_notice, path)
            say(f"notice ({notice.reason}): saved step {trainer.global_step} to {path}; leaving")
        client.leave()

    def about_to_save(self, trainer: Any, path: Any) -> None:
        """A checkpoint is going to be written to this path, where one may be already."""
        if self._checkpoints is not None and trainer.is_global_zero:
            private_names.after_saves(trainer, self._checkpoints.forget_folder, path)

    def saved(self, trainer: Any, path: Any) -> None:
        """A checkpoint from which training can be resumed is complete, or being written in another thread."""
        if self._checkpoints is not None and trainer.is_global_zero:
            private_names.after_saves(trainer, self._checkpoints.add, path)

    def newest_checkpoint(self, named: Any) -> str | None:
        """The newest checkpoint that all ranks can read; None if there is none, or if the script has named one."""
        assert self._checkpoints is not None
        if _is_rank_0():
            for sentence in self._checkpoints.damaged():
                say(sentence)
        everywhere = _gathered(self._checkpoints.available())
        common = common_to_all(everywhere)
        seen = sorted({path for there in everywhere for path in there})
        if named is not None:
            if common and os.path.abspath(os.fspath(named)) != common[-1] and _is_rank_0():
                say(
                    f"the script resumes from {named}; the run's newest checkpoint, {common[-1]}, is not used"
                )
            return None
        if not common and seen:
            raise RuntimeError(
                f"the run has saved {seen[-1]}, but not all workers can read it; expected default_root_dir and the "
                "folders of checkpoints on storage that all nodes share"
            )
        return common[-1] if common else None


def common_to_all(everywhere: list[list[str]]) -> list[str]:
    """The checkpoints that every rank can read, in rank 0's order, so that all ranks resume from the same one."""
    return [path for path in everywhere[0] if all(path in there for there in everywhere)]


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _is_rank_0() -> bool:
    return client.current().placement.rank == 0
