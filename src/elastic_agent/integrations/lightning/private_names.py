"""Every private name of Lightning that the integration uses, and the methods that it replaces.

Lightning exists twice: ``lightning`` contains ``lightning.fabric`` and ``lightning.pytorch``; ``lightning_fabric`` and
``pytorch_lightning`` are the same code under other names. Whatever of them is loaded is adapted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

from elastic_agent.integrations import signature
from elastic_agent.integrations.patching import Patches, wanted
from elastic_agent.integrations.signature import Signature
from elastic_agent.worker_variables import LIGHTNING_DISABLE

TESTED = "2.6.6"
"""The version of Lightning that the tests run with."""

FABRICS = ("lightning.fabric", "lightning_fabric")
PYTORCHES = ("lightning.pytorch", "pytorch_lightning")

FABRIC, PYTORCH = Patches(), Patches()
"""Of these packages."""

_EPOCH_LOOP = "loops.training_epoch_loop:_TrainingEpochLoop"

_SETTINGS = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "overfit_batches", "precision",
)  # fmt: skip
"""The attributes of a ``Trainer`` on which the weights depend, and which do not depend on the nodes."""


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_LIGHTNING_DISABLE``."""

    WORLD = "world"
    """Take the number of workers and nodes from the world, not from the script."""

    STEPS = "steps"
    """Report each training step to the agent."""

    NOTICES = "notices"
    """On a notice, save one checkpoint at a step that all ranks agree on, and leave."""

    RESUME = "resume"
    """Continue a training from its newest checkpoint, if it is certainly the same and the script names none."""

    MEMORY = "memory"
    """Continue from copies in memory that are newer than the checkpoint, with ``--survive memory`` or ``keep``."""

    SAMPLER = "sampler"
    """Continue an epoch with the samples that have not been used, also in a world of another size."""

    SIGNALS = "signals"
    """Install no signal handlers, broadcast no SIGTERM flag, and ignore Slurm: the agent does all of this."""


# -- the world -----------------------------------------------------------------------------------


@FABRIC.replace(
    Feature.WORLD,
    "plugins.environments.torchelastic:TorchElasticEnvironment.validate_settings",
    "ValueError",
)
def _accept_any_world_size(original: Any, environment: Any, num_devices: int, num_nodes: int) -> None:
    """Accept any: nodes may have different numbers of workers, and the world changes."""


@FABRIC.replace(Feature.WORLD, "strategies.ddp:DDPStrategy.distributed_sampler_kwargs")
@FABRIC.replace(Feature.WORLD, "strategies.fsdp:FSDPStrategy.distributed_sampler_kwargs")
@PYTORCH.replace(Feature.WORLD, "strategies.ddp:DDPStrategy.distributed_sampler_kwargs")
@PYTORCH.replace(Feature.WORLD, "strategies.fsdp:FSDPStrategy.distributed_sampler_kwargs")
def _world_of_sampler(original: Any, strategy: Any) -> dict[str, Any]:
    return {"num_replicas": strategy.world_size, "rank": strategy.global_rank}


