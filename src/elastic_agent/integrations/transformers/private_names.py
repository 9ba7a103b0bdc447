"""Every name of transformers that the integration replaces or depends on, beyond its documented interface."""

from __future__ import annotations

import functools
import sys
from typing import Any

from elastic_agent.integrations import patching
from elastic_agent.integrations.patching import Patch
from elastic_agent.integrations.say import say
from elastic_agent.integrations.transformers import checkpoints
from elastic_agent.integrations.transformers.features import Feature
from elastic_agent.worker_variables import TRANSFORMERS_DISABLE

TESTED = "5.23.0"
"""The version of transformers that the tests run with."""

ROOT = "transformers"
MODULE = "trainer"

_CALLBACK = "_elastic_agent_callback"
_POSITION = "_elastic_agent_position"


# -- the callback, and the checkpoint ------------------------------------------------------------


def _with_callback(original: Any) -> Any:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        _callback(self)
        return original(self, *args, **kwargs)

    return train


def _begin_training(original: Any) -> Any:
    @functools.wraps(original)
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        callback = _callback(self)
        callback.training, callback.continues = None, False
        if trial is None:  # a search for hyperparameters may take another course when it is repeated
            resume_from_checkpoint = callback.begin_training(self, resume_from_checkpoint)
        try:
            return original(self, resume_from_checkpoint, trial, *args, **kwargs)
        except BaseException as error:
            _callback(self).left_by(error)
            raise

    return train


def _end_training(original: Any) -> Any:
    @functools.wraps(original)
    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        _callback(self).end_training()
        return original(self, *args, **kwargs)

    return _finalize_training


# -- samples -------------------------------------------------------------------------------------


def _sample_independent_of_the_world(original: Any) -> Any:
    @functools.wraps(original)
    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        import torch
        from torch.utils.data import RandomSampler, SequentialSampler

        from elastic_agent.data import ElasticSampler
        from elastic_agent.integrations.transformers.position import Position

        sampler = original(self, train_dataset)
        seed, config = self.args.data_seed, self.args.accelerator_config
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

    return _get_train_sampler


def _remember_checkpoint(original: Any) -> Any:
    @functools.wraps(original)
    def _inner_training_loop(
        self: Any, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, **kwargs: Any
    ) -> Any:
        self._elastic_agent_checkpoint = resume_from_checkpoint
        return original(
            self, batch_size=batch_size, args=args, resume_from_checkpoint=resume_from_checkpoint, **kwargs
        )

    return _inner_training_loop


