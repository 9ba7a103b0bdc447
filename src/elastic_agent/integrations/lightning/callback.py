"""The callback that the integration adds to every ``Trainer``."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elastic_agent import client
from elastic_agent.integrations import signature
from elastic_agent.integrations.lightning import private_names
from elastic_agent.integrations.lightning.private_names import Feature
from elastic_agent.integrations.lightning.samples import Samples, translate_batches
from elastic_agent.integrations.patching import say
from elastic_agent.integrations.random_states import random_states, restore_random_state
from elastic_agent.integrations.signature import Signature
from elastic_agent.integrations.trainings import (
    Checkpoints,
    Training,
    filesystem_of,
    folder_of_run,
    from_rank_0,
    gathered,
)

if TYPE_CHECKING:
    from elastic_agent.survive.trainer import TrainingCopies

STATE = "elastic_agent"
"""The key of :meth:`TrainerHooks.on_save_checkpoint`'s values in a checkpoint; and the folder of records."""

REMEDY = "trainer.fit(..., ckpt_path=...)"

INTERVAL_S = 0.05
"""The time between agreements of the ranks, about. Each costs them some tenths of a millisecond, much of a short
step; twice as long is little of the time that a notice gives."""

_MEASURED = 10
"""Steps whose duration is measured; the first one is not among them."""


def make_callback(features: frozenset[Feature]) -> Any:
    """Make a callback for whichever of Lightning's two distributions is loaded."""
    bases = [sys.modules[root].Callback for root in private_names.loaded(private_names.PYTORCHES)]
    kind = type("ElasticAgentCallback", (TrainerHooks, *bases), {})
    return kind(features)


