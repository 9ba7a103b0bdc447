"""Every name of transformers that the integration replaces or depends on, beyond its documented interface.

:func:`missing` reports what a new version of transformers has changed; a test calls it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_agent import client
from elastic_agent.integrations.inspection import Versions, source_of
from elastic_agent.integrations.say import say
from elastic_agent.integrations.transformers import checkpoints
from elastic_agent.integrations.transformers.features import Feature

TESTED = Versions((5, 23), (6, 0))
"""The versions of transformers that this module is tested with."""

MODULE = "transformers.trainer"

_TRAININGS = itertools.count()
"""Calls of ``train`` in this process: the n-th resumes from checkpoints of the n-th."""

_ADAPTED = "_elastic_agent_adapted"
_CALLBACK = "_elastic_agent_callback"
_POSITION = "_elastic_agent_position"


@dataclass(frozen=True)
class Adaptation:
    """One function that is replaced: a method of ``Trainer``, or a name in its module."""

    feature: Feature | None
    """None: required by all of them."""
    name: str
    replace: Callable[[Any], Any]
    """Gets the present function, returns its replacement."""
    needed: tuple[str, ...] = ()
    """What its source has to contain."""


# -- the callback, and the checkpoint ------------------------------------------------------------


def _begin(original: Any) -> Any:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        _callback(self).training = next(_TRAININGS)
        return original(self, *args, **kwargs)

    return train


def _resume(original: Any) -> Any:
    @functools.wraps(original)
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if resume_from_checkpoint is None and trial is None:
            resume_from_checkpoint = _newest_checkpoint(self.args, _callback(self).training)
        return original(self, resume_from_checkpoint, trial, *args, **kwargs)

    return train


def _newest_checkpoint(args: Any, training: int) -> str | None:
    """As found by rank 0, so that all ranks resume from the same."""
    import torch.distributed as dist

    found: list[str | None] = [None]
    if args.process_index == 0:
        found = [checkpoints.newest_of_run(args.output_dir, client.current().run_id, training)]
        for sentence in checkpoints.unreadable(args.output_dir, newer_than=found[0]):
            say(sentence)
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    if found[0] is not None and args.process_index == 0:
        say(f"resuming from {found[0]}")
    return found[0]


# -- samples -------------------------------------------------------------------------------------


def _sample_independent_of_the_world(original: Any) -> Any:
    @functools.wraps(original)
    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        from torch.utils.data import RandomSampler, SequentialSampler

        from elastic_agent.data import ElasticSampler
        from elastic_agent.integrations.transformers.position import Position

        sampler = original(self, train_dataset)
        if type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
            return sampler
        args = self.args
        elastic = ElasticSampler(
            sampler.data_source,
            num_replicas=1,  # Accelerate divides the batches among the ranks
            rank=0,
            shuffle=type(sampler) is RandomSampler,
            seed=args.seed if args.data_seed is None else args.data_seed,
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
        values = original(self, args, dataloader)
        callback = _callback(self)
        position = callback.position = _position_in(dataloader)
        if position is None:
            return values
        position.use(dataloader)
        setattr(dataloader, _POSITION, position)
        checkpoint = self._elastic_agent_checkpoint
        saved = checkpoints.saved(checkpoint).get("position") if checkpoint is not None else None
        if not saved or args.ignore_data_skip:
            return values
        epochs, steps_per_epoch, *between, max_steps = values
        rest = position.restore(saved, dataloader, args.gradient_accumulation_steps)
        if args.process_index == 0:
            _report_misfit(position.misfit(saved), checkpoint, rest.epoch)
        done = int(checkpoints.trainer_state(checkpoint)["global_step"])
        if args.max_steps > 0:
            epochs = rest.epoch + 2 + max(0, max_steps - done) // steps_per_epoch
        else:
            accumulation = args.gradient_accumulation_steps
            left = (args.num_train_epochs - rest.epoch) * steps_per_epoch - rest.batches_done // accumulation
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
    setattr(trainer, _CALLBACK, found[0])
    return found[0]


# -- all of it -----------------------------------------------------------------------------------

ADAPTATIONS = (
    Adaptation(
        Feature.RESUME, "Trainer.train", _resume, ("trial:", "ignore_keys_for_eval", "_inner_training_loop")
    ),
    Adaptation(None, "Trainer.train", _begin),
    Adaptation(
        Feature.SAMPLES, "Trainer._get_train_sampler", _sample_independent_of_the_world, ("RandomSampler(",)
    ),
    Adaptation(
        Feature.SAMPLES,
        "Trainer._inner_training_loop",
        _remember_checkpoint,
        (
            "self.set_initial_training_values(args, train_dataloader)",
            "range(epochs_trained, num_train_epochs)",
            "num_update_steps_per_epoch=num_update_steps_per_epoch",
            "steps_in_epoch=steps_in_epoch",
        ),
    ),
    Adaptation(
        Feature.SAMPLES,
        "Trainer.set_initial_training_values",
        _plan_the_rest,
        ("math.ceil(args.num_train_epochs * num_update_steps_per_epoch)", "max_steps,\n        )"),
    ),
    Adaptation(
        Feature.SAMPLES,
        "Trainer._init_training_state",
        _resume_at_position,
        ("return epochs_trained, steps_trained_in_current_epoch",),
    ),
    Adaptation(
        Feature.SAMPLES,
        "Trainer._run_epoch",
        _train_the_rest,
        (
            "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)",
            "range(num_update_steps_trained, num_update_steps_per_epoch)",
            "step = steps_trained_in_current_epoch - 1",
            "(step + 1) == steps_in_epoch",
        ),
    ),
    Adaptation(Feature.SAMPLES, "skip_first_batches", _skip_nothing),
)

_NEEDED_IN_SOURCE = (
    ("Trainer._save_checkpoint", ("cb.state()", "save_to_json", "self.state.stateful_callbacks[cb_name]")),
    ("Trainer._maybe_log_save_evaluate", ("self.control.should_save", "callback_handler.on_save")),
)


def apply(features: frozenset[Feature]) -> list[str] | None:
    """Replace what the features require; sentences about what is not as expected. None if it was done before."""
    module = importlib.import_module(MODULE)
    if getattr(module, _ADAPTED, False):
        return None
    found = importlib.import_module("transformers").__version__
    problems = [] if found in TESTED else missing()
    if problems:
        problems = [
            f"the integration does not fit transformers {found} (expected {TESTED}), so it is disabled: "
            + "; ".join(problems)
        ]
    else:
        for one in ADAPTATIONS:
            if one.feature is None or one.feature in features:
                owner, name = _owner(one.name)
                setattr(owner, name, one.replace(getattr(owner, name)))
    setattr(module, _ADAPTED, True)
    return problems


def missing() -> list[str]:
    """How the transformers that is installed differs from what this module needs; each entry is a sentence."""
    needed = [(one.name, one.needed) for one in ADAPTATIONS] + list(_NEEDED_IN_SOURCE)
    problems = []
    for name, texts in needed:
        source = source_of(MODULE, name)
        if not source:
            problems.append(f"{MODULE}.{name} no longer exists")
        else:
            problems += [
                f"{MODULE}.{name} no longer contains {text!r}" for text in texts if text not in source
            ]
    return problems


def _owner(path: str) -> tuple[Any, str]:
    owner: Any = importlib.import_module(MODULE)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name
