"""Every name of transformers that the integration replaces or depends on, beyond its documented interface."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Any

from elastic_agent.integrations.patching import Patches, say, wanted
from elastic_agent.integrations.transformers.position import Position, saved, trainer_state
from elastic_agent.worker_variables import TRANSFORMERS_DISABLE

TESTED = "5.23.0"
"""The version of transformers that the tests run with."""

ROOT = "transformers"
PATCHES = Patches()

_CALLBACK = "_elastic_agent_callback"
_POSITION = "_elastic_agent_position"


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_TRANSFORMERS_DISABLE``."""

    STEPS = "steps"
    """Report each training step to the agent."""

    NOTICES = "notices"
    """On a notice, save one checkpoint at a step that all ranks agree on, and leave."""

    RESUME = "resume"
    """Continue a training from its newest checkpoint, if it is certainly the same and the script names none."""

    MEMORY = "memory"
    """Continue from copies in memory that are newer than the checkpoint, with ``--survive memory`` or ``keep``."""

    SAMPLES = "samples"
    """Use each sample once per epoch, also when the number of workers changes."""


# -- the callback, and the checkpoint ------------------------------------------------------------

_TRAIN = ("trial:", "ignore_keys_for_eval", "_inner_training_loop")


@PATCHES.replace(None, "trainer:Trainer.train", *_TRAIN)
def _with_callback(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    _callback(trainer)
    return original(trainer, *args, **kwargs)


@PATCHES.replace(Feature.RESUME, "trainer:Trainer.train", *_TRAIN)
def _begin_training(
    original: Any,
    trainer: Any,
    resume_from_checkpoint: Any = None,
    trial: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    callback = _callback(trainer)
    callback.training, callback.memory, callback.continues = None, None, False
    if trial is None:  # a search for hyperparameters may take another course when it is repeated
        resume_from_checkpoint = callback.begin_training(trainer, resume_from_checkpoint)
    try:
        return original(trainer, resume_from_checkpoint, trial, *args, **kwargs)
    except BaseException as error:
        _callback(trainer).left_by(error)
        raise


@PATCHES.replace(Feature.RESUME, "trainer:Trainer._finalize_training", "on_train_end(")
def _end_training(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    _callback(trainer).end_training()
    return original(trainer, *args, **kwargs)


PATCHES.need(
    None,
    "trainer:Trainer._save_checkpoint",
    *("cb.state()", "save_to_json", "self.state.stateful_callbacks[cb_name]"),
)
PATCHES.need(
    None,
    "trainer:Trainer._maybe_log_save_evaluate",
    *("self.control.should_save", "callback_handler.on_save"),
)


# -- copies in memory ----------------------------------------------------------------------------


_OF_CHECKPOINTS = (
    "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state",
)  # fmt: skip
"""Methods of the ``Trainer`` that a copy in memory takes the place of."""


def why_not_in_memory(trainer: Any) -> str:
    """Return why there can be no copies of this training; empty if there can be."""
    known = sys.modules[f"{ROOT}.trainer"].Trainer
    own = [
        name
        for name in _OF_CHECKPOINTS
        if getattr(type(trainer), name, None) is not getattr(known, name, None)
    ]
    if own:
        return f"{type(trainer).__name__} has its own {own[0]}"
    if trainer.args.auto_find_batch_size:
        return "auto_find_batch_size may begin the training again"
    kind = trainer.accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        return f"{kind} may divide the state among the workers"
    return ""


@PATCHES.replace(Feature.MEMORY, "trainer:Trainer._maybe_log_save_evaluate")
def _copy_after_step(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(trainer, *args, **kwargs)
    memory = _callback(trainer).memory
    if memory is not None:
        memory.step_done(trainer)
    return result


def _from_memory(original: Any, trainer: Any, checkpoint: Any, take: str, *args: Any, **kwargs: Any) -> Any:
    """Call this method of the copies in memory if the checkpoint is one; else do what transformers does."""
    memory = _callback(trainer).memory
    if memory is not None and checkpoint is not None and checkpoint == memory.checkpoint:
        return getattr(memory, take)(trainer)
    return original(trainer, checkpoint, *args, **kwargs)


@PATCHES.replace(Feature.MEMORY, "trainer:Trainer._load_from_checkpoint", "resume_from_checkpoint: str")
def _load_model(original: Any, trainer: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    return _from_memory(original, trainer, resume_from_checkpoint, "load_model", *args, **kwargs)


@PATCHES.replace(Feature.MEMORY, "trainer:Trainer._load_optimizer_and_scheduler", "checkpoint: str | None")
def _load_optimizer(original: Any, trainer: Any, checkpoint: Any) -> Any:
    return _from_memory(original, trainer, checkpoint, "load_optimizer")


@PATCHES.replace(Feature.MEMORY, "trainer:Trainer._load_rng_state", "checkpoint: str | None")
def _load_random_state(original: Any, trainer: Any, checkpoint: Any) -> Any:
    return _from_memory(original, trainer, checkpoint, "load_random_state")


# -- samples -------------------------------------------------------------------------------------


@PATCHES.replace(Feature.SAMPLES, "trainer:Trainer._get_train_sampler", "RandomSampler(")
def _sample_independent_of_the_world(original: Any, trainer: Any, train_dataset: Any = None) -> Any:
    import torch
    from torch.utils.data import RandomSampler, SequentialSampler

    from elastic_agent.data import ElasticSampler

    sampler = original(trainer, train_dataset)
    seed, config = trainer.args.data_seed, trainer.args.accelerator_config
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.generator is not None or not config.use_seedable_sampler:
            return sampler
    elif type(sampler) is not SequentialSampler:
        return sampler
    # Accelerate divides the batches among the ranks. Its own sampler takes the same seed, and gives the same order.
    elastic = ElasticSampler(
        sampler.data_source,
        num_replicas=1,
        rank=0,
        shuffle=type(sampler) is RandomSampler,
        seed=torch.initial_seed() if seed is None else seed,
    )
    setattr(elastic, _POSITION, Position(elastic))  # training may not be what requests the sampler
    return elastic


@PATCHES.replace(
    Feature.SAMPLES,
    "trainer:Trainer._inner_training_loop",
    "self.set_initial_training_values(args, train_dataloader)",
    "range(epochs_trained, num_train_epochs)",
    "num_update_steps_per_epoch=num_update_steps_per_epoch",
    "steps_in_epoch=steps_in_epoch",
)
def _remember_checkpoint(
    original: Any,
    trainer: Any,
    batch_size: Any = None,
    args: Any = None,
    resume_from_checkpoint: Any = None,
    **kwargs: Any,
) -> Any:
    trainer._elastic_agent_checkpoint = resume_from_checkpoint
    return original(
        trainer, batch_size=batch_size, args=args, resume_from_checkpoint=resume_from_checkpoint, **kwargs
    )


@PATCHES.replace(
    Feature.SAMPLES,
    "trainer:Trainer.set_initial_training_values",
    *("math.ceil(args.num_train_epochs * num_update_steps_per_epoch)", "max_steps,\n        )"),
)
def _plan_the_rest(original: Any, trainer: Any, args: Any, dataloader: Any) -> Any:
    """Return the number of steps in the present world: those done, and those that the rest of the samples takes."""
    epochs, steps_per_epoch, *between, max_steps = values = original(trainer, args, dataloader)
    callback = _callback(trainer)
    position = callback.position = _position_in(dataloader)
    if position is not None:
        position.use(dataloader)
        setattr(dataloader, _POSITION, position)
    checkpoint = trainer._elastic_agent_checkpoint
    if checkpoint is None:
        return values
    done = int(trainer_state(checkpoint).get("global_step", 0))
    restored = saved(checkpoint).get("position")
    if position is None or not restored or args.ignore_data_skip or done >= args.max_steps > 0:
        # At the last step, the Trainer takes another one if that was not the last step of an epoch.
        return (0, *values[1:]) if callback.continues and done >= max_steps else values
    rest = position.restore(restored, dataloader, args.gradient_accumulation_steps)
    misfit = position.misfit(restored)
    if misfit and args.process_index == 0:
        cause = f"{checkpoint} has the position in other training data ({misfit})"
        say(f"{cause}: starting epoch {rest.epoch} from its beginning")
    if args.max_steps > 0:
        epochs = rest.epoch + 2 + (max_steps - done) // steps_per_epoch
    else:
        accumulation = args.gradient_accumulation_steps
        steps_left = (
            args.num_train_epochs - rest.epoch
        ) * steps_per_epoch - rest.batches_done // accumulation
        epochs = epochs if steps_left > 0 else rest.epoch
        max_steps = done + max(0, int(-(-steps_left // 1)))
    return (epochs, steps_per_epoch, *between, max_steps)


def _position_in(dataloader: Any) -> Any:
    """Return the position of the loader's sampler; None: another sampler, or Accelerate does not divide the batches."""
    batches = getattr(dataloader, "batch_sampler", None) if hasattr(dataloader, "total_batch_size") else None
    batches = getattr(batches, "batch_sampler", batches)  # those of all ranks
    return getattr(getattr(batches, "sampler", None), _POSITION, None)


@PATCHES.replace(
    Feature.SAMPLES,
    "trainer:Trainer._init_training_state",
    "return epochs_trained, steps_trained_in_current_epoch",
)
def _resume_at_position(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    trained = original(trainer, *args, **kwargs)
    callback = _callback(trainer)
    trainer.state.stateful_callbacks.setdefault(type(callback).__name__, {})  # absent in others' checkpoints
    position = callback.position
    if position is None:
        return trained
    if position.rest is None:  # the Trainer's own numbers, if the checkpoint has no position
        position.skip(*trained)
        return trained
    return position.rest.epoch, position.rest.batches_done


@PATCHES.replace(
    Feature.SAMPLES,
    "trainer:Trainer._run_epoch",
    "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)",
    "range(num_update_steps_trained, num_update_steps_per_epoch)",
    "step = steps_trained_in_current_epoch - 1",
    "(step + 1) == steps_in_epoch",
)
def _train_the_rest(original: Any, trainer: Any, **kwargs: Any) -> Any:
    position = _callback(trainer).position
    if position is not None:
        position.sampler.set_epoch(kwargs["epoch"])
        rest = position.rest
        if rest is not None and rest.epoch == kwargs["epoch"]:
            kwargs["steps_in_epoch"] = rest.batches_in_epoch
            kwargs["num_update_steps_per_epoch"] = rest.steps_in_epoch
    return original(trainer, **kwargs)


@PATCHES.replace(Feature.SAMPLES, "trainer:skip_first_batches")
def _skip_nothing(original: Any, dataloader: Any, num_batches: int = 0) -> Any:
    """Leave the loader as it is: the sampler starts with the first sample that is not finished."""
    elastic = hasattr(dataloader, _POSITION)
    return dataloader if elastic else original(dataloader, num_batches)


def _callback(trainer: Any) -> Any:
    """Return the callback of this trainer; add it if it has none."""
    from elastic_agent.integrations.transformers.callback import ElasticCallback

    callbacks = trainer.callback_handler.callbacks
    found = next((callback for callback in callbacks if isinstance(callback, ElasticCallback)), None)
    if found is None:
        trainer.add_callback(ElasticCallback)
        return _callback(trainer)
    known = getattr(trainer, _CALLBACK, found)
    if known is not found:  # transformers has restored another one from a checkpoint
        found.position, found.training = known.position, known.training
        found.memory, found.continues = known.memory, known.continues
    setattr(trainer, _CALLBACK, found)
    return found


# -- all of it -----------------------------------------------------------------------------------

_in_force: list[frozenset[Feature]] = []


def adapt() -> frozenset[Feature]:
    """Replace what the features need, once, and return the features in force."""
    if not _in_force:
        versions = str(sys.modules[ROOT].__version__), TESTED
        _in_force.append(PATCHES.apply(ROOT, versions, wanted(TRANSFORMERS_DISABLE, Feature)))
    return _in_force[0]