class TrainerHooks:
    """The actions at Lightning's hooks, and at the methods that ``private_names`` adapts."""

    is_elastic_agent = True

    def __init__(self, features: frozenset[Feature]) -> None:
        self._features = features
        self._agreement: PacedAgreement | None = None
        self._training: Training | None = None
        self._copies: TrainingCopies | None = None
        self._continues = False
        self._at: str | None = None
        self._random: list[dict[str, Any]] | None = None
        self._restored: dict[str, Any] = {}
        self._validated = False
        self.samples = Samples({})

    # -- Lightning's hooks -----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # First, so that what other callbacks save at the end of a step has this step's samples.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)
        if stage == "fit":
            self._restored = {}
            self.samples = Samples({})
            self._training, self._copies = None, None
            self._continues = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._compare("optimizer", signature.described_late(signature.of_optimizers, trainer.optimizers))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._copies is not None and not private_names.is_replicated(trainer):
            self._copies = None
            if trainer.is_global_zero:
                say("no copies of the training in memory: its optimizer divides its state among the workers")
        self._compare("data", signature.described_late(private_names.signature_of_data, trainer))
        if Feature.NOTICES in self._features:
            self._agreement = PacedAgreement()
        if self._restored.get("at") == "epoch":
            private_names.begin_next_epoch(trainer)
        self._validated = bool(self._restored.get("validated"))
        restore_random_state(self._restored.get("random", []), trainer.global_rank, trainer.world_size)
        if private_names.restarted_mid_epoch(trainer) and self.samples.continued:
            private_names.set_batches_done(trainer, self.samples.batches_done())
            if trainer.is_global_zero:  # Lightning does not know that the sampler has a state, and warns
                say("the epoch continues with the samples that have not been used: the loader is resumable")
        if self.samples.refusal and trainer.is_global_zero:
            say(self.samples.refusal)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.samples.step_done()
        if Feature.STEPS in self._features:
            client.report_step(trainer.global_step)

    def on_train_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        # Before anything of the script's: what it does from now on may make it skip this training when it is restarted.
        self.on_fit_end()

    def on_fit_end(self, *_: Any, **__: Any) -> None:
        # Without the hook before, if the checkpoint was that of the last step.
        self.samples.release()
        if self._training is not None:
            self._training.end()
        if self._copies is not None:
            self._copies.end()
            self._copies = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.samples.release()
        if self._training is not None:
            self._training.left_by(exception)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state: dict[str, Any] = {"world_size": trainer.world_size, "sampler": self.samples.state()}
        state["training"] = self._training.id if self._training is not None else None
        if self._at is not None:
            state["at"] = self._at
            state["validated"] = self._at == "step" and private_names.validated_last(trainer)
            state["random"] = self._random or random_states()
        checkpoint[STATE] = state

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(STATE, {})
        self.samples = Samples(self._restored)
        saved_in = self._restored.get("world_size", trainer.world_size)
        same_in_every_world = isinstance(trainer.limit_train_batches, int)
        if Feature.WORLD in self._features and "loops" in checkpoint and not same_in_every_world:
            batches = private_names.current_batches(checkpoint["loops"])
            translate_batches(batches, saved_in, trainer.world_size)

    # -- from adapted methods --------------------------------------------------------------------

    def take_validated(self) -> bool:
        """Return whether the step after which training was left had been validated; once."""
        validated, self._validated = self._validated, False
        return validated

    def after_step(self, trainer: Any, *, complete: bool, last: bool) -> None:
        """Leave on a notice after a batch within an epoch, or make a copy in memory if one is due.

        Args:
            trainer: whose batch it was.
            complete: no gradients are being accumulated.
            last: the training or the epoch ends; what is done then would be missing in a copy.
        """
        self.leave_on_notice(trainer, "step", complete=complete)
        if complete and not last and self._copies is not None and self._copies.is_due(trainer.global_step):
            self._at, self._random = "step", random_states()  # which all ranks have to come to
            self._copies.make(trainer.global_step, lambda: private_names.checkpoint_of(trainer))
            self._at, self._random = None, None

    def leave_on_notice(self, trainer: Any, at: str, *, complete: bool = True) -> None:
        """Leave on a notice, after a "step" or an "epoch" that is ``complete``."""
        notice = self._agreement.notice() if self._agreement is not None else None
        if notice is None or not complete:
            return
        self._at = at
        folder = folder_of_run(trainer.default_root_dir, STATE, client.current().run_id)
        path = f"{folder}/step-{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            private_names.after_saves(trainer, remove_others, folder, path)
            say(f"notice ({notice.reason}): saved step {trainer.global_step} to {path}; leaving")
        client.leave()

    def about_to_save(self, trainer: Any, path: Any) -> None:
        """Forget the checkpoint at this path, if there is one, before it is overwritten."""
        if self._training is not None:
            private_names.after_saves(trainer, _forget_folder, self._training, _absolute(path))

    def saved(self, trainer: Any, path: Any) -> None:
        """Record a checkpoint to resume from, which is complete, or being written in another thread."""
        if self._training is not None:
            added = self._training, _absolute(path), trainer.global_step
            private_names.after_saves(trainer, _add, *added)

    def begin_training(self, trainer: Any, named: Any) -> list[tuple[str, int]]:
        """Begin a training; return what to continue it from, best first, if it certainly is an earlier one.

        Args:
            trainer: whose ``fit`` it is.
            named: the checkpoint that the script names.

        Returns:
            Checkpoints, and the steps after which they were saved.
        """
        earlier: Checkpoints = {}
        copies_of = None
        if trainer.is_global_zero:
            facts = signature.described(private_names.signature_of, trainer)
            self._training = Training(trainer.default_root_dir, STATE, client.current().run_id, facts)
            if self._training.doubt and named is None:
                self._training.explain(REMEDY)
            elif not self._training.doubt:
                earlier = self._training.earlier
                for sentence in damaged(earlier):
                    say(sentence)
            if Feature.MEMORY in self._features:
                copies_of = self._training.id_of_copies(named, lambda: self._why_no_copies(trainer))
        # Rank 0's record, as the others may have begun to read it when it has been changed.
        recorded: Checkpoints
        recorded, copies_of = from_rank_0((earlier, copies_of))
        if copies_of is not None:
            from elastic_agent.survive.trainer import TrainingCopies  # only if it is used

            copies = TrainingCopies(copies_of)  # forgets those of another training
            self._copies = copies if copies_of else None
        readable = gathered([note_of(path) == size for path, (size, _) in recorded.items()])
        on_all = [path for path, *here in zip(recorded, *readable, strict=True) if all(here)]
        if trainer.is_global_zero:
            readable_by_some = [path for path, *here in zip(recorded, *readable, strict=True) if any(here)]
            _explain_choice(named, on_all, readable_by_some)
        return [(path, recorded[path][1]) for path in on_all[::-1]] if named is None else []

    def from_memory(self, than: int) -> dict[str, Any] | None:
        """Return the copy with which this training continues, if one is of a later step than ``than``."""
        found = self._copies.newest(than) if self._copies is not None else None
        self._continues = found is not None
        return found

    def _why_no_copies(self, trainer: Any) -> str:
        if not private_names.is_replicated(trainer):
            return f"{type(trainer.strategy).__name__} may divide the state among the workers"
        return "" if Feature.NOTICES in self._features else "they need the feature notices"

    def is_of_this_training(self, trainer: Any, path: str, checkpoint: dict[str, Any]) -> bool:
        """Return whether a checkpoint's content is of this training: other trainings may overwrite the file."""
        found = checkpoint.get(STATE, {}).get("training")
        self._continues = bool(from_rank_0(self._training is not None and found == self._training.id))
        if not self._continues and trainer.is_global_zero:
            say(f"checkpoint {path} is not used: another training has overwritten it")
        return self._continues

    def _compare(self, name: str, facts: Signature) -> None:
        """Complete the signature; end this worker if training continues from a checkpoint of another one."""
        differs = self._training.complete(name, facts) if self._training is not None else ""
        differs = from_rank_0(differs) if self._continues else ""
        if differs and self._training is not None:
            say(
                f"{differs} in the training whose checkpoint has been loaded: this worker ends, and training starts "
                f"as the script says when it is started again. To continue from the checkpoint: {REMEDY}"
            )
        if differs:
            sys.exit(1)