def _plan_the_rest(original: Any) -> Any:
    """The number of steps in the present world: those done, and those that the rest of the samples takes."""

    @functools.wraps(original)
    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> Any:
        epochs, steps_per_epoch, *between, max_steps = values = original(self, args, dataloader)
        callback = _callback(self)
        position = callback.position = _position_in(dataloader)
        if position is not None:
            position.use(dataloader)
            setattr(dataloader, _POSITION, position)
        checkpoint = self._elastic_agent_checkpoint
        if checkpoint is None:
            return values
        done = int(checkpoints.trainer_state(checkpoint).get("global_step", 0))
        saved = checkpoints.saved(checkpoint).get("position")
        if position is None or not saved or args.ignore_data_skip or done >= args.max_steps > 0:
            # At the last step, the Trainer takes another one if that was not the last step of an epoch.
            return (0, *values[1:]) if callback.continues and done >= max_steps else values
        rest = position.restore(saved, dataloader, args.gradient_accumulation_steps)
        if args.process_index == 0:
            _report_misfit(position.misfit(saved), checkpoint, rest.epoch)
        if args.max_steps > 0:
            epochs = rest.epoch + 2 + (max_steps - done) // steps_per_epoch
        else:
            accumulation = args.gradient_accumulation_steps
            left = (args.num_train_epochs - rest.epoch) * steps_per_epoch - rest.batches_done // accumulation
            epochs = epochs if left > 0 else rest.epoch
            max_steps = done + max(0, int(-(-left // 1)))
        return (epochs, steps_per_epoch, *between, max_steps)

    return set_initial_training_values


def _report_misfit(misfit: str, checkpoint: str, epoch: int) -> None:
    if misfit:
        what = f"{checkpoint} has the position in other training data ({misfit})"
        say(f"{what}: starting epoch {epoch} from its beginning")


def _position_in(dataloader: Any) -> Any:
    """That of the loader's sampler; None if it is another sampler, or Accelerate does not divide the batches."""
    batches = getattr(dataloader, "batch_sampler", None) if hasattr(dataloader, "total_batch_size") else None
    batches = getattr(batches, "batch_sampler", batches)  # those of all ranks
    return getattr(getattr(batches, "sampler", None), _POSITION, None)


def _resume_at_position(original: Any) -> Any:
    @functools.wraps(original)
    def _init_training_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        trained = original(self, *args, **kwargs)
        callback = _callback(self)
        self.state.stateful_callbacks.setdefault(type(callback).__name__, {})  # absent in others' checkpoints
        position = callback.position
        if position is None:
            return trained
        if position.rest is None:  # the Trainer's own numbers, if the checkpoint has no position
            position.skip(*trained)
            return trained
        return position.rest.epoch, position.rest.batches_done

    return _init_training_state


def _train_the_rest(original: Any) -> Any:
    @functools.wraps(original)
    def _run_epoch(self: Any, **kwargs: Any) -> Any:
        position = _callback(self).position
        if position is not None:
            position.sampler.set_epoch(kwargs["epoch"])
            rest = position.rest
            if rest is not None and rest.epoch == kwargs["epoch"]:
                kwargs["steps_in_epoch"] = rest.batches_in_epoch
                kwargs["num_update_steps_per_epoch"] = rest.steps_in_epoch
        return original(self, **kwargs)

    return _run_epoch


def _skip_nothing(original: Any) -> Any:
    """The sampler starts with the first sample that is not finished."""

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        elastic = hasattr(dataloader, _POSITION)
        return dataloader if elastic else original(dataloader, num_batches)

    return skip_first_batches


def _callback(trainer: Any) -> Any:
    """Of this trainer; added if it has none."""
    from elastic_agent.integrations.transformers.callback import ElasticCallback

    found = [one for one in trainer.callback_handler.callbacks if isinstance(one, ElasticCallback)]
    if not found:
        trainer.add_callback(ElasticCallback)
        return _callback(trainer)
    known = getattr(trainer, _CALLBACK, found[0])
    if known is not found[0]:  # transformers has restored another one from a checkpoint
        found[0].position, found[0].training = known.position, known.training
        found[0].continues = known.continues
    setattr(trainer, _CALLBACK, found[0])
    return found[0]


# -- all of it -----------------------------------------------------------------------------------

_TRAIN = ("trial:", "ignore_keys_for_eval", "_inner_training_loop")

PATCHES = (
    Patch(None, MODULE, "Trainer.train", _with_callback, _TRAIN),
    Patch(Feature.RESUME, MODULE, "Trainer.train", _begin_training, _TRAIN),
    Patch(Feature.RESUME, MODULE, "Trainer._finalize_training", _end_training, ("on_train_end(",)),
    Patch(
        None,
        MODULE,
        "Trainer._save_checkpoint",
        None,
        ("cb.state()", "save_to_json", "self.state.stateful_callbacks[cb_name]"),
    ),
    Patch(
        None,
        MODULE,
        "Trainer._maybe_log_save_evaluate",
        None,
        ("self.control.should_save", "callback_handler.on_save"),
    ),
    Patch(
        Feature.SAMPLES,
        MODULE,
        "Trainer._get_train_sampler",
        _sample_independent_of_the_world,
        ("RandomSampler(",),
    ),
    Patch(
        Feature.SAMPLES,
        MODULE,
        "Trainer._inner_training_loop",
        _remember_checkpoint,
        (
            "self.set_initial_training_values(args, train_dataloader)",
            "range(epochs_trained, num_train_epochs)",
            "num_update_steps_per_epoch=num_update_steps_per_epoch",
            "steps_in_epoch=steps_in_epoch",
        ),
    ),
    Patch(
        Feature.SAMPLES,
        MODULE,
        "Trainer.set_initial_training_values",
        _plan_the_rest,
        ("math.ceil(args.num_train_epochs * num_update_steps_per_epoch)", "max_steps,\n        )"),
    ),
    Patch(
        Feature.SAMPLES,
        MODULE,
        "Trainer._init_training_state",
        _resume_at_position,
        ("return epochs_trained, steps_trained_in_current_epoch",),
    ),
    Patch(
        Feature.SAMPLES,
        MODULE,
        "Trainer._run_epoch",
        _train_the_rest,
        (
            "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)",
            "range(num_update_steps_trained, num_update_steps_per_epoch)",
            "step = steps_trained_in_current_epoch - 1",
            "(step + 1) == steps_in_epoch",
        ),
    ),
    Patch(Feature.SAMPLES, MODULE, "skip_first_batches", _skip_nothing),
)

_in_force: list[frozenset[Feature]] = []


def adapt() -> frozenset[Feature]:
    """Replace what the features need, once, and return the features in force."""
    if not _in_force:
        features = patching.wanted(TRANSFORMERS_DISABLE, Feature)
        versions = str(sys.modules[ROOT].__version__), TESTED
        unfit = patching.apply(ROOT, versions, PATCHES, features)
        _in_force.append(frozenset(feature for feature in Feature if feature in features - unfit))
    return _in_force[0]