@PYTORCH.replace(Feature.WORLD, "trainer.connectors.data_connector:_DataConnector.on_trainer_init")
def _set_devices_before_dataloaders(original: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
    # The first thing that a Trainer does after it has loaded the callbacks.
    fit_to_world(connector.trainer._accelerator_connector)
    return original(connector, *args, **kwargs)


@FABRIC.replace(Feature.WORLD, "fabric:Fabric._prepare_run_method")
def _set_devices_before_launch(original: Any, fabric: Any) -> Any:
    # The first thing that a Fabric does after it has loaded the callbacks.
    fit_to_world(fabric._connector)
    fabric._strategy = fabric._connector.strategy
    fabric._accelerator = fabric._connector.accelerator
    return original(fabric)


def fit_to_world(connector: Any) -> None:
    """Replace the number of devices and nodes that the script gave by those of the launcher.

    A connector has made its strategy by now. It is connected again, and replaced if it is one for a single process.
    """
    connector._num_nodes_flag = int(os.environ["GROUP_WORLD_SIZE"])
    connector._parallel_devices = _devices_of_this_node(connector)
    _use_launchers_environment(connector)
    if hasattr(connector.strategy, "parallel_devices"):
        connector.strategy.parallel_devices = connector._parallel_devices
    elif int(os.environ["WORLD_SIZE"]) > 1:
        connector._strategy_flag = "ddp"
        connector._init_strategy()
    else:
        return
    connector._lazy_init_strategy()


def _devices_of_this_node(connector: Any) -> list[Any]:
    devices: list[Any] = connector._parallel_devices
    workers = int(os.environ["LOCAL_WORLD_SIZE"])
    if len(devices) >= workers:
        return devices[:workers]
    accelerator = type(connector.accelerator)
    if devices and getattr(devices[0], "type", "") != "cpu":
        # With --virtual-local-rank, each worker sees one device.
        workers = max(int(os.environ["LOCAL_RANK"]) + 1, min(workers, accelerator.auto_device_count()))
    found: list[Any] = accelerator.get_parallel_devices(accelerator.parse_devices(workers))
    return found


def _use_launchers_environment(connector: Any) -> None:
    """Replace Lightning's other environments, such as a ``SLURMEnvironment`` that the script made."""
    environment = type(connector.cluster_environment)
    package = environment.__module__.rpartition(".")[0]
    if not package.endswith("fabric.plugins.environments"):
        return  # the script's own
    elastic = importlib.import_module(f"{package}.torchelastic").TorchElasticEnvironment
    if environment is not elastic:
        connector.cluster_environment = elastic()
        if hasattr(connector.strategy, "cluster_environment"):
            connector.strategy.cluster_environment = connector.cluster_environment


# -- signals -------------------------------------------------------------------------------------

_SIGNAL_CONNECTOR = "trainer.connectors.signal_connector:_SignalConnector"


@PYTORCH.replace(Feature.SIGNALS, f"{_SIGNAL_CONNECTOR}.register_signal_handlers")
def _register_no_signal_handlers(original: Any, connector: Any) -> None:
    """Leave signals to the agent: Lightning's handler broadcasts, and hangs if a peer has died."""
    connector.received_sigterm = False
    connector._original_handlers = {}


@PYTORCH.replace(Feature.SIGNALS, f"{_EPOCH_LOOP}._broadcast_sigterm_tensor")
def _broadcast_no_sigterm(original: Any, loop: Any) -> None:
    """Broadcast nothing: there is no handler that could have set the flag."""


@FABRIC.replace(Feature.SIGNALS, "plugins.environments.slurm:SLURMEnvironment.detect")
def _detect_no_slurm(original: Any) -> bool:
    return False


# -- notices -------------------------------------------------------------------------------------


@PYTORCH.replace(Feature.NOTICES, f"{_EPOCH_LOOP}.on_advance_end", "self._skip_next_val")
def _leave_after_step(original: Any, loop: Any, data_fetcher: Any) -> None:
    hooks = hooks_of(loop.trainer)
    if hooks is not None and hooks.take_validated() and loop._skip_next_val:
        loop._skip_next_val = False  # this step's end was reached before the checkpoint was saved
        return
    original(loop, data_fetcher)
    if hooks is not None and not loop._num_ready_batches_reached():
        hooks.after_step(loop.trainer, complete=not loop._should_accumulate(), last=loop.done)


@PYTORCH.replace(Feature.NOTICES, "loops.fit_loop:_FitLoop.on_advance_end")
def _leave_after_epoch(original: Any, loop: Any) -> None:
    original(loop)
    hooks = hooks_of(loop.trainer)
    if hooks is not None:
        hooks.leave_on_notice(loop.trainer, "epoch")


# -- checkpoints ---------------------------------------------------------------------------------

_CHECKPOINTS = "trainer.connectors.checkpoint_connector:_CheckpointConnector"


@PYTORCH.replace(Feature.RESUME, f"{_CHECKPOINTS}._select_ckpt_path")
def _remember_ckpt_path_last(
    original: Any, connector: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any
) -> Any:
    connector._elastic_agent_wants_last = ckpt_path == "last"
    return original(connector, state_fn, ckpt_path, *args, **kwargs)


@PYTORCH.replace(Feature.RESUME, f"{_CHECKPOINTS}.resume_start")
def _continue_training(
    original: Any, connector: Any, checkpoint_path: Any = None, weights_only: bool | None = None
) -> None:
    trainer = connector.trainer
    hooks = hooks_of(trainer)
    if hooks is not None and trainer.state.fn == "fit" and not is_trial(trainer):
        # "last" is a choice of Lightning's, which does not know of the checkpoints that were saved on a notice.
        wants_last = getattr(connector, "_elastic_agent_wants_last", False)
        named = None if wants_last else checkpoint_path
        checkpoints = hooks.begin_training(trainer, named)
        newest_step = checkpoints[0][1] if checkpoints else 0
        if (copy := hooks.from_memory(newest_step)) is not None:
            original(connector)
            connector._loaded_checkpoint = copy
            return
        for newest, _ in checkpoints:
            # The run's own workers saved it, whatever objects the script puts into its checkpoints.
            original(connector, newest, False)
            if hooks.is_of_this_training(trainer, newest, connector._loaded_checkpoint):
                return
        connector._loaded_checkpoint = {}
    original(connector, checkpoint_path, weights_only)


@PYTORCH.replace(
    Feature.RESUME, "trainer.trainer:Trainer.save_checkpoint", "filepath", "weights_only", "strategy.barrier"
)
def _record_checkpoint(
    original: Any,
    trainer: Any,
    filepath: Any,
    weights_only: bool | None = None,
    storage_options: Any = None,
) -> None:
    hooks = hooks_of(trainer) if trainer.state.fn == "fit" else None
    if hooks is not None:
        hooks.about_to_save(trainer, filepath)
    original(trainer, filepath, weights_only, storage_options)
    if hooks is not None and not weights_only:
        hooks.saved(trainer, filepath)


def checkpoint_of(trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint contains now. All ranks call it, as hooks of the script may communicate."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(False)
    return checkpoint


def is_replicated(trainer: Any) -> bool:
    """Return whether each rank has the whole state of the training, which it returns without the others."""
    strategy = type(trainer.strategy)
    is_known = strategy.__module__.endswith(("strategies.ddp", "strategies.single_device"))
    return is_known and not any(hasattr(each, "consolidate_state_dict") for each in trainer.optimizers)


def after_saves(trainer: Any, call: Callable[..., None], *arguments: Any) -> None:
    """Call it when all saves that were begun are complete: now, except with an ``AsyncCheckpointIO``."""
    saving = trainer.strategy.checkpoint_io
    executor = getattr(saving, "_executor", None)
    if executor is None:
        call(*arguments)
    else:  # it has one thread, which does one thing after the other
        executor.submit(lambda: call(*arguments) if getattr(saving, "_error", None) is None else None)


# -- samples -------------------------------------------------------------------------------------


@PYTORCH.replace(
    Feature.SAMPLER,
    "loops.fit_loop:_FitLoop.setup_data",
    "self._combined_loader is not None and not self._should_reload_train_dl",
)
def _release_samplers(original: Any, loop: Any) -> None:
    hooks = hooks_of(loop.trainer)
    if hooks is not None and (loop._combined_loader is None or loop._should_reload_train_dl):
        hooks.samples.release()
    original(loop)


@PYTORCH.replace(
    Feature.SAMPLER,
    "trainer.connectors.data_connector:_DataConnector._prepare_dataloader",
    "dataloader: object, shuffle: bool, mode: RunningStage",
    "_update_dataloader(dataloader, sampler, mode=mode)",
)
def _use_each_sample_once(original: Any, connector: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
    trainer = connector.trainer
    hooks = hooks_of(trainer)
    if hooks is not None and mode == "train" and trainer._accelerator_connector.use_distributed_sampler:
        distributed = trainer._accelerator_connector.is_distributed
        sampler = hooks.samples.sampler_for(
            dataloader,
            shuffle=shuffle and not trainer.overfit_batches,
            epoch=trainer.fit_loop.epoch_progress.current.processed,
            world=trainer.distributed_sampler_kwargs if distributed else None,
        )
        if sampler is not None:
            update = sys.modules[type(connector).__module__]._update_dataloader
            return update(dataloader, sampler, mode=mode)
    return original(connector, dataloader, shuffle, mode)


def set_batches_done(trainer: Any, count: int) -> None:
    """Have the counters of batches within the epoch say that so many are done."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    moved = count - current.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + moved)


# -- what is not replaced ------------------------------------------------------------------------

_STRATEGY = ("_parallel_devices", "_num_nodes_flag", "_configure_launcher")
_FABRIC_NEEDED: tuple[tuple[Feature, str, *tuple[str, ...]], ...] = (
    (Feature.WORLD, "fabric:Fabric.__init__", "self._connector = ", "_configure_callbacks(", "_prepare_run_method()"),
    (Feature.WORLD, "connector:_Connector._lazy_init_strategy", *_STRATEGY),
    (Feature.WORLD, "strategies.launchers.subprocess_script:_SubprocessScriptLauncher.launch", "validate_settings"),
)  # fmt: skip
_PYTORCH_NEEDED: tuple[tuple[Feature, str, *tuple[str, ...]], ...] = (
    (Feature.WORLD, "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy", *_STRATEGY),
    (Feature.WORLD, "trainer.trainer:Trainer.__init__",
     "_callback_connector.on_trainer_init(", "_data_connector.on_trainer_init("),
    (Feature.SIGNALS, f"{_SIGNAL_CONNECTOR}.teardown", "self._original_handlers"),
    (Feature.NOTICES, f"{_EPOCH_LOOP}.advance", "self._skip_next_val = True", "self.restarted_on_last"),
    (Feature.NOTICES, f"{_EPOCH_LOOP}._should_accumulate", "self"),
    (Feature.NOTICES, f"{_EPOCH_LOOP}._should_check_val_fx", "data_fetcher"),
    (Feature.NOTICES, f"{_EPOCH_LOOP}._num_ready_batches_reached", "self"),
    (Feature.RESUME, f"{_CHECKPOINTS}._restore_modules_and_callbacks",
     "self.resume_start(checkpoint_path, weights_only=weights_only)", "self.restore_callbacks()"),
    (Feature.RESUME, "plugins.io.async_plugin:AsyncCheckpointIO",
     "self._executor = ThreadPoolExecutor(max_workers=1)", "self._error = ex"),
    (Feature.MEMORY, f"{_CHECKPOINTS}.dump_checkpoint", "weights_only", "optimizer_states"),
    (Feature.SAMPLER, "loops.fit_loop:_FitLoop.update_restart_stage", "RESTARTED_MID_EPOCH"),
    (Feature.SAMPLER, f"{_EPOCH_LOOP}.on_run_start", "data_fetcher.fetched += self.batch_progress.current.ready"),
)  # fmt: skip
"""Functions that the features depend on and do not replace, and texts that their sources have to contain."""

for _patches, _needed in ((FABRIC, _FABRIC_NEEDED), (PYTORCH, _PYTORCH_NEEDED)):
    for _feature, _place, *_texts in _needed:
        _patches.need(_feature, _place, *_texts)

# -- all of it -----------------------------------------------------------------------------------

_fitting: dict[str, frozenset[Feature]] = {}
"""The features that fit each of the packages that have been adapted."""


def adapt() -> frozenset[Feature]:
    """Replace what the features need in whatever of Lightning is loaded, and return the features in force."""
    roots = [root for root in loaded(FABRICS + PYTORCHES) if root not in _fitting]
    features = wanted(LIGHTNING_DISABLE, Feature, quietly=not roots)
    for root in roots:
        _fitting[root] = features
        versions = str(sys.modules[root].__version__), TESTED
        _fitting[root] = (FABRIC if root in FABRICS else PYTORCH).apply(root, versions, features)
    return features.intersection(*_fitting.values())


def loaded(roots: tuple[str, ...]) -> Iterator[str]:
    """Yield those of these packages that are imported completely."""
    for root in roots:
        package = sys.modules.get(root)
        if package is not None and hasattr(package, "__version__"):
            yield root


def hooks_of(trainer: Any) -> Any:
    """Return the integration's callback of this trainer; None without one, as while Lightning's tuner runs."""
    return next(
        (callback for callback in trainer.callbacks if getattr(callback, "is_elastic_agent", False)), None
    )


def signature_of(trainer: Any) -> Signature:
    """Describe the training that ``fit`` begins, as far as it is known before weights are restored."""
    settings = {name: getattr(trainer, name, None) for name in _SETTINGS}
    module, data = trainer.lightning_module, trainer.datamodule
    source = trainer.fit_loop._data_source.instance
    given = not any(source is known for known in (None, module, data))
    loaders = signature.of_data("data", source) if given else {}
    is_sharded = trainer.strategy.restore_checkpoint_after_setup
    return {
        **signature.of_seed(),
        **signature.of_values("trainer", settings),
        **(signature.of_sharded_model(module) if is_sharded else signature.of_model(module)),
        **(signature.of_optimizers(trainer.optimizers) if is_sharded else {}),
        **signature.of_values("hyperparameters", module.hparams),
        **(signature.of_data("datamodule", data) if data is not None else {}),
        **signature.of_values("datamodule.hyperparameters", getattr(data, "hparams", {})),
        **loaders,
    }


def signature_of_data(trainer: Any) -> Signature:
    """Describe the training data as they are when training starts: the module or its data module may have made them."""
    if trainer.reload_dataloaders_every_n_epochs:  # they differ from epoch to epoch
        return {}
    loaders = enumerate(trainer.fit_loop._combined_loader.flattened)
    lengths = [signature.of_length(str(index), getattr(loader, "dataset", None)) for index, loader in loaders]
    return signature.of_values("data", {name: length for found in lengths for name, length in found.items()})


def is_trial(trainer: Any) -> bool:
    """Return whether this call of ``fit`` is the tuner's, which ends before training begins."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


def restarted_mid_epoch(trainer: Any) -> bool:
    """Return whether training begins within an epoch, whose start hooks are not called again."""
    return bool(trainer.fit_loop.restarted_mid_epoch)


def begin_next_epoch(trainer: Any) -> None:
    """Forget that a complete epoch was restored, which Lightning takes for one that is to be continued."""
    fit_loop: Any = trainer.fit_loop
    base: Any = type(fit_loop).__mro__[1]  # the setter of _FitLoop itself ignores False if max_steps is given
    base.restarting.fset(fit_loop, False)
    # Otherwise the epoch would use the iterator made before the restoration.
    fit_loop._resuming_from_checkpoint = False


def validated_last(trainer: Any) -> bool:
    """Return whether the last step that was taken was followed by a validation."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def current_batches(loops: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of batches within the epoch, in a checkpoint's ``loops``."""
    counters: dict[str, Any] = loops["fit_loop"]["epoch_loop.batch_progress"]["current"]
    return counters