def _explain_choice(named: Any, on_all: list[str], readable_by_some: list[str]) -> None:
    if named is not None:
        if on_all and _absolute(named) != on_all[-1]:
            say(f"the script resumes from {named}; the run's newest checkpoint, {on_all[-1]}, is not used")
    elif readable_by_some and not on_all:
        say(
            f"training starts as the script says: not all workers can read {readable_by_some[-1]}; expected "
            "default_root_dir and the folders of checkpoints on storage that all nodes share"
        )


def _forget_folder(training: Training, path: str) -> None:
    # A mixture of old and new files can have the same size. A single file is good until it is replaced.
    fs, inside = filesystem_of(path)
    if fs.isdir(inside):
        training.forget(path)


def _add(training: Training, path: str, step: int) -> None:
    size = note_of(path)
    # Lightning's tuner restores the state before its trials from a file with such a name.
    if size is not None and not os.path.basename(path).startswith("."):
        training.add(path, size, step)


# -- notices ---------------------------------------------------------------------------------------


class PacedAgreement:
    """A ``client.Agreement`` that agrees at every n-th step, where n depends on the duration of a step."""

    def __init__(self) -> None:
        self._alone = client.current().placement.world_size == 1
        self._group = _group_in_main_memory()
        self._agreement = client.Agreement(self._group)
        self._steps = 0
        self._began_s = 0.0

    def notice(self) -> client.Notice | None:
        """Return the notice that all ranks know of, or None. Call it once a step, on every rank."""
        self._steps += 1
        if self._alone:
            return self._agreement.notice()
        if self._steps == 1:
            self._began_s = time.monotonic()
        elif self._steps == 1 + _MEASURED:
            step_s = (time.monotonic() - self._began_s) / _MEASURED
            every = from_rank_0(max(1, int(INTERVAL_S / max(step_s, 1e-4))), self._group)
            self._agreement = client.Agreement(self._group, every=every)
        return self._agreement.notice()


def _group_in_main_memory() -> Any:
    """Return a process group whose collectives do not wait for a GPU; None if the default group is one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if "cpu:" in dist.get_backend_config() or dist.get_backend() in ("gloo", "mpi"):
        return None
    return dist.new_group(backend="gloo")


# -- checkpoints, as they are now on storage -------------------------------------------------------


def note_of(path: str) -> int | None:
    """Return what is noted of a checkpoint: its size, the bytes of the file, or of all files in the folder.

    None if it cannot be read.
    """
    fs, inside = filesystem_of(path)
    try:
        fs.invalidate_cache(inside)  # another worker may have written it
        info = fs.info(inside)
        return int(fs.du(inside) if info["type"] == "directory" else info["size"] or 0)
    except OSError:
        return None


def damaged(checkpoints: Checkpoints) -> list[str]:
    """Return a sentence for each checkpoint of another size: its worker was killed while overwriting it."""
    found = ((path, recorded, note_of(path)) for path, (recorded, _) in checkpoints.items())
    return [
        f"checkpoint {path} has {size} bytes, expected {recorded} as when it was saved; it is not used"
        for path, recorded, size in found
        if size not in (None, recorded)
    ]


def remove_others(folder: str, newest: str) -> None:
    """Delete the checkpoints in the folder that were saved on earlier notices."""
    fs, inside = filesystem_of(folder)
    _, kept = filesystem_of(newest)
    for path in fs.glob(f"{inside}/step-*.ckpt"):
        if path != kept:
            fs.rm(path, recursive=True)


def _absolute(path: Any) -> str:
    """Return the path by which other processes find the checkpoint."""
    text: str = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)
